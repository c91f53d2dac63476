"""confluent-kafka's clients, which a forked child may forget.

Their threads stay behind in the parent, and a child in which one is let go (by a garbage collection, or at its end)
waits for them and dies of a segmentation fault. So a child keeps them all, and never uses them.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any

import confluent_kafka
import confluent_kafka.admin
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin._metadata import ClusterMetadata

from txnbridge.errors import DeadlineExceeded, InvalidOption
from txnbridge.spi import Deadline
from txnbridge_kafka.settings import KafkaSettings

# A program that configures no logging is not to find the clients' lines on its screen.
logging.getLogger("txnbridge.kafka").addHandler(logging.NullHandler())

# The clients take no time limit of zero, and less than this could not be answered by a broker on this machine.
LEAST_SECONDS = 0.01
# A question to a broker that leaves the cluster meanwhile is never answered: asking anew helps.
PATIENCE = 3.0

# Bounds what waits in this process for a slow broker; a sender then waits for room.
_BUFFER_KBYTES = 64 * 1024

_clients: weakref.WeakSet[Any] = weakref.WeakSet()


def seconds(deadline: Deadline) -> float:
    """What is left, as a time limit that the clients take."""
    return max(deadline.left(), LEAST_SECONDS)


def ignore(error: KafkaError) -> None:
    """For what a client reports besides: its log has it too, and the call that suffers from it says so."""


def settle(client: Any, topic: str, deadline: Deadline) -> None:
    """Wait until a new client has the connection that it will keep; then it also knows the topic, if there is one.

    The client drops the connection that it began with as soon as it has learned of the brokers, and forgets what it has
    asked there: it asks for a coordinator or a producer's id again after half a second, for the leaders of partitions
    after three, for an end of a partition sometimes not at all. Only this question it repeats at once. The first may
    still be answered on the connection that is dropped; the second is not. If no broker is there, what is asked next
    says so.
    """
    with suppress(KafkaException):
        for _ in range(2):
            refresh_metadata(client, deadline, topic)


def refresh_metadata(client: Any, deadline: Deadline, topic: str | None = None) -> ClusterMetadata:
    """What the client learns of a topic, or of all; asked anew where an answer is missing. Raises `KafkaException`."""
    while True:
        try:
            found: ClusterMetadata = client.list_topics(topic, min(seconds(deadline), PATIENCE))
        except KafkaException as error:
            if error.args[0].code() != KafkaError._TIMED_OUT or deadline.expired:
                raise
        else:
            return found


def result_of(answer: Future[Any], what: str, deadline: Deadline) -> Any:
    """What the client answers in a future. Raises `KafkaException`, `DeadlineExceeded` if the client itself is late."""
    try:
        # It ends by itself by the deadline; it looks at its clock a few times a second.
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
    """A producer of messages; it tells `failed` of each that it could not store. Raises `InvalidOption`.

    `failed` may be no method of whoever holds the producer: that would be part of a cycle, and the producer would live
    on after it was let go until the next garbage collection, and keep its connections.
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
    """A message's timestamp as producers take it. Raises `InvalidOption`."""
    if timestamp is None:
        return 0  # the client puts the present time
    if timestamp < 1:
        raise InvalidOption(f"a timestamp is milliseconds since 1970, at least 1, not {timestamp}")
    return timestamp


def too_large(topic: str) -> InvalidOption:
    return InvalidOption(f"a message to {topic} is larger than the client's bound (message.max.bytes)")


def _keep() -> None:
    for client in list(_clients):
        # No reference that Python knows of would outlive the end of the interpreter.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


os.register_at_fork(after_in_child=_keep)
