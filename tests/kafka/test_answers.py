"""What an answer of the broker means for a request: it was carried out, it is repeated, or it is refused.

The answers are made up, each as Kafka's own source gives it.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace as Fields
from typing import Any

import pytest
from txnbridge_kafka.client import wire
from txnbridge_kafka.client.connection import AttemptError
from txnbridge_kafka.client.connections import Connections
from txnbridge_kafka.client.requests import Requests
from txnbridge_kafka.topics import KafkaTopics

from tests.kafka.test_settings import read
from txnbridge.spi import Deadline

pytestmark = pytest.mark.offline

LOST = None  # the request was sent, and its answer is lost
UNKNOWN_TOPIC, NOT_LEADER, DENIED, INVALID_PARTITIONS, KAFKA_STORAGE_ERROR = 3, 6, 29, 37, 56


def topic(name: str, code: int = 0, leader: int = 1) -> Fields:
    """Return what metadata has of a topic of one partition; of one that may not be seen it has no partitions."""
    led = [] if code else [Fields(partition_index=0, leader_id=leader)]
    return Fields(name=name, error_code=code, partitions=led)


def ends(code: int) -> Fields:
    return Fields(topics=[Fields(name="orders", partitions=[Fields(partition_index=0, error_code=code, offset=0)])])


class Cluster:
    """A broker that answers each request but Metadata with the next of `answers`."""

    def __init__(self, *topics: Fields) -> None:
        self.topics, self.answers = list(topics), list[Any]()

    def send(self, connections: object, node: int, request: wire.Request) -> Any:
        if request.api is wire.METADATA:
            return Fields(controller_id=1, brokers=[], topics=self.topics)
        answer = self.answers.pop(0)
        if answer is LOST:
            raise AttemptError("the broker closed the connection")
        return answer


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster(topic("orders"))
    monkeypatch.setattr(Connections, "connect", lambda *asked: None)
    monkeypatch.setattr(Connections, "send", lambda *asked: cluster.send(*asked))
    return cluster


@pytest.fixture
def requests() -> Iterator[Requests]:
    with closing(Requests(read())) as requests:
        yield requests


def change(code: int) -> Fields:
    result = [Fields(error_code=code, error_message=None)]
    return Fields(responses=result, results=result)


@pytest.mark.parametrize(
    ("ask", "repeated"),
    [
        (lambda requests: requests.delete_topic("orders", Deadline(30)), UNKNOWN_TOPIC),
        (lambda requests: requests.grow_topic("orders", 3, Deadline(30)), INVALID_PARTITIONS),
    ],
    ids=["delete", "grow"],
)
def test_a_change_of_a_topic_whose_answer_is_lost_is_done_if_the_second_copy_finds_it_done(
    cluster: Cluster, requests: Requests, ask: Callable[[Requests], Any], repeated: int
) -> None:
    cluster.answers = [LOST, change(repeated), change(repeated), LOST, change(DENIED)]
    assert [ask(requests).code for _ in range(3)] == [0, repeated, DENIED]


def test_offsets_are_asked_for_again_when_a_leaders_disk_has_failed(cluster: Cluster, requests: Requests) -> None:
    cluster.answers = [ends(code) for code in (KAFKA_STORAGE_ERROR, 0)]
    assert requests.ends([("orders", 0)], Deadline(30)) == {("orders", 0): 0}


def test_dropping_records_follows_a_leader_that_has_moved(cluster: Cluster, requests: Requests) -> None:
    cluster.answers = [ends(NOT_LEADER), ends(0)]
    KafkaTopics(read(), requests).drop_records(("orders", 0), 5, Deadline(30))
    assert not cluster.answers
