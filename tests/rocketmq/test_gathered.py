"""RocketMQ keeps the contract of transactions also if each one is gathered, although it is alone."""

from __future__ import annotations

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.plugin import topic  # noqa: F401
from txnbridge_conformance.suite.fencing import *  # noqa: F403
from txnbridge_conformance.suite.messages import *  # noqa: F403
from txnbridge_conformance.suite.transactions import *  # noqa: F403

from txnbridge._write.group_commit import GroupCommit


@pytest.fixture(scope="module")
def txnbridge_url(rocketmq_broker: brokers.RocketMQ) -> str:
    return f"{rocketmq_broker.url}?group_commit=true"


@pytest.fixture(autouse=True)
def _known_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gather messages also for a topic that is new; only its first partition is sure to be there."""
    monkeypatch.setattr(GroupCommit, "takes", lambda _, name, partition: not partition)
