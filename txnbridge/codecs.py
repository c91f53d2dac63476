"""Codecs: encode an application's objects as bytes and decode them.

A codec is any object with `encode(obj, context) -> bytes` and `decode(data, context) -> obj`. An exception of `decode`
makes the message poison: it can become a dead letter, but is never skipped. A tombstone (None) is not encoded.
"""

from __future__ import annotations

import builtins
import dataclasses
import json as _json
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from txnbridge._base.messages import NO_HEADERS, Headers

__all__ = ["Codec", "CodecContext", "bytes", "dataclass_json", "json", "pydantic", "str"]

_T = TypeVar("_T")


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
    """The codec of JSON, as UTF-8. It refuses NaN and infinities, which other languages cannot read."""

    def encode(self, obj: Any, context: CodecContext) -> builtins.bytes:
        return _json.dumps(obj, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()

    def decode(self, data: builtins.bytes, context: CodecContext) -> Any:
        return _json.loads(data)


class pydantic(Generic[_T]):
    """The codec of JSON checked by a pydantic model or any type that pydantic supports (dataclasses, unions)."""

    def __init__(self, model: type[_T]) -> None:
        from pydantic import TypeAdapter

        self._adapter: Any = TypeAdapter(model)

    def encode(self, obj: _T, context: CodecContext) -> builtins.bytes:
        encoded: builtins.bytes = self._adapter.dump_json(obj)
        return encoded

    def decode(self, data: builtins.bytes, context: CodecContext) -> _T:
        decoded: _T = self._adapter.validate_json(data)
        return decoded


class dataclass_json(Generic[_T]):
    """The codec of a flat dataclass as JSON. It refuses unknown and missing fields; for nested types use `pydantic`."""

    def __init__(self, cls: type[_T]) -> None:
        if not dataclasses.is_dataclass(cls):
            raise TypeError(f"{cls.__name__} is not a dataclass")
        self._cls = cls

    def encode(self, obj: _T, context: CodecContext) -> builtins.bytes:
        if not isinstance(obj, self._cls):
            raise TypeError(f"{context.topic} takes {self._cls.__name__}, not {type(obj).__name__}")
        return json.encode(dataclasses.asdict(obj), context)  # type: ignore[call-overload]

    def decode(self, data: builtins.bytes, context: CodecContext) -> _T:
        return self._cls(**json.decode(data, context))


bytes: _Bytes = _Bytes()
str: _Str = _Str()
json: _Json = _Json()
