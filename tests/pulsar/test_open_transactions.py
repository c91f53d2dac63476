"""Tests of brokers' answers by REST about transactions: one status has two meanings."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from typing import Any

import pytest
from txnbridge_pulsar.admin import open_transactions, repair
from txnbridge_pulsar.admin.rest import Rest
from txnbridge_pulsar.client import CorruptEntry, TxnId
from txnbridge_pulsar.cluster import ClusterAccess
from txnbridge_pulsar.outcome import proof
from txnbridge_pulsar.settings import Timing
from txnbridge_pulsar.write import fence

from tests.failing import answer_calls, raising
from tests.in_time import within
from tests.pulsar.kit import SOON, http_server, settings_for
from txnbridge.errors import BrokerUnavailable, DeadlineExceeded, InvalidState, NotFound
from txnbridge.spi import Deadline, Emitter

TXN = TxnId(0, 15)
HELD, UNLOADED = "persistent://public/default/held", "persistent://public/default/unloaded"
# As brokers of 4.0 and 4.2 say it.
ENDED = (404, {"reason": "The transaction with this txdID `(0,15)`not found"})
OF_ANOTHER = (404, {"reason": "The transaction with this txdID `(0,150)`not found"})
NO_COORDINATOR = (404, {"reason": "Transaction coordinator with id 0 not found!"})
NOT_LOADED = (500, {"reason": f"Topic not found {UNLOADED}"})
NOT_LOADED_WITH_STACK = (
    500,
    {"reason": f"\n --- An unexpected error --- \n\nMessage: Topic not found {UNLOADED}\n\nStacktrace:\n\nat x"},
)
BROKEN = (500, {"reason": "java.lang.NullPointerException"})
OPEN = (200, {"txnId": "(0,15)", "status": "OPEN", "openTimestamp": 1000, "timeoutAt": 60_000})
LISTED = (200, {"(0,15)": OPEN[1]})
SILENCE = (0, None)


class Answering(BaseHTTPRequestHandler):
    """Gives the answers of a path's last name but numbers, one after another, and the last of them again and again."""

    def do_GET(self) -> None:
        server: Any = self.server
        name = next(each for each in server.answers if each in self.path)
        server.asked.append(name)
        answers = server.answers[name]
        status, body = answers.pop(0) if len(answers) > 1 else answers[0]
        if not status:
            server.over.wait()
            return
        self.send_response(status)
        for header, value in server.headers.get(name, {}).items():
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass


class Asked:
    """A cluster that answers by REST alone, and of which it is kept what was loaded."""

    def __init__(self, server: Any, timing: Timing | None) -> None:
        settings = settings_for(
            "pulsar://127.0.0.1:1/public/default",
            admin_url=f"http://127.0.0.1:{server.server_port}",
            timing=timing or Timing(),
        )
        self.asked: list[str] = server.asked
        self.loaded: list[str] = []
        self.topics = [HELD, UNLOADED]
        self.rest = Rest(settings)
        client: Any = SimpleNamespace(transactions=SimpleNamespace(connect=lambda timeout: 1), read=self._read)
        topics: Any = SimpleNamespace(all_concrete=lambda deadline: self.topics)
        self.cluster = ClusterAccess("tests", settings, client, topics, self.rest, Emitter("tests", ()))

    def _read(self, topic: str, timeout: float) -> Any:
        self.loaded.append(topic)
        return SimpleNamespace(close=lambda timeout: None)


@contextmanager
def answering(headers: dict[str, Any] | None = None, timing: Timing | None = None, **answers: Any) -> Iterator[Asked]:
    kept, over = {name: list(given) for name, given in answers.items()}, threading.Event()
    with http_server(Answering, answers=kept, headers=headers or {}, asked=[], over=over) as server:
        try:
            yield Asked(server, timing)
        finally:
            over.set()


@pytest.mark.parametrize("refusal", [NOT_LOADED, NOT_LOADED_WITH_STACK], ids=["alone", "with a stack"])
def test_a_topic_that_is_not_loaded_is_loaded_and_the_question_asked_again(refusal: Any) -> None:
    with answering(slowTransactions=[refusal, refusal, LISTED]) as asked:
        (found,) = open_transactions.list_open(asked.cluster, Deadline(SOON))
        assert (found.txn, found.since, found.expires_at) == (TXN, 1000, 61_000)
        assert asked.loaded == [UNLOADED] * 2


def test_where_brokers_say_nothing_all_topics_are_loaded() -> None:
    with answering(timing=Timing(listing_seconds=0.5), slowTransactions=[SILENCE, LISTED]) as asked:
        assert [found.txn for found in open_transactions.list_open(asked.cluster, Deadline(SOON))] == [TXN]
        assert sorted(asked.loaded) == [HELD, UNLOADED]


@pytest.mark.parametrize("refusal", [NO_COORDINATOR, BROKEN], ids=["no coordinator", "broken"])
def test_any_other_refusal_is_passing_or_told_at_the_deadline(refusal: Any) -> None:
    with answering(slowTransactions=[refusal, LISTED]) as asked:
        assert len(open_transactions.list_open(asked.cluster, Deadline(SOON))) == 1
        assert not asked.loaded
    with answering(slowTransactions=[refusal]) as asked:
        deadline = Deadline(1)
        with pytest.raises(BrokerUnavailable, match=refusal[1]["reason"].split()[0]):
            open_transactions.list_open(asked.cluster, deadline)
        assert not asked.loaded and len(asked.asked) > 1


def test_names_and_records_of_strangers_do_not_hide_open_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    unreadable = SimpleNamespace(id=None, messages=raising(CorruptEntry("broken")))
    for records in (fence, proof):
        answer_calls(monkeypatch, records, "last_entry", unreadable)
    topics: Any = {"persistent://public/default/_txnbridge-marker-=FF.p0": {}}
    with answering(slowTransactions=[(200, {"(0,15)": {**OPEN[1], "producedPartitions": topics}})]) as asked:
        vars(asked.cluster.topics)["existing"] = lambda *_: ("a topic",)
        assert [found.txn for found in open_transactions.list_open(asked.cluster, Deadline(SOON))] == [TXN]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (OPEN, InvalidState),
        (NOT_LOADED, InvalidState),
        (NO_COORDINATOR, BrokerUnavailable),
        (OF_ANOTHER, BrokerUnavailable),
        (SILENCE, DeadlineExceeded),
        (ENDED, NotFound),  # it would be repaired, if it held anything back
    ],
    ids=["open", "not loaded", "no coordinator", "of another", "silence", "ended"],
)
def test_only_a_transaction_that_its_coordinator_says_has_ended_is_repaired(answer: Any, error: type[Exception]):
    with answering(transactionMetadata=[answer]) as asked:
        asked.topics = []
        with pytest.raises(error) as raised:
            repair.repair(asked.cluster, "0:15", Deadline(1 if answer is SILENCE else SOON))
        assert raised.type is error


def test_a_repair_asks_no_broker_about_a_coordinator_that_never_existed() -> None:
    with answering(transactionMetadata=[OPEN]) as asked:
        asked.topics = []
        with pytest.raises(NotFound):
            repair.repair(asked.cluster, "1:15", Deadline(SOON))
        assert not asked.asked


@contextmanager
def holding(*answers: Any) -> Iterator[Asked]:
    """Hold a topic back by the transaction, whose coordinator then gives these answers."""
    with answering(
        headers={"entry": {"X-Pulsar-txnid-most-bits": "0", "X-Pulsar-txnid-least-bits": "15"}},
        timing=Timing(coordinator_seconds=0.5),
        transactionMetadata=answers,
        transactionBufferStats=[(200, {"ongoingTxnSize": 1, "maxReadPosition": "7:0"})],
        internalStats=[(200, {"ledgers": [{"ledgerId": 7, "entries": 0}], "currentLedgerEntries": 2})],
        entry=[(200, "")],
        transactionInBufferStats=[(200, {"startPosition": "7:1"})],
    ) as asked:
        asked.topics = [HELD]
        yield asked


@pytest.mark.parametrize(
    ("answer", "found"),
    [(ENDED, [(HELD, TXN)]), (OPEN, []), (NOT_LOADED, []), (SILENCE, [])],
    ids=["ended", "open", "not loaded", "silence"],
)
def test_a_topic_is_held_back_for_good_only_by_what_its_coordinator_says_to_have_ended(answer: Any, found: Any) -> None:
    with holding(answer) as asked:
        with within(0.5):
            assert list(repair.held_back(asked.cluster, Deadline(100))) == found
        assert "transactionMetadata" in asked.asked


def test_a_coordinator_that_is_not_there_proves_nothing_of_a_topic() -> None:
    with holding(NO_COORDINATOR) as asked, pytest.raises(BrokerUnavailable, match="id 0 not found"):
        list(repair.held_back(asked.cluster, Deadline(SOON)))
