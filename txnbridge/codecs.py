"""Codecs: encode an application's objects as bytes and decode them.

A codec is any object with `encode(obj, context) -> bytes` and `decode(data, context) -> obj`. An exception of `decode`
makes the message poison: it can become a dead letter, but is never skipped. A tombstone (None) is not encoded.
"""

from __future__ import annotations

import builtins
import dataclasses
import json as _json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar, get_origin

from txnbridge._base.messages import NO_HEADERS, Headers

__all__ = ["Codec", "CodecContext", "bytes", "dataclass_json", "json", "pydantic", "str"]

_T = TypeVar("_T")

# JSON that has it may become what JSON cannot express: a lone surrogate, NaN, or an infinity.
_SUSPECT = re.compile(rb"\\u[dD]|[eE]\+?\d{3}|NaN|Infinity")


@dataclass(frozen=True)
class CodecContext:
    """The topic and the headers of the data for a codec, and whether the data are the key or the value."""

    topic: builtins.str
    field: Literal["key", "value"]
    headers: Headers = NO_HEADERS


class Codec(Protocol):
    """Converts a program's values to the bytes of messages, and back. Write one for another format."""

    def encode(self, obj: Any, context: CodecContext) -> builtins.bytes: ...

    def decode(self, data: builtins.bytes, context: CodecContext) -> Any: ...


def _dumps(obj: Any, default: Callable[[Any], Any] | None = None) -> builtins.bytes:
    return _json.dumps(obj, default=default, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class _Bytes:
    """The codec of bytes, which leaves them unchanged."""

    def encode(self, obj: Any, context: CodecContext) -> builtins.bytes:
        if not isinstance(obj, builtins.bytes | bytearray | memoryview):
            raise TypeError(f"{context.topic} takes bytes, not {type(obj).__name__}; give the topic a codec")
        return builtins.bytes(obj)

    def decode(self, data: builtins.bytes, context: CodecContext) -> builtins.bytes:
        return data


class _Str:
    """The codec of text, as UTF-8."""

    def encode(self, obj: Any, context: CodecContext) -> builtins.bytes:
        if not isinstance(obj, builtins.str):
            raise TypeError(f"{context.topic} takes text, not {type(obj).__name__}")
        return obj.encode()

    def decode(self, data: builtins.bytes, context: CodecContext) -> builtins.str:
        return data.decode()


class _Json:
    """The codec of JSON, as UTF-8. It refuses NaN, infinities and halves of characters, which others cannot read."""

    def encode(self, obj: Any, context: CodecContext) -> builtins.bytes:
        return _dumps(obj)

    def decode(self, data: builtins.bytes, context: CodecContext) -> Any:
        decoded = _json.loads(data)
        if _SUSPECT.search(data):
            self.encode(decoded, context)  # raises an error for what could not be sent on
        return decoded


class pydantic(Generic[_T]):
    """The codec of JSON checked by a pydantic model or any type that pydantic supports (dataclasses, unions)."""

    def __init__(self, model: type[_T]) -> None:
        from pydantic import TypeAdapter, ValidationError

        self._adapter: Any = TypeAdapter(model)
        self._invalid = ValidationError
        self._fields = {**getattr(model, "model_fields", {}), **getattr(model, "__dataclass_fields__", {})}

    def encode(self, obj: _T, context: CodecContext) -> builtins.bytes:
        encoded: builtins.bytes = self._adapter.dump_json(obj)
        return encoded

    def decode(self, data: builtins.bytes, context: CodecContext) -> _T:
        try:
            decoded: _T = self._adapter.validate_json(data)
        except self._invalid as error:
            # The names of fields tell nothing of the message, as keys of its mappings and pydantic's own text would.
            wrong = [
                builtins.str(e["loc"][0])
                for e in error.errors(include_url=False)
                if e["loc"] and e["loc"][0] in self._fields
            ]
            raise TypeError(f"invalid: {', '.join(dict.fromkeys(wrong)) or 'the value'}") from error
        return decoded


class dataclass_json(Generic[_T]):
    """The codec of JSON checked by a dataclass, or another type that the library msgspec knows, such as list[Order].

    Types mean what they say: no text is taken for a number. Fields that the dataclass does not have are passed over.
    """

    def __init__(self, cls: type[_T]) -> None:
        import msgspec  # here, because its import takes longer than that of all of txnbridge

        self._cls = cls
        self._decoder: Any = msgspec.json.Decoder(cls)
        self._invalid = msgspec.ValidationError
        self._builtins = msgspec.to_builtins

    def encode(self, obj: _T, context: CodecContext) -> builtins.bytes:
        if not isinstance(obj, get_origin(self._cls) or self._cls):
            raise TypeError(f"{context.topic} takes {self._cls.__name__}, not {type(obj).__name__}")
        return _dumps(obj, self._default)

    def _default(self, obj: Any) -> Any:
        if dataclasses.is_dataclass(obj):
            return self._builtins(obj)
        raise TypeError(f"{type(obj).__name__} is no JSON")

    def decode(self, data: builtins.bytes, context: CodecContext) -> _T:
        try:
            decoded: _T = self._decoder.decode(data)
        except self._invalid as error:
            if error.__cause__ is not None:  # of the program's own check, whose text may have data of the message
                raise
            raise TypeError(builtins.str(error)) from error  # names the field and no value
        return decoded


bytes: _Bytes = _Bytes()
str: _Str = _Str()
json: _Json = _Json()
