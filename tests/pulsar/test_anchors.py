"""Tests of anchors, the older empty transactions that keep a coordinator's low water mark behind others."""

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from txnbridge_pulsar.client import TxnId
from txnbridge_pulsar.outcome import anchors as module
from txnbridge_pulsar.outcome.anchors import Anchors

from tests.interrupts import interrupted_everywhere
from txnbridge.spi import Deadline

pytestmark = pytest.mark.offline


class Coordinators:
    """Two coordinators that begin and abort whatever is asked."""

    def __init__(self) -> None:
        self.begun: dict[TxnId, int] = {}  # milliseconds until the time-out
        self.aborted: list[TxnId] = []
        self.patience = -1.0  # the seconds that the last abort might have taken
        self._numbers = count()

    def begin(self, ttl_ms: int, timeout: float, coordinator: int | None = None) -> TxnId:
        number = next(self._numbers)
        txn = TxnId(number % 2 if coordinator is None else coordinator, number)
        self.begun[txn] = ttl_ms
        return txn

    def send_abort(self, txn: TxnId, timeout: float) -> None:
        self.aborted.append(txn)
        self.patience = timeout


@pytest.fixture
def coordinators() -> Coordinators:
    return Coordinators()


@pytest.fixture
def anchors(coordinators: Coordinators) -> Anchors:
    cluster: Any = SimpleNamespace(client=SimpleNamespace(transactions=coordinators))
    return Anchors(cluster)


def test_an_anchor_is_older_and_ends_after_all_transactions_behind_it(anchors, coordinators, monkeypatch):
    first, second = (anchors.begin(lambda: 30, 1) for _ in range(2))
    (anchor,) = anchors.open()
    assert anchor < first < second and anchor.most == first.most == second.most
    assert coordinators.begun[anchor] > coordinators.begun[first]
    monkeypatch.setattr(module, "_USE_SECONDS", 0)
    monkeypatch.setattr(module, "_KEEP_SECONDS", 0)
    anchors.ended(first)
    anchors.drop_unused(())
    anchors.ended(second)
    anchors.drop_unused({second})
    assert not coordinators.aborted
    later = anchors.begin(lambda: 30, 1)
    anchors.drop_unused(())
    assert coordinators.aborted == [anchor]
    assert anchors.open() == [TxnId(later.most, later.least - 1)]


def test_a_transaction_that_an_anchor_would_not_outlast_gets_another_one(anchors, coordinators):
    short, long = anchors.begin(lambda: 1, 1), anchors.begin(lambda: 100, 1)
    assert [txn.least for txn in anchors.open()] == [short.least - 1, long.least - 1]


def test_the_anchor_of_a_prepared_transaction_is_left_to_those_who_end_it(anchors, coordinators):
    shared = anchors.begin(lambda: 30, 1)
    prepared = anchors.begin(lambda: 30, 1, alone=True)
    assert anchors.hand_over(prepared) == (prepared.most, prepared.least - 1)
    anchors.ended(shared)
    anchors.drop_unused((), Deadline(0))
    assert [txn.least for txn in coordinators.aborted] == [shared.least - 1]
    assert coordinators.patience == 0  # as long as its caller has time


def test_an_exception_of_a_signal_handler_keeps_no_later_transaction_from_its_anchor(anchors):
    def begin() -> None:
        anchors.begin(lambda: 30, 1)

    assert interrupted_everywhere(begin, begin, ["anchors.py", "deadline.py"])


def test_an_anchor_that_has_timed_out_is_handed_over_like_another_one(anchors, monkeypatch):
    monkeypatch.setattr(module, "_MARGIN_SECONDS", -40)
    prepared = anchors.begin(lambda: 30, 1, alone=True)
    anchors.drop_unused(())
    assert not anchors.open() and anchors.hand_over(prepared) < prepared
