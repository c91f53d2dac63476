"""`Outgoing`, one message to a topic of its own, and publishing what a function of an app returns."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from txnbridge._app.value_types import by_type, for_output
from txnbridge._base.messages import Message
from txnbridge._base.topic import Topic, as_topic, encode_message
from txnbridge._process.input_topics import InputTopics
from txnbridge.errors import InvalidOption

Send = Callable[..., None]


@dataclass(frozen=True)
class Outgoing:
    """One message that a function of an `App` returns, to a topic, with a key and headers of its own."""

    topic: str | Topic
    value: Any
    key: Any = None
    headers: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None


class UnfitResult(InvalidOption):
    """Raised if no message can be made of a function's result, whatever its input was. The app then stops."""


class ResultPublisher:
    """Sends what one function returns: an `Outgoing` to its topic, a value to `to` with the input message's key."""

    def __init__(self, name: str, to: Topic | None, inputs: Sequence[Topic]) -> None:
        self._name = name
        self._to = to
        # A transaction takes bytes for a topic's name faster than for a `Topic`.
        self._plain_name = to.name if to is not None and to.codec is by_type and to.key is None else None
        self._inputs = InputTopics(list(inputs), ())

    def publish(self, result: Any, message: Message | None, send: Send) -> None:
        """Send what the function returned for `message`: one value, or each value of a list or iterator."""
        if isinstance(result, list | Iterator):
            for value in result:
                self._send(value, message, send)
        else:
            self._send(result, message, send)

    async def publish_all(self, results: AsyncIterator[Any], message: Message | None, send: Send) -> None:
        """Send each value of the asynchronous iterator that the function returned for `message`."""
        async for value in results:
            self._send(value, message, send)

    def _send(self, value: Any, message: Message | None, send: Send) -> None:
        if value is None:
            return
        if self._plain_name is not None and value.__class__ is bytes:
            key = None if message is None else self._input_key(message)
            send(self._plain_name, value, key=key)
            return
        if isinstance(value, Outgoing):
            self._send_encoded(value.topic, value.value, value.key, value.headers, send)
        elif isinstance(value, tuple):
            raise UnfitResult(f"{self._name} returned a tuple; return a list for several messages, an Outgoing for one")
        elif isinstance(value, Awaitable):
            raise UnfitResult(f"{self._name} returned an awaitable; the decorated function must be `async def`")
        elif self._to is None:
            text = f"{self._name} returned {type(value).__name__}, but has no topic for it: give process() a to=, or"
            raise UnfitResult(text + " return Outgoing(topic, value)")
        else:
            self._send_encoded(self._to, value, self._key(message, self._to), None, send)

    def _send_encoded(self, to: str | Topic, value: Any, key: Any, headers: Any, send: Send) -> None:
        try:
            encoded = encode_message(for_output(as_topic(to)), value, key, headers, ())
        except InvalidOption as error:
            if isinstance(error.__cause__, OSError):
                raise  # another attempt may succeed: the codec got no answer, say, of a schema registry
            raise InvalidOption(f"{self._name} returned {type(value).__name__}: {error}") from error
        send(encoded.topic, encoded.value, key=encoded.key, headers=encoded.headers or None)

    def _key(self, message: Message | None, to: Topic) -> Any:
        """Return the input message's key for the topic `to`: bytes, unless this topic has a codec for keys."""
        if message is None:
            return None
        return self._input_key(message) if to.key is None else message.key

    def _input_key(self, message: Message) -> bytes | None:
        topic = self._inputs.topic(message.topic)
        assert topic is not None
        return topic.encode_key(message.key)
