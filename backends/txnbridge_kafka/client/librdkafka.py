"""confluent-kafka's clients, made safe for forks, and calls of them with deadlines.

A fork does not copy a client's threads. A forked child that frees a client (by a garbage collection, or at its exit)
waits for those threads, and dies of a segmentation fault. So a child keeps all inherited clients without using them.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import struct
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
from txnbridge.spi import Deadline, RawHeaders
from txnbridge_kafka.settings import KafkaSettings

# A client repeats what it has to say of a broker that is away many times a second; each line is logged so often.
_AGAIN_SECONDS = 60.0
_MOST_LINES = 1000


class RepeatedLines(logging.Filter):
    """Lets each repeated log line of a client pass only once a minute, with the number of lines that were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, tuple[float, int]] = {}  # when a line was logged, and how many like it came since

    def filter(self, record: logging.LogRecord) -> bool:
        line, now = record.getMessage(), time.monotonic()
        kind = line.partition(" (after ")[0]  # how long it took differs
        at, left_out = self._seen.get(kind, (-_AGAIN_SECONDS, 0))
        if now - at < _AGAIN_SECONDS:
            self._seen[kind] = at, left_out + 1
            return False
        if len(self._seen) >= _MOST_LINES:
            self._seen.clear()
        self._seen[kind] = now, 0
        if left_out:
            record.msg, record.args = f"{line} ({left_out} more like it)", None
        return True


logging.getLogger("txnbridge.kafka.client").addFilter(RepeatedLines())
logging.getLogger("txnbridge.kafka.client.publisher").addFilter(RepeatedLines())

# Without a handler Python would print the clients' log lines in a program that configures no logging.
logging.getLogger("txnbridge.kafka").addHandler(logging.NullHandler())

# The shortest time limit of a call: the clients do not accept 0, and no broker answers faster.
LEAST_SECONDS = 0.01
# After this time without an answer a request is repeated, because its broker may have left the cluster.
CALL_LIMIT = 3.0

# The size of a producer's buffer for a slow broker. If the buffer is full, a sender waits for room.
_BUFFER_KBYTES = 64 * 1024

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_GROUP_METADATA = b"CGMDv2:"  # the first bytes of confluent-kafka's `consumer_group_metadata`

_clients: weakref.WeakSet[Any] = weakref.WeakSet()


def seconds(deadline: Deadline) -> float:
    """Return the seconds left until a deadline, as a client's time limit: never 0, `LEAST_SECONDS` at least."""
    return max(deadline.left(), LEAST_SECONDS)


def ignore(error: KafkaError) -> None:
    """Ignore an error, as a client's `error_cb`: the client also logs the error, and the failing call raises one."""


def headers_of(messages: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Return each message's headers, and the indexes of the messages with a header name that is not UTF-8.

    U+FFFD replaces the wrong bytes of such a name. If a message has several such names, each one after the first is
    replaced as a whole.
    """
    headers, replaced = list[Any](), list[int]()
    left = map(confluent_kafka.Message.headers, messages)
    while len(headers) < len(messages):
        try:
            deque(map(headers.append, left), maxlen=0)  # this loop runs in C
        except SystemError as error:
            replaced.append(len(headers))
            headers.append(_with_replaced_names(messages[len(headers)], error))
    return headers, replaced


def _with_replaced_names(message: Any, error: SystemError) -> list[tuple[str, bytes | None]]:
    """Return a message's headers after confluent-kafka has raised `error`, because it could not decode a name.

    The client then has the headers in pairs without a name. To read the first item of such a pair would crash the
    process, so a pair without a name is recognised by its number of references.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, UnicodeDecodeError):
        cause = cause.__cause__
    if cause is None:
        raise error
    pairs = message.headers()
    nameless = [index for index, pair in enumerate(pairs) if len(gc.get_referents(pair)) < len(pair)]
    names = dict.fromkeys(nameless, _REPLACEMENT) | {nameless[0]: cause.object.decode(errors="replace")}
    return [(names[index], pair[1]) if index in names else pair for index, pair in enumerate(pairs)]


def warm_up(client: Any, topic: str, deadline: Deadline) -> None:
    """Wait until a new client has replaced its bootstrap connection and has the metadata of a topic, if it exists.

    A client drops its first connection as soon as it knows the brokers, and loses the requests on that connection. It
    repeats some of these requests after up to three seconds, and sometimes never repeats a request for the end of a
    partition. Only a metadata request is repeated at once. So this function makes two metadata requests: the first
    answer may still come on the dropped connection, the second does not. Errors are ignored, because the next call
    raises them again.
    """
    with suppress(KafkaException):
        for _ in range(2):
            refresh_metadata(client, deadline, topic)


def refresh_metadata(client: Any, deadline: Deadline, topic: str | None = None) -> ClusterMetadata:
    """Refresh a client's metadata of one topic, or of all topics. Repeat the request after a time-out.

    Raise `KafkaException` after any other error, and at the deadline.
    """
    while True:
        try:
            metadata: ClusterMetadata = client.list_topics(topic, min(seconds(deadline), CALL_LIMIT))
        except KafkaException as error:
            if error.args[0].code() != KafkaError._TIMED_OUT or deadline.expired:
                raise
        else:
            return metadata


def result_of(answer: Future[Any], what: str, deadline: Deadline) -> Any:
    """Return the result of a client's future. Raise the future's `KafkaException`, or `DeadlineExceeded`."""
    try:
        # The client ends the future itself at the deadline, up to a second late.
        return answer.result(deadline.left() + 1)
    except FutureTimeoutError:
        raise DeadlineExceeded(f"{what} took longer than the deadline of {deadline.seconds:g} s") from None


def with_exceptions(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of the client that raises no bare `KafkaError`, which no clause but a bare `except` catches."""

    def run(*args: Any) -> Any:
        try:
            return call(*args)
        except:  # noqa: E722
            if not isinstance(error := sys.exc_info()[1], KafkaError):
                raise
        raise KafkaException(error)

    return run


class _Client:
    def __init_subclass__(cls) -> None:
        for name in {"poll", "consume", "flush", "commit_transaction", "abort_transaction"} & {*dir(cls)}:
            setattr(cls, name, with_exceptions(getattr(cls, name)))

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)  # type: ignore[call-arg]  # of confluent-kafka's client, the next base class
        _clients.add(self)


class ConfluentProducer(_Client, confluent_kafka.Producer): ...


class ConfluentConsumer(_Client, confluent_kafka.Consumer): ...


class ConfluentAdminClient(_Client, confluent_kafka.admin.AdminClient): ...


def make_producer(
    settings: KafkaSettings, failed: Callable[[KafkaError], object], own: Mapping[str, Any]
) -> ConfluentProducer:
    """Return a new producer that calls `failed` with the error of each message that could not be stored.

    `failed` must not be a method of the producer's owner: such a reference cycle would keep the connections open until
    a garbage collection. Raise `InvalidOption` if the client refuses the settings.
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
    """Return a message's timestamp as `produce` takes it: 0 in place of None. Raise `InvalidOption` if below 1."""
    if timestamp is None:
        return 0  # the client then takes the current time
    if timestamp < 1:
        raise InvalidOption(f"a timestamp is milliseconds since 1970, at least 1, not {timestamp}")
    return timestamp


def sendable(headers: RawHeaders | None) -> list[Any]:
    """Return headers as `produce` takes them. Raise `InvalidOption` for a name that the client would cut short."""
    if headers and any("\0" in name for name, _ in headers):
        raise InvalidOption("on Kafka a header's name must not hold a NUL: the client would cut the name there")
    return list(headers or ())


def too_large(topic: str) -> InvalidOption:
    return InvalidOption(f"a message to {topic} is larger than the client's limit (message.max.bytes)")


@dataclass(frozen=True)
class GroupMembership:
    """A group member's identity at its coordinator; `name` is the member id.

    A consumer that is not a member has the generation -1 and an empty `name`.
    """

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
        # The last field begins with a byte: 1 if there is no group instance id, 0 before a group instance id.
        instance = None if rest == b"\1" else rest[1:-1].decode()
        if instance is not None and (rest[:1], rest[-1:]) != (b"\0", b"\0"):
            raise ValueError
        return GroupMembership(group.decode(), generation, name.decode(), instance)
    except (ValueError, struct.error) as error:
        raise BackendMissing(
            "this version of confluent-kafka has an unknown format of group metadata; install the version that"
            " txnbridge requires"
        ) from error


def _never_free_clients() -> None:
    for client in list(_clients):
        # With this additional reference the client is not freed even at the interpreter's exit.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


os.register_at_fork(after_in_child=_never_free_clients)
