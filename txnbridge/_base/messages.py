"""`Message`, `Batch`, `MessageColumns` and `Headers`, and the checks of values that a program sends."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, overload

from txnbridge.errors import InvalidOption

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)
else:  # the default is for type checkers only: a `Message` has a value of any type
    from typing import TypeVar

    T = TypeVar("T")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)

Position = tuple[int, ...]  # a message's position in its partition: ordered as tuples, otherwise opaque to users


def as_offset(position: Position) -> int:
    """Return a position's only number, if its broker numbers messages. Raise `InvalidOption` for other positions."""
    match position:
        case (int(offset),) if offset >= 0:
            return offset
    raise InvalidOption(f"{position!r} is not a position of this broker, such as (0,)")


class Headers(Mapping[str, str]):
    """A message's header names and values in their order; a name may occur more than once.

    `headers[name]` is the last value of a name, `all(name)` returns every value. Bytes that are not UTF-8 are surrogate
    escapes in the text, and are sent as the same bytes again. A header without a value is empty text here; in `raw` and
    `items_all` its value is None.
    """

    __slots__ = ("_pairs",)

    def __init__(self, pairs: Iterable[tuple[str, bytes | None]] = ()) -> None:
        self._pairs = tuple(pairs)

    @property
    def raw(self) -> tuple[tuple[str, bytes | None], ...]:
        """The headers as stored pairs of name and bytes; the value None is a header without a value."""
        return self._pairs

    def all(self, name: str) -> list[str]:
        """Return every value of the headers with this name, in order."""
        return [_text(value) for key, value in self._pairs if key == name]

    def items_all(self) -> list[tuple[str, str | None]]:
        """Return every (name, value) in order, with repeated names, in the form that `send(headers=…)` takes."""
        return [(key, None if value is None else _text(value)) for key, value in self._pairs]

    def __getitem__(self, name: str) -> str:
        for key, value in reversed(self._pairs):
            if key == name:
                return _text(value)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(key for key, _ in self._pairs))

    def __len__(self) -> int:
        return len({key for key, _ in self._pairs})

    def __eq__(self, other: object) -> bool:
        return self._pairs == other._pairs if isinstance(other, Headers) else Mapping.__eq__(self, other)

    def __hash__(self) -> int:
        return hash(self._pairs)

    def __repr__(self) -> str:
        return f"Headers({list(self)})"  # only the names, because values may be confidential


NO_HEADERS = Headers()


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode("utf-8", "surrogateescape")


def encode_headers(headers: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> tuple[tuple[str, bytes | None], ...]:
    """Return the headers that a user gave as pairs of name and bytes, in which they are stored.

    Raise `InvalidOption` for a value that is neither text, bytes nor None.
    """
    if isinstance(headers, Headers):
        if all(isinstance(pair[-1], bytes | None) for pair in headers.raw):
            return headers.raw
        headers = headers.raw  # made by a program, of text
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
        raise InvalidOption(f"headers are a mapping, or (name, value) pairs, not {type(pairs).__name__}")
    return tuple(map(_encode_header, pairs))


def _encode_header(pair: Any) -> tuple[str, bytes | None]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise InvalidOption("each header is a pair of its name and its value")
    name, value = pair
    if not isinstance(name, str) or not is_utf8(name):
        raise InvalidOption("a header's name must be text that can be written as UTF-8")
    if isinstance(value, str):
        try:
            return name, value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise InvalidOption(f"header {name!r} holds half a character (a lone surrogate)") from None
    if value is None or isinstance(value, bytes):
        return name, value
    raise InvalidOption(f"header {name!r} must be text, bytes or None, not {type(value).__name__}")


def encode_key(key: Any) -> bytes | None:
    """Return a message's key as bytes; text becomes UTF-8. Raise `InvalidOption` for a value of another type."""
    if key is None or isinstance(key, bytes):
        return key
    if isinstance(key, str):
        try:
            return key.encode()
        except UnicodeEncodeError:
            raise InvalidOption("a key that is text must not hold half a character (a lone surrogate)") from None
    raise InvalidOption(f"a key must be bytes or text, not {type(key).__name__}; give the topic a key codec")


def is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_place(partition: Any, timestamp: Any) -> int | None:
    """Return a message's timestamp in milliseconds. Raise `InvalidOption` if timestamp or partition are invalid."""
    if partition is not None and (not isinstance(partition, int) or isinstance(partition, bool)):
        raise InvalidOption(f"a partition is a whole number, not {type(partition).__name__}")
    return None if timestamp is None else milliseconds(timestamp, "a timestamp")


def milliseconds(time: Any, what: str) -> int:
    """Return a time in milliseconds since 1970. Raise `InvalidOption`, whose text names `what`, for an invalid time."""
    if isinstance(time, datetime):
        if time.utcoffset() is None:
            raise InvalidOption(f"{what} needs a time zone: {time!r} may be any place's time")
        time = (time - _EPOCH) // _MILLISECOND
    if not isinstance(time, int) or isinstance(time, bool):
        raise InvalidOption(f"{what} is milliseconds since 1970 or a datetime, not {time!r}")
    if not 0 <= time < 1 << 63:
        raise InvalidOption(f"{what} is milliseconds since 1970, not {time}")
    return time


def encode_item(item: Any) -> tuple[bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...] | None]:
    """Return an item of `send_many` that is not plain bytes as encoded (value, key, headers).

    Raise `InvalidOption` if the item cannot be sent.
    """
    value, key, headers = split_item(item)
    if value is not None and not isinstance(value, bytes):
        if not isinstance(value, bytearray | memoryview):
            raise InvalidOption(f"a value must be bytes or None, not {type(value).__name__}; give the topic a codec")
        value = bytes(value)
    return value, encode_key(key), None if headers is None else encode_headers(headers)


def split_item(item: Any) -> tuple[Any, Any, Any]:
    """Return an item of `send_many` as (value, key, headers), not yet encoded."""
    if not isinstance(item, tuple):
        return item, None, None
    if len(item) == 2:
        return (*item, None)
    if len(item) == 3:
        return item
    raise InvalidOption("an item of send_many is a value, (value, key) or (value, key, headers)")


class _Fields(NamedTuple):
    topic: str
    partition: int
    position: Position
    key: Any
    value: Any
    headers: Headers
    timestamp: int
    deliveries: int
    source: Any


class Message(_Fields, Generic[T]):
    """One committed message: immutable, equal by value, its payload not copied. A `Message[T]` has a `value` of type T.

    It is a tuple because a reader makes millions of messages. `source`, the assignment under which the message was
    delivered, is not compared and not pickled.
    """

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def value(self) -> T: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and self[:8] == other[:8]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self[:3])

    def __reduce__(self) -> tuple[Any, ...]:
        return Message, (*self[:8], None)

    def __repr__(self) -> str:  # without body and key, because programs log messages
        size = f"{len(self.value)} bytes" if isinstance(self.value, bytes) else type(self.value).__name__
        return f"<Message {self.topic}[{self.partition}] at {self.position}, {size}>"


def as_messages(call: str, given: object) -> tuple[Message, ...]:
    """Return one message or several, the argument of the call named `call`, as a tuple, or raise `InvalidOption`."""
    if isinstance(given, Message):
        return (given,)
    if isinstance(given, Iterable):
        messages = tuple(given)
        if all(issubclass(kind, Message) for kind in set(map(type, messages))):
            return messages
    raise InvalidOption(f"{call} takes a message that was read, or several of them")


class Batch(Sequence[Message]):
    """The messages of one poll, in order for each partition. A batch is empty if no message came in time."""

    __slots__ = ("_messages",)

    def __init__(self, messages: Sequence[Message] = ()) -> None:
        self._messages = messages

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> Batch: ...
    def __getitem__(self, index: int | slice) -> Message | Batch:
        return Batch(self._messages[index]) if isinstance(index, slice) else self._messages[index]

    def __iter__(self) -> Iterator[Message]:
        return iter(self._messages)

    def __len__(self) -> int:
        return len(self._messages)

    def __repr__(self) -> str:
        return f"<Batch of {len(self)}>"


@dataclass(frozen=True, slots=True)
class MessageColumns:
    """Successive messages of one partition as parallel columns, which cost less than an object for each message.

    `numbers` has a column for each number of a position; `zip(*numbers)` are the positions. A message without headers
    has None (or nothing) in the column of headers.
    """

    topic: str
    partition: int
    numbers: tuple[Sequence[int], ...]
    keys: Sequence[bytes | None]
    values: Sequence[bytes | None]
    headers: Sequence[Sequence[tuple[str, bytes | None]] | None]
    timestamps: Sequence[int]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def position(self) -> Position:
        """The position of the first message."""
        return tuple(column[0] for column in self.numbers)

    def before(self, position: Position) -> MessageColumns:
        """Return the messages before a position, perhaps none."""
        count = len(self)
        if count and tuple(column[-1] for column in self.numbers) >= position:
            count = bisect_left(list(zip(*self.numbers, strict=True)), position)
        if count == len(self):
            return self
        numbers = tuple(column[:count] for column in self.numbers)
        rest = (column[:count] for column in (self.keys, self.values, self.headers, self.timestamps))
        return MessageColumns(self.topic, self.partition, numbers, *rest)  # type: ignore[arg-type]


def columns_of(messages: Iterable[Message]) -> list[MessageColumns]:
    """Return messages as columns, one object for each run of messages of one partition."""
    found = []
    for (topic, partition), run in groupby(messages, itemgetter(0, 1)):
        _, _, positions, keys, values, headers, timestamps, *_ = zip(*run, strict=True)
        numbers = tuple(zip(*positions, strict=True))
        raw = [each.raw for each in headers]
        found.append(MessageColumns(topic, partition, numbers, keys, values, raw, timestamps))
    return found
