"""Pulsar keeps the contract of transactions also if each one is gathered, although it is alone."""

from __future__ import annotations

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.plugin import topic  # noqa: F401
from txnbridge_conformance.suite.fencing import *  # noqa: F403
from txnbridge_conformance.suite.messages import *  # noqa: F403
from txnbridge_conformance.suite.transactions import *  # noqa: F403

from tests.pulsar.kit import url_of
from txnbridge._write.group_commit import GroupCommit


@pytest.fixture(scope="module")
def txnbridge_url(pulsar_under_test: brokers.Pulsar) -> str:
    return url_of(pulsar_under_test, half_check_seconds=0.5, group_commit="true")


@pytest.fixture(autouse=True)
def _known_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gather messages also for a topic that is new; only its first partition is sure to be there."""
    monkeypatch.setattr(GroupCommit, "takes", lambda _, name, partition: not partition)
