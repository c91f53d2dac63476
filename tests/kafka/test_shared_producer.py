"""The clients of a decision log: a producer that several threads share, and consumers. The client is a stand-in."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
from confluent_kafka import KafkaError, KafkaException
from txnbridge_kafka import decision_log
from txnbridge_kafka.decision_log import SharedProducer
from txnbridge_kafka.settings import KafkaSettings
from txnbridge_kafka.settings.security import Access
from txnbridge_kafka.topics import KafkaTopics

from tests.failing import answer_calls
from tests.interrupts import interrupted_everywhere
from tests.kafka.mock_kit import HANG_UP, MockCluster
from tests.kafka.test_settings import read
from txnbridge._base.url import parse_url
from txnbridge.errors import AccessDenied, OutcomeUnknown
from txnbridge.spi import Deadline, Emitter

pytestmark = pytest.mark.offline

NOT_ENOUGH_REPLICAS_AFTER_APPEND, TOPIC_AUTHORIZATION_FAILED = 20, 29


class Delivered:
    def __init__(self, record: bytes) -> None:
        self._offset = int(record)

    def offset(self) -> int:
        return self._offset


class Client:
    """Each poll reports the oldest record, whose number is its offset; none while `held`."""

    def __init__(self) -> None:
        self._polling = threading.Lock()
        self.sent: list[tuple[bytes, Callable[..., None]]] = []
        self.polled_at_once = self.held = False

    def produce(self, topic: str, record: bytes, partition: int, on_delivery: Callable[..., None]) -> None:
        if record == b"refused":
            raise KafkaException(KafkaError(KafkaError._QUEUE_FULL))
        self.sent.append((record, on_delivery))

    def poll(self, timeout: float) -> int:
        if not self._polling.acquire(blocking=False):
            self.polled_at_once = True
            return 0
        try:
            reports = bool(self.sent) and not self.held
            time.sleep(0.001 if reports else min(timeout, 0.01))
            if reports:
                record, on_delivery = self.sent.pop(0)
                on_delivery(None, Delivered(record))
            return 0
        finally:
            self._polling.release()


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    made = Client()
    answer_calls(monkeypatch, decision_log, "ConfluentProducer", made)
    return made


def test_each_thread_gets_the_report_of_its_own_record_and_one_of_them_polls(client: Client) -> None:
    producer = SharedProducer({})

    def send_some(first: int) -> list[Any]:
        return [producer.send("log", b"%d" % number, Deadline(60)) for number in range(first, first + 20)]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(send_some, range(0, 800, 100)))
    assert found == [[(None, number) for number in range(first, first + 20)] for first in range(0, 800, 100)]
    assert not client.polled_at_once


def hand_over(producer: SharedProducer, client: Client) -> None:
    """Let one thread poll until its time is over, and then another one."""
    client.held = True
    client.sent.clear()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(producer.send, "log", b"1", Deadline(0.2))
        while not client.sent:
            time.sleep(0.001)
        second = pool.submit(producer.send, "log", b"2", Deadline(60))
        assert first.result() is None
        client.held = False
        assert second.result() == (None, 2)


def test_another_thread_polls_behind_one_whose_time_is_over_also_after_a_signal_handlers_exception(client, monkeypatch):
    monkeypatch.setattr(decision_log, "_POLL_SECONDS", 60)  # a thread that is not woken comes too late
    producer = SharedProducer({})

    def send() -> None:
        assert producer.send("log", b"1", Deadline(5)) == (None, 1)

    assert interrupted_everywhere(send, lambda: hand_over(producer, client), ["decision_log.py", "/deadline.py"])


def test_a_record_that_the_client_refuses_has_its_error_at_once(client: Client) -> None:
    report = SharedProducer({}).send("log", b"refused", Deadline(60))
    assert report is not None and report[0] is not None and report[0].code() == KafkaError._QUEUE_FULL


def test_a_line_that_a_client_repeats_is_logged_once_a_minute(caplog, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("txnbridge_kafka.client.librdkafka.time", SimpleNamespace(monotonic=lambda: clock[0]))
    log = logging.getLogger("txnbridge.kafka.client")
    with caplog.at_level(logging.INFO):
        for number in range(500):
            log.log(20, "%s [%s] refused (after %dms in state CONNECT)", "FAIL", "consumer-1", number)
            log.log(20, "%s [%s] refused (after %dms in state CONNECT)", "FAIL", "consumer-2", number)
        clock[0] += 60
        log.log(20, "%s [%s] refused (after %dms in state CONNECT)", "FAIL", "consumer-1", 0)
    assert [record.getMessage() for record in caplog.records] == [
        "FAIL [consumer-1] refused (after 0ms in state CONNECT)",
        "FAIL [consumer-2] refused (after 0ms in state CONNECT)",
        "FAIL [consumer-1] refused (after 0ms in state CONNECT) (499 more like it)",
    ]


def test_a_consumer_that_gets_no_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    silent, other = Mock(), Mock(**{"get_watermark_offsets.return_value": (0, 6)})
    silent.get_watermark_offsets.side_effect = KafkaException(KafkaError(KafkaError._TIMED_OUT))
    consumers = Mock(side_effect=[silent, other])
    monkeypatch.setattr(decision_log, "ConfluentConsumer", consumers)
    monkeypatch.setattr(decision_log, "_LONG_SECONDS", 0.0)
    answer_calls(monkeypatch, decision_log, "warm_up")
    topics: Any = SimpleNamespace(create_internal_topic=lambda *_: 1, require_keeping=lambda *_: True)
    settings = KafkaSettings("127.0.0.1:1", {}, Access(), 30, None, "tests", 0)
    log = decision_log.KafkaDecisionLog(settings, "app", Deadline(5), Emitter("test", ()), topics)
    assert log.end(Deadline(60)) == (5,) == log.end(Deadline(60))
    assert (consumers.call_count, consumers.close.mock_calls) == (2, [call(silent)])


@pytest.mark.parametrize("first", [NOT_ENOUGH_REPLICAS_AFTER_APPEND, HANG_UP])
def test_a_record_that_may_be_stored_is_not_called_refused_when_a_later_copy_is(first: int) -> None:
    """Its first copy was stored on too few replicas, or nobody knows; then this user lost the right to write."""
    with closing(MockCluster("_txnbridge-log-app")) as cluster:
        topics: Any = Mock(spec=KafkaTopics)
        settings = read(url=parse_url(cluster.url)[0])
        with closing(decision_log.KafkaDecisionLog(settings, "app", Deadline(5), Emitter("test", ()), topics)) as log:
            assert log.append(b"1", Deadline(20)) == (0,)
            cluster.fail("Produce", first, TOPIC_AUTHORIZATION_FAILED)
            with pytest.raises(OutcomeUnknown):
                log.append(b"2", Deadline(20))
            with pytest.raises(AccessDenied):
                log.append(b"3", Deadline(20))
