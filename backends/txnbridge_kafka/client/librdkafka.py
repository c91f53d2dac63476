"""confluent-kafka's clients, made safe for forks, and calls of them with deadlines.

A client's threads stay behind in the parent. A forked child in which a client is freed (by a garbage collection, or at
its end) waits for them and dies of a segmentation fault. So a child keeps all clients, and never uses them.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import confluent_kafka
import confluent_kafka.admin
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin._metadata import ClusterMetadata

from txnbridge.errors import BackendMissing, DeadlineExceeded, InvalidOption
from txnbridge.spi import Deadline
from txnbridge_kafka.settings import KafkaSettings

# A program that configures no logging must not find the clients' lines on its screen.
logging.getLogger("txnbridge.kafka").addHandler(logging.NullHandler())

# The clients take no time limit of zero, and no broker answers in less than this.
LEAST_SECONDS = 0.01
# A request to a broker that leaves the cluster meanwhile is never answered: repeating it helps.
PATIENCE = 3.0

# The bound of what waits in this process for a slow broker; then a sender waits for room.
_BUFFER_KBYTES = 64 * 1024

_GROUP_METADATA = b"CGMDv2:"  # how confluent-kafka's `consumer_group_metadata` begins

_clients: weakref.WeakSet[Any] = weakref.WeakSet()


def seconds(deadline: Deadline) -> float:
    """Return the time left as a time limit that the clients take."""
    return max(deadline.left(), LEAST_SECONDS)


def ignore(error: KafkaError) -> None:
    """Ignore what a client reports besides: its log has it too, and the call that suffers from it says so."""


def settle(client: Any, topic: str, deadline: Deadline) -> None:
    """Wait until a new client has its lasting connection; then it also knows the topic, if there is one.

    A client drops its first connection as soon as it has learned of the brokers, and forgets what it has asked there:
    it asks for a coordinator or a producer id again after half a second, for the leaders of partitions after three, for
    the end of a partition sometimes not at all. Only the request for metadata it repeats at once. The first answer may
    still come on the connection that is dropped, the second does not. If no broker is there, the next call says so.
    """
    with suppress(KafkaException):
        for _ in range(2):
            refresh_metadata(client, deadline, topic)


def refresh_metadata(client: Any, deadline: Deadline, topic: str | None = None) -> ClusterMetadata:
    """Let the client learn of a topic, or of all; repeat it if no answer comes. Raise `KafkaException`."""
    while True:
        try:
            metadata: ClusterMetadata = client.list_topics(topic, min(seconds(deadline), PATIENCE))
        except KafkaException as error:
            if error.args[0].code() != KafkaError._TIMED_OUT or deadline.expired:
                raise
        else:
            return metadata


def result_of(answer: Future[Any], what: str, deadline: Deadline) -> Any:
    """Return the result of a client's future. Raise `KafkaException`, and `DeadlineExceeded` if the client is late."""
    try:
        # The client ends it by the deadline; it looks at its clock a few times a second.
        return answer.result(deadline.left() + 1)
    except FutureTimeoutError:
        raise DeadlineExceeded(f"{what} took longer than the deadline of {deadline.seconds:g} s") from None


class ConfluentProducer(confluent_kafka.Producer):
    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        _clients.add(self)


class ConfluentConsumer(confluent_kafka.Consumer):
    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        _clients.add(self)


class ConfluentAdminClient(confluent_kafka.admin.AdminClient):
    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        _clients.add(self)


def make_producer(
    settings: KafkaSettings, failed: Callable[[KafkaError], object], own: Mapping[str, Any]
) -> ConfluentProducer:
    """Make a producer of messages that calls `failed` for each message that it could not store.

    `failed` may be no method of the producer's holder: that would be part of a reference cycle, and the producer would
    keep its connections until the next garbage collection. Raise `InvalidOption` for settings that the client refuses.
    """

    def delivered(error: KafkaError | None, message: object) -> None:
        if error is not None:
            failed(error)

    try:
        return ConfluentProducer(
            {
                "queue.buffering.max.kbytes": _BUFFER_KBYTES,
                **settings.client,
                **settings.producer,
                "partitioner": "murmur2_random",
                "on_delivery": delivered,
                "delivery.report.only.error": True,
                "error_cb": ignore,
                **own,
            }
        )
    except KafkaException as error:
        raise InvalidOption(f"the client refuses these settings: {error.args[0].str()}") from error


def milliseconds(timestamp: int | None) -> int:
    """Return a message's timestamp as producers take it. Raise `InvalidOption`."""
    if timestamp is None:
        return 0  # the client takes the present time
    if timestamp < 1:
        raise InvalidOption(f"a timestamp is milliseconds since 1970, at least 1, not {timestamp}")
    return timestamp


def too_large(topic: str) -> InvalidOption:
    return InvalidOption(f"a message to {topic} is larger than the client's bound (message.max.bytes)")


@dataclass(frozen=True)
class GroupMembership:
    """A consumer as its group's coordinator knows it; outside of a group the generation is -1 and the name empty."""

    group: str
    generation: int
    name: str
    instance: str | None


def membership_of(metadata: bytes) -> GroupMembership:
    """Read confluent-kafka's own format of a membership. Raise `BackendMissing` for another format."""
    try:
        if not metadata.startswith(_GROUP_METADATA):
            raise ValueError
        (generation,) = struct.unpack_from("<i", metadata, len(_GROUP_METADATA))
        group, name, rest = metadata[len(_GROUP_METADATA) + 4 :].split(b"\0", 2)
        # One byte says that no group instance id follows.
        instance = None if rest == b"\1" else rest[1:-1].decode()
        if instance is not None and (rest[:1], rest[-1:]) != (b"\0", b"\0"):
            raise ValueError
        return GroupMembership(group.decode(), generation, name.decode(), instance)
    except (ValueError, struct.error) as error:
        raise BackendMissing(
            "this version of confluent-kafka describes the members of a group in a way that is not known here; install"
            " the version that txnbridge asks for"
        ) from error


def _keep() -> None:
    for client in list(_clients):
        # A counted reference that no Python object holds survives the interpreter's end.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


os.register_at_fork(after_in_child=_keep)
