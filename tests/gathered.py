"""The contract of transactions if each one is gathered, although it is alone: a test module imports all of this."""

import pytest
from txnbridge_conformance.plugin import topic  # noqa: F401
from txnbridge_conformance.suite.fencing import *  # noqa: F403
from txnbridge_conformance.suite.messages import *  # noqa: F403
from txnbridge_conformance.suite.transactions import *  # noqa: F403

from txnbridge._write.group_commit import GroupCommit


@pytest.fixture(autouse=True)
def known_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gather messages also for a topic that is new; only its first partition is sure to be there."""
    monkeypatch.setattr(GroupCommit, "takes", lambda _, name, partition: not partition)
