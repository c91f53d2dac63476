"""The ledger that a backend is given, for one whose broker keeps no evidence of its own."""

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import pytest

from tests.core.decisions_kit import MemoryLog
from tests.core.toy import ToyBackend, ToyBroker, ToyWriter
from tests.inside import logs_of
from txnbridge import Bridge, TokenState, connect, plugins, spi


class LedgerWriter(ToyWriter):
    """Notes in the ledger what it prepares, as a backend does whose broker forgets."""

    def __init__(self, ledger: spi.Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def begin(self, begin: spi.Begin) -> None:
        self._begun = begin
        self._log = self._ledger.begin(begin.deadline)

    def prepare(self, deadline: spi.Deadline) -> None:
        self._ledger.record("prepare", self._begun.transaction, {"epoch": 3}, deadline)

    def evidence(self) -> spi.Evidence:
        return spi.Evidence({}, 0, log=self._log)


class LedgerBroker(ToyBroker):
    logs: dict[str, MemoryLog]
    ledger: spi.Ledger

    def open_writers(
        self, identity: spi.Identity, count: int, ledger: spi.Ledger, deadline: spi.Deadline
    ) -> list[spi.Writer]:
        self.ledger = ledger
        ledger.opened({"writers": count}, deadline)
        return super().open_writers(identity, count, ledger, deadline)

    def prepare_writer(self, identity: spi.Identity, ledger: spi.Ledger, deadline: spi.Deadline) -> spi.Writer:
        return LedgerWriter(ledger)

    def status(self, token: spi.Token, ledger: spi.Ledger, deadline: spi.Deadline) -> spi.Status:
        noted = [entry.kind for entry in ledger.find(token.transaction, deadline)]
        return spi.Status(TokenState.PREPARED if "prepare" in noted else TokenState.ABORTED)

    def decision_log(self, name: str, deadline: spi.Deadline) -> spi.DecisionLog:
        return self.logs.setdefault(name, MemoryLog())


class LedgerBackend(ToyBackend):
    def __init__(self) -> None:
        super().__init__()
        self.logs: dict[str, MemoryLog] = {}

    def open(self, url: spi.Url, options, context: spi.Context, deadline: spi.Deadline) -> ToyBroker:
        broker = LedgerBroker(self.capabilities)
        broker.logs = self.logs
        self.brokers.append(broker)
        return broker


@pytest.fixture
def backend():
    backend = LedgerBackend()
    with plugins.registered(backend):
        yield backend


def prepare(bridge: Bridge) -> str:
    with bridge.transaction(prepare=True) as txn:
        pass
    return str(txn.token)


def test_a_token_says_where_its_evidence_is_and_any_process_finds_it(backend: LedgerBackend) -> None:
    with connect("toy:", transactional_id="billing", application="shop") as owner:
        token = prepare(owner)
    assert spi.Token.parse(token).log is not None
    with connect("toy:", application="another") as stranger:
        assert stranger.status(token).state is TokenState.PREPARED
    assert set(backend.logs) == {"shop"}


def test_a_log_is_opened_only_when_the_ledger_is_used(backend: LedgerBackend) -> None:
    with connect("toy:") as bridge:
        assert backend.logs == {}
        with bridge.transaction():
            assert len(backend.logs) == 1


def test_an_entry_that_a_broker_writes_as_it_is_closed_is_in_the_log(backend):
    with connect("toy:", transactional_id="billing", application="shop") as bridge, bridge.transaction():
        (broker,) = backend.brokers
        broker.close = lambda deadline: broker.ledger.opened({"writers": 7}, deadline)
    with connect("toy:", application="shop") as bridge, closing(bridge.decisions()) as decisions:
        opening = decisions.read("billing").opening
    assert opening is not None and opening.data == {"writers": 7}


def test_neither_of_two_changes_to_a_value_at_the_same_moment_is_lost(backend: LedgerBackend) -> None:
    with connect("toy:", application="shop") as first, connect("toy:", application="shop") as second:
        values = [spi.LedgerValue(logs_of(bridge).ledger("shop", "value")) for bridge in (first, second)]
        assert values[0].read(spi.Deadline(60)) is None

        def add(at: int, change: Callable[[int], object] = lambda count: None) -> int:
            def changed(value: Mapping[str, Any] | None) -> Mapping[str, Any]:
                count = 0 if value is None else value["count"]
                change(count)
                return {"count": count + 1}

            written = values[at].update(changed, spi.Deadline(60))
            assert written is not None
            return int(written["count"])

        assert add(0) == 1
        # The second writes between the look and the write of the first, which looks again.
        assert add(0, lambda count: count == 1 and add(1)) == 3
        assert values[1].read(spi.Deadline(60)) == {"count": 3}
        assert values[0].update(lambda value: None, spi.Deadline(60)) == {"count": 3}
