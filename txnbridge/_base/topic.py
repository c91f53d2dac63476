"""`Topic`, a topic's name with the codecs of its keys and values, and encoding and decoding by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from txnbridge import codecs
from txnbridge._base.deadline import check_seconds
from txnbridge._base.messages import NO_HEADERS, Headers, Message, encode_headers, encode_key, is_utf8
from txnbridge.codecs import Codec, CodecContext
from txnbridge.errors import BrokerUnavailable, InvalidOption, Poison, TxnBridgeError


@dataclass(frozen=True)
class Topic:
    """A topic's name with the codecs of its values and keys. Without codecs values are bytes, keys bytes or text.

    `partitions`, and `retention_seconds`, are used by `bridge.ensure_topics` when it creates the topic.
    """

    name: str
    codec: Codec = codecs.bytes
    key: Codec | None = None
    partitions: int | None = field(default=None, kw_only=True)
    retention_seconds: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_topic_name(self.name)
        if self.partitions is not None:
            check_partitions(self.partitions)
        if self.retention_seconds is not None:
            check_seconds("retention_seconds of a topic", self.retention_seconds, above_0=True)

    @property
    def plain(self) -> bool:
        """True if neither keys nor values have a codec."""
        return self.codec is codecs.bytes and self.key is None

    def encode_value(self, value: Any, headers: Headers = NO_HEADERS) -> bytes | None:
        return self._encode(self.codec, value, CodecContext(self.name, "value", headers))

    def encode_key(self, key: Any) -> bytes | None:
        return encode_key(key) if self.key is None else self._encode(self.key, key, CodecContext(self.name, "key"))

    def _encode(self, codec: Codec, given: Any, context: CodecContext) -> bytes | None:
        try:
            return None if given is None else _bytes(codec.encode(given, context))
        except TxnBridgeError:  # some are an OSError, too
            raise
        except (OSError, MemoryError) as error:
            what = f"the codec of {self.name} raised {type(error).__name__}: the {context.field} is not encoded"
            raise BrokerUnavailable(what) from error
        except Exception as error:
            raise InvalidOption(f"the {context.field} for {self.name} cannot be encoded: {_reason(error)}") from error

    def decode(self, message: Message) -> Message:
        """Return a message with key and value decoded. Raise `Poison` with the undecoded message if a codec fails.

        Raise `BrokerUnavailable` if the message is not to blame: a schema registry is down, or memory is short.
        """
        value, key = message.value, message.key
        try:
            if value is not None:
                value = self.codec.decode(value, CodecContext(self.name, "value", message.headers))
            if key is not None and self.key is not None:
                key = self.key.decode(key, CodecContext(self.name, "key", message.headers))
        except TxnBridgeError:
            raise
        except (OSError, MemoryError) as error:
            what = f"the codec of {self.name} raised {type(error).__name__}, so a message could not be decoded"
            raise BrokerUnavailable(f"{what}; the next poll tries again") from error
        except Exception as error:
            raise Poison(f"cannot be decoded: {_reason(error)}", message=message) from error
        return message._replace(value=value, key=key)


def _bytes(encoded: object) -> bytes | None:
    """Return a codec's result as bytes; None is a tombstone. Raise TypeError for a result of another type."""
    if encoded is None or isinstance(encoded, bytes):
        return encoded
    if isinstance(encoded, bytearray | memoryview):
        return bytes(encoded)
    raise TypeError(f"its codec returned {type(encoded).__name__}, not bytes")


def _reason(error: Exception) -> str:
    """Return why a codec failed: a TypeError's text; for other errors, whose text may quote data, only the class."""
    return str(error) if isinstance(error, TypeError) else type(error).__name__


def check_topic_name(name: object) -> None:
    if not isinstance(name, str) or not _can_be_named(name):
        raise InvalidOption("a topic's name must be 1 to 249 characters of text, as UTF-8, without white space")


def check_partitions(count: object) -> None:
    if type(count) is not int or count < 1:
        raise InvalidOption(f"the partitions of a topic are a whole number from 1, not {count!r}")


@lru_cache(1024)  # cached, because it is called for each message that is sent
def _can_be_named(name: str) -> bool:
    return 0 < len(name) <= 249 and is_utf8(name) and not any(c.isspace() for c in name)


class Encoded(NamedTuple):
    """A message in the form that backends send: bytes, and headers as pairs."""

    topic: str
    value: bytes | None
    key: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


def encode_message(topic: str | Topic, value: Any, key: Any, headers: Any, makers: Sequence[Any]) -> Encoded:
    """Encode a message by the topic's codecs, and add the headers that plug-ins make, unless it has these names.

    Raise `InvalidOption` if the message cannot be encoded.
    """
    target = as_topic(topic)
    pairs = encode_headers(headers) if headers is not None else ()
    data = target.encode_value(value, Headers(pairs))
    key_data = target.encode_key(key)
    for maker in makers:
        if made := maker(topic=target.name, key=key_data, headers=pairs):
            names = {name for name, _ in pairs}
            pairs += tuple(pair for pair in encode_headers(made) if pair[0] not in names)
    return Encoded(target.name, data, key_data, pairs)


def as_topic(topic: str | Topic) -> Topic:
    """Return the `Topic` that a user gave by its name or as a `Topic`."""
    if isinstance(topic, Topic):
        return topic
    if isinstance(topic, str):
        return Topic(topic)
    raise InvalidOption(f"a topic is a name or a Topic, not {type(topic).__name__}")
