"""confluent-kafka's clients, made safe for forks, and calls of them with deadlines.

A fork does not copy a client's threads. A forked child in which a client is freed (by a garbage collection, or at its
exit) waits for the threads and dies of a segmentation fault. So a child keeps all clients, and never uses them.
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

# Without a handler Python would print the clients' log lines in a program that configures no logging.
logging.getLogger("txnbridge.kafka").addHandler(logging.NullHandler())

# The shortest time limit of a call: the clients accept no zero, and no broker answers faster.
LEAST_SECONDS = 0.01
# The time after which a request is repeated: a broker that leaves the cluster meanwhile never answers.
PATIENCE = 3.0

# The size of a producer's buffer for a slow broker. If the buffer is full, a sender waits for room.
_BUFFER_KBYTES = 64 * 1024

_GROUP_METADATA = b"CGMDv2:"  # how confluent-kafka's `consumer_group_metadata` begins

_clients: weakref.WeakSet[Any] = weakref.WeakSet()


def seconds(deadline: Deadline) -> float:
    """Return the time left until a deadline as a time limit for a client's call, which must not be zero."""
    return max(deadline.left(), LEAST_SECONDS)


def ignore(error: KafkaError) -> None:
    """Ignore an error in a client's `error_cb`: the client also logs it, and the failing call raises its own error."""


def settle(client: Any, topic: str, deadline: Deadline) -> None:
    """Wait until a new client has replaced its bootstrap connection and has the metadata of a topic, if it exists.

    A client drops its first connection when it has learned the brokers, and loses the requests on it: it repeats one
    for a coordinator or a producer id after half a second, for the leaders of partitions after three, for the end of a
    partition sometimes never. It repeats only a metadata request at once, so two are made: the first answer may still
    come on the dropped connection, the second does not. Errors are ignored, because the next call raises them again.
    """
    with suppress(KafkaException):
        for _ in range(2):
            refresh_metadata(client, deadline, topic)


def refresh_metadata(client: Any, deadline: Deadline, topic: str | None = None) -> ClusterMetadata:
    """Refresh a client's metadata of one topic or all; repeat after a time-out. Raise the client's `KafkaException`."""
    while True:
        try:
            metadata: ClusterMetadata = client.list_topics(topic, min(seconds(deadline), PATIENCE))
        except KafkaException as error:
            if error.args[0].code() != KafkaError._TIMED_OUT or deadline.expired:
                raise
        else:
            return metadata


def result_of(answer: Future[Any], what: str, deadline: Deadline) -> Any:
    """Return a client's future result. Raise its `KafkaException`, or `DeadlineExceeded` if the future is late."""
    try:
        # The client ends the future at the deadline; it checks its clock only a few times a second.
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
    """Return a new producer that calls `failed` for each message that it could not store.

    `failed` must not be a method of the object that holds the producer: in such a reference cycle the producer would
    keep its connections until a garbage collection. Raise `InvalidOption` if the client refuses the settings.
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
    """Return a message's timestamp for `produce`, 0 if it is None. Raise `InvalidOption` if it is below 1."""
    if timestamp is None:
        return 0  # the client then takes the current time
    if timestamp < 1:
        raise InvalidOption(f"a timestamp is milliseconds since 1970, at least 1, not {timestamp}")
    return timestamp


def too_large(topic: str) -> InvalidOption:
    return InvalidOption(f"a message to {topic} is larger than the client's bound (message.max.bytes)")


@dataclass(frozen=True)
class GroupMembership:
    """A group member's identity at its coordinator; for no member the generation is -1 and the name is empty."""

    group: str
    generation: int
    name: str
    instance: str | None


def membership_of(metadata: bytes) -> GroupMembership:
    """Parse confluent-kafka's serialised group metadata. Raise `BackendMissing` if its format is unknown."""
    try:
        if not metadata.startswith(_GROUP_METADATA):
            raise ValueError
        (generation,) = struct.unpack_from("<i", metadata, len(_GROUP_METADATA))
        group, name, rest = metadata[len(_GROUP_METADATA) + 4 :].split(b"\0", 2)
        # The last field begins with a byte: 1 if there is no group instance id, 0 if one follows.
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
        # With one more reference than Python objects hold, a client is not freed even at the interpreter's exit.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


os.register_at_fork(after_in_child=_keep)
