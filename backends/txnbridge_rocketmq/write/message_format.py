"""Encodes messages for RocketMQ, where bodies are never empty and properties are text with unique names."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from txnbridge.errors import InvalidOption, NotSupported
from txnbridge.spi import NO_HEADERS, Headers, Message, RawHeaders
from txnbridge_rocketmq.client.protocol.codes import Property
from txnbridge_rocketmq.client.protocol.records import MessageExt
from txnbridge_rocketmq.client.protocol.send_requests import WireMessage

# The prefix of the bridge's own properties. They are never shown among a user's headers.
OWN = "txnbridge."
# The prefix of headers in base64: those whose value is not text, or empty, because brokers drop empty properties.
_BASE64 = "txnbridge-b64."
# The property of a key that is not one printable word. Other keys are RocketMQ keys, as with other clients.
_KEY = f"{OWN}key"
# The property that marks a value as None or empty, because brokers fail on an empty body.
_VALUE = f"{OWN}value"
_NONE, _EMPTY = "none", "empty"
_PLACEHOLDER = b"\x00"
# The property of the user's timestamp. It cannot be the born time, by which brokers judge the age of a half.
_TIMESTAMP = f"{OWN}timestamp"
# The property with the order of the headers: brokers keep each name once, in an order of their own.
_ORDER = f"{OWN}headers"

# The limit for properties. Brokers accept 32 KB, including those that they add for transactions and check-backs.
_PROPERTY_BYTES = 30_000
_WORD = re.compile(r"[!-~]{1,255}")
_HASH_CACHE_SIZE = 10_000

# The names of RocketMQ's own properties, some of which change how brokers treat a message.
_NAMES = """
KEYS WAIT DELAY RETRY_TOPIC REAL_TOPIC REAL_QID TRAN_MSG PGROUP MIN_OFFSET MAX_OFFSET BUYER_ID ORIGIN_MESSAGE_ID
TRANSFER_FLAG CORRECTION_FLAG MQ2_FLAG RECONSUME_TIME MSG_REGION TRACE_ON UNIQ_KEY EXTEND_UNIQ_INFO
MAX_RECONSUME_TIMES CONSUME_START_TIME POP_CK POP_CK_OFFSET 1ST_POP_TIME TRAN_PREPARED_QUEUE_OFFSET DUP_INFO
INSTANCE_ID CORRELATION_ID REPLY_TO_CLIENT TTL ARRIVE_TIME PUSH_REPLY_TIME CLUSTER MSG_TYPE
INNER_MULTI_QUEUE_OFFSET TIMER_DELAY_MS TIMER_DELAY_SEC TIMER_DELIVER_MS TIMER_ENQUEUE_MS TIMER_DEQUEUE_MS
TIMER_ROLL_TIMES TIMER_OUT_MS TIMER_DEL_UNIQKEY TIMER_DELAY_LEVEL __BORNHOST BORN_TIMESTAMP DLQ_ORIGIN_TOPIC
DLQ_ORIGIN_MESSAGE_ID __CRC32# CHECK_IMMUNITY_TIME_IN_SECONDS TRANSACTION_CHECK_TIMES __transactionId__
_SYS_TRAN_PREPARED_QUEUE_OFFSET TRANSACTION_PREPARED_QUEUE_OFFSET
"""
RESERVED = frozenset(_NAMES.split())


def to_wire(
    topic: str,
    value: bytes | None,
    key: bytes | None,
    headers: RawHeaders | None,
    timestamp: int | None,
    *,
    own: Mapping[str, str] | None = None,
    unique_key: str | None = None,
) -> WireMessage:
    """Return a message to send; `own` are the bridge's properties. Raise `InvalidOption` for too large headers."""
    body, properties = pack_value(value)
    keys: tuple[str, ...] = ()
    if key is not None:
        word = key.decode("ascii", "replace")
        if _WORD.fullmatch(word):
            keys = (word,)
        else:
            properties[_KEY] = base64.b64encode(key).decode() or "="
    if timestamp is not None:
        properties[_TIMESTAMP] = str(timestamp)
    tags = _put_headers(properties, headers or ())
    _check_size({**properties, Property.TAGS: tags or ""}, own or {})
    return WireMessage(topic, body, {**properties, **(own or {})}, keys, tags, unique_key)


def pack_value(value: bytes | None) -> tuple[bytes, dict[str, str]]:
    """Return the body for a value, and the properties that mark None and an empty value."""
    return (value, {}) if value else (_PLACEHOLDER, {_VALUE: _NONE if value is None else _EMPTY})


def _put_headers(properties: dict[str, str], headers: RawHeaders) -> str | None:
    """Add the headers to the properties, except TAGS. Return the tag in the header TAGS; None without that header."""
    tags: str | None = None
    seen: dict[str, int] = {}
    for name, value in headers:
        if value is None or not name:
            raise NotSupported(
                f"header {name!r}: RocketMQ's properties are text with a name. Give the header a name and a value; the"
                " value may be empty"
            )
        if name == Property.TAGS:
            tags = _tag(value)
            continue
        if name == Property.MESSAGE_GROUP:
            _check_message_group(value)
        _check_name(name)
        count = seen[name] = seen.get(name, 0) + 1
        slot, text = _encoded_header(_property_name(name, count), value)
        properties[slot] = text
    names = [name for name, _ in headers if name != Property.TAGS]
    if len(names) > 1:
        properties[_ORDER] = json.dumps(names, separators=(",", ":"), ensure_ascii=False)
    return tags


def _property_name(name: str, count: int) -> str:
    """Return the name of the property for the `count`-th value of a header."""
    return name if count == 1 else f"{OWN}{count}.{name}"


def _encoded_header(name: str, value: bytes) -> tuple[str, str]:
    if value and not name.startswith(_BASE64):
        try:
            text = value.decode()
            if not _holds_separator(text):
                return name, text
        except UnicodeDecodeError:
            pass
    return _BASE64 + name, base64.b64encode(value).decode() or "="


def _tag(value: bytes) -> str:
    text = value.decode("utf-8", "replace")
    if not text.strip() or "|" in text or _holds_separator(text) or "\ufffd" in text:
        raise InvalidOption("the header 'TAGS' is RocketMQ's tag: it must be text without '|', and not empty")
    return text


def _check_message_group(value: bytes) -> None:
    text = value.decode("utf-8", "replace")
    if not text.strip() or _holds_separator(text) or "\ufffd" in text:
        raise InvalidOption(
            f"the header {Property.MESSAGE_GROUP!r} is RocketMQ's message group: it must be text, and not empty"
        )


def _check_name(name: str) -> None:
    if name in RESERVED or name.startswith(OWN):
        raise InvalidOption(f"header {name!r}: RocketMQ or txnbridge itself uses this name; choose another")
    if _holds_separator(name):
        raise InvalidOption(f"header {name!r}: RocketMQ separates headers by U+0001 and U+0002; leave them out")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidOption(f"header {name!r}: a name must be text that UTF-8 can express") from None


def _holds_separator(text: str) -> bool:
    return "\x01" in text or "\x02" in text


def _check_size(properties: Mapping[str, str], own: Mapping[str, str]) -> None:
    size = sum(len(name.encode()) + len(text.encode()) + 2 for name, text in [*properties.items(), *own.items()])
    if size > _PROPERTY_BYTES:
        raise InvalidOption(
            f"headers and key take {size} bytes as RocketMQ stores them; at most {_PROPERTY_BYTES} bytes are allowed"
        )


def from_wire(record: MessageExt, topic: str, partition: int, source: Any = None) -> Message:
    """Decode any client's record into a `Message` with this `source`. Raise `CannotDecompress` for a damaged body."""
    properties = record.properties
    pairs = list(_pairs(properties))
    return Message(
        topic,
        partition,
        (record.queue_offset,),
        _key(properties),
        unpack_value(record),
        Headers(pairs) if pairs else NO_HEADERS,
        timestamp_of(record),
        1,
        source,
    )


def unpack_value(record: MessageExt) -> bytes | None:
    """Return the value in the body of a record; None for a message whose value was None. Raise `CannotDecompress`."""
    stands_for = record.properties.get(_VALUE)
    if stands_for is None:
        return record.payload()
    return None if stands_for == _NONE else b""


def _key(properties: Mapping[str, str]) -> bytes | None:
    """Return the key that the bridge stored, or the RocketMQ keys that another client stored, joined by spaces."""
    if (packed := properties.get(_KEY)) is not None:
        return _decoded_base64(packed)
    keys = properties.get(Property.KEYS)
    return None if keys is None else keys.encode("utf-8", "surrogateescape")


def timestamp_of(record: MessageExt) -> int:
    """Return the sender's timestamp, or the store time if there is none."""
    text = record.properties.get(_TIMESTAMP, "")
    return int(text) if re.fullmatch(r"-?\d{1,19}", text) else record.stored_time


def _pairs(properties: Mapping[str, str]) -> Iterable[tuple[str, bytes]]:
    left = {
        name: text
        for name, text in properties.items()
        if name not in RESERVED and (not name.startswith(OWN) or name[len(OWN) : len(OWN) + 1].isdigit())
    }
    count: dict[str, int] = {}
    for name in _names(properties.get(_ORDER)):
        number = count[name] = count.get(name, 0) + 1
        slot = _property_name(name, number)
        for each in (_BASE64 + slot,) if slot.startswith(_BASE64) else (slot, _BASE64 + slot):
            if (text := left.pop(each, None)) is not None:
                yield name, _header(each, text)[1]
                break
    for name, text in left.items():  # headers of other clients, and properties that the broker added
        yield _header(name, text)


def _names(order: str | None) -> list[str]:
    try:
        names = json.loads(order) if order is not None else []
    except (ValueError, RecursionError):
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _header(name: str, text: str) -> tuple[str, bytes]:
    if name.startswith(_BASE64) and (value := _decoded_base64(text)) is not None:
        return name[len(_BASE64) :], value
    return name, text.encode("utf-8", "surrogateescape")


def _decoded_base64(text: str) -> bytes | None:
    """Decode base64. Return None for text that is not base64."""
    if text == "=":
        return b""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


def ordering_key(message: WireMessage, key: bytes | None) -> bytes | None:
    """Return the key by which a queue is chosen: the message's key, or its message group, or None without either."""
    if key is not None:
        return key
    group = message.properties.get(Property.MESSAGE_GROUP)
    return None if group is None else group.encode()


def choose_queue(key: bytes | None, count: int, round_robin: Iterator[int]) -> int:
    return next(round_robin) % count if key is None else partition_of(key, count)


def partition_of(key: bytes, partitions: int) -> int:
    """Return the queue that Java's `SelectMessageQueueByHash` picks for a key. Other keys than text become base64."""
    return key_hash(key) % partitions


@lru_cache(_HASH_CACHE_SIZE)
def key_hash(key: bytes) -> int:
    """Return the absolute value of Java's `String.hashCode` of a key as text, or as base64 if it is not text."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        text = base64.b64encode(key).decode()
    code = 0
    units = text.encode("utf-16-be")
    for at in range(0, len(units), 2):
        code = (31 * code + int.from_bytes(units[at : at + 2], "big")) & 0xFFFF_FFFF
    return code if code < 1 << 31 else (1 << 32) - code
