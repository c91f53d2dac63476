"""Codecs: encode an application's objects as bytes and decode them.

A codec is any object with `encode(obj, context) -> bytes` and `decode(data, context) -> obj`. An exception of `decode`
makes the message poison: it can become a dead letter, but is never skipped. A tombstone (None) is not encoded.
"""

from __future__ import annotations

import builtins
import dataclasses
import json as _json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from enum import Enum
from functools import partial
from types import NoneType, UnionType
from typing import Any, Generic, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from txnbridge._base.messages import NO_HEADERS, Headers
from txnbridge.errors import InvalidOption

__all__ = ["Codec", "CodecContext", "avro", "bytes", "confluent", "dataclass_json", "json", "pydantic", "str"]

_T = TypeVar("_T")

# JSON that has it may become what JSON cannot express: a lone surrogate, NaN, or an infinity, also from a text.
_SUSPECT = re.compile(  # also a text that only resembles one: it costs time, and no more
    rb"\\u(?:[dD]|00(?:2[bBdD]|3\d|[4-7]))|[eE]\+?[\d_]{3}|[\d_]{200}|NaN|Infinity|"
    rb'"(?:\s|[^\x00-\x7f]|\\[bfnrt]|\\u\w{4})*[-+_]*(?i:n_?a_?n|i_?n_?f(_?i_?n_?i_?t_?y)?)\b'
)


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
        # Of bytes, `json.loads` takes UTF-16, and halves of characters. Some programs write the mark of UTF-8 in front.
        decoded = _json.loads(data.decode().removeprefix("\ufeff"))
        if _SUSPECT.search(data):
            self.encode(decoded, context)  # raises an error for what could not be sent on
        return decoded


class pydantic(Generic[_T]):
    """The codec of JSON checked by a pydantic model or any type that pydantic supports (dataclasses, unions)."""

    def __init__(self, model: type[_T]) -> None:
        from pydantic import TypeAdapter, ValidationError

        self._adapter: Any = TypeAdapter(model)
        self._invalid = ValidationError
        # A model may say how NaN is written.
        self._refuses_nan = "ser_json_inf_nan" not in repr(self._adapter.core_schema)
        self._class = _class(model)
        self._fields = {**getattr(model, "model_fields", {}), **getattr(model, "__dataclass_fields__", {})}

    def encode(self, obj: _T, context: CodecContext) -> builtins.bytes:
        obj = _fitting(self, obj)
        encoded: builtins.bytes = self._adapter.dump_json(obj)
        if self._refuses_nan and b"null" in encoded:
            _dumps(self._adapter.dump_python(obj, mode="json"))  # refuses NaN, for which pydantic writes null
        return encoded

    def decode(self, data: builtins.bytes, context: CodecContext) -> _T:
        decoded = self._checked(self._adapter.validate_json, data)
        if self._refuses_nan and _SUSPECT.search(data):
            self.encode(decoded, context)  # raises an error for what could not be sent on
        return decoded

    def to_builtins(self, obj: _T) -> Any:
        import msgspec

        plain = self._adapter.dump_python(_fitting(self, obj))
        return msgspec.to_builtins(plain, builtin_types=_AVRO_VALUES)  # enums are left

    def from_builtins(self, data: Any) -> _T:
        return self._checked(self._adapter.validate_python, data)

    def _checked(self, decode: Callable[[Any], _T], data: Any) -> _T:
        try:
            return decode(data)
        except self._invalid as error:
            # The names of fields tell nothing of the message, as keys of its mappings and pydantic's own text would.
            places = dict.fromkeys(e["loc"][0] for e in error.errors(include_url=False) if e["loc"])
            wrong = ", ".join(builtins.str(place) for place in places if place in self._fields)
            raise TypeError(f"invalid: {wrong or 'the value'}") from error


class dataclass_json(Generic[_T]):
    """The codec of JSON checked by a dataclass, or another type that the library msgspec knows, such as list[Order].

    Types mean what they say: no text is taken for a number. Fields that the dataclass does not have are passed over.
    """

    def __init__(self, cls: type[_T]) -> None:
        import msgspec  # here, because its import takes longer than that of all of txnbridge

        self._cls, self._class = cls, _class(cls)
        self._decoder: Any = msgspec.json.Decoder(cls)
        self._invalid = msgspec.ValidationError
        self._builtins = msgspec.to_builtins
        self._convert = partial(msgspec.convert, type=cls)

    def encode(self, obj: _T, context: CodecContext) -> builtins.bytes:
        if not isinstance(obj, get_origin(self._cls) or self._cls):
            raise TypeError(f"{context.topic} takes {self._cls.__name__}, not {type(obj).__name__}")
        return _dumps(obj, self._default)

    def _default(self, obj: Any) -> Any:
        if dataclasses.is_dataclass(obj):
            return self._builtins(obj)
        raise TypeError(f"{type(obj).__name__} is no JSON")

    def decode(self, data: builtins.bytes, context: CodecContext) -> _T:
        return self._checked(self._decoder.decode, data)

    def to_builtins(self, obj: _T) -> Any:
        return self._builtins(_fitting(self, obj), builtin_types=_AVRO_VALUES)

    def from_builtins(self, data: Any) -> _T:
        return self._checked(self._convert, data)

    def _checked(self, decode: Callable[[Any], _T], data: Any) -> _T:
        try:
            return decode(data)
        except self._invalid as error:
            if error.__cause__ is not None:  # of the program's own check, whose text may have data of the message
                raise
            raise TypeError(builtins.str(error)) from error  # names the field and no value


def _class(kind: Any) -> type:
    """Return a dataclass or model itself; for any other type `object`, of which every value is an instance."""
    has_fields = isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "model_fields"))
    return kind if has_fields else object


def _fitting(typed: pydantic[Any] | dataclass_json[Any], obj: Any) -> Any:
    """Return `obj` if it is of the codec's class, else one made of it. Raise TypeError if that is impossible.

    Otherwise an object of another class would be written without the fields that the codec's class does not have.
    """
    return obj if isinstance(obj, typed._class) else typed.from_builtins(obj)


class confluent:
    """The codec of a `serializer` and a `deserializer` of confluent-kafka: Avro, Protobuf or JSON Schema of a registry.

    A message whose schema the registry does not know, or that does not fit its schema, is poison; the reason names the
    schema's id. While the registry is away nothing is poison, and the message is tried again.
    """

    def __init__(self, serializer: Any = None, deserializer: Any = None) -> None:
        if not callable(serializer or deserializer):
            raise InvalidOption("codecs.confluent takes a serializer, a deserializer, or both, of confluent-kafka")
        self._serializer, self._deserializer = serializer, deserializer

    def encode(self, obj: Any, context: CodecContext) -> builtins.bytes:
        encoded: builtins.bytes = self._call("serializer", self._serializer, obj, context)
        return encoded

    def decode(self, data: builtins.bytes, context: CodecContext) -> Any:
        try:
            return self._call("deserializer", self._deserializer, data, context)
        except OSError:
            raise
        except Exception as error:
            schema = _schema_id(data)
            raise TypeError("it has no schema id" if schema is None else f"schema {schema}: {_why(error)}") from error

    def _call(self, what: builtins.str, function: Any, data: Any, context: CodecContext) -> Any:
        from confluent_kafka.serialization import MessageField, SerializationContext

        if function is None:
            raise TypeError(f"the codec of {context.topic} was made without a {what}")
        try:
            field = MessageField(context.field)
            return function(data, SerializationContext(context.topic, field, list(context.headers.raw)))
        except Exception as error:
            if _is_away(error):
                raise ConnectionError("the schema registry does not answer") from error
            raise


class avro(confluent, Generic[_T]):
    """The codec of Avro with a schema registry, for a dataclass or a model of pydantic: one line for each topic.

        orders = Topic("orders", codecs.avro(Order, registry="http://localhost:8081"))

    The Avro schema is made of the class, or it is the text `schema`. `registry` is an address, or a
    `SchemaRegistryClient` with the settings that your registry needs. `settings` are those of `AvroSerializer`, such as
    {"auto.register.schemas": False}.
    """

    def __init__(
        self,
        model: type[_T],
        registry: Any,
        *,
        schema: builtins.str | None = None,
        settings: Mapping[builtins.str, Any] | None = None,
    ) -> None:
        try:
            from confluent_kafka.schema_registry import SchemaRegistryClient
            from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
        except ImportError as error:
            what = f"codecs.avro needs packages ({error}): in a clone of txnbridge, pip install -e '.[schemas]'"
            raise InvalidOption(what) from None
        client = SchemaRegistryClient.new_client({"url": registry}) if isinstance(registry, builtins.str) else registry
        schema = _json.dumps(_avro_type(model, {})) if schema is None else schema
        typed: Any = pydantic(model) if hasattr(model, "model_fields") else dataclass_json(model)
        super().__init__(
            AvroSerializer(client, schema, lambda obj, _: typed.to_builtins(obj), dict(settings or {})),
            AvroDeserializer(client, schema, lambda data, _: typed.from_builtins(data)),
        )


def _schema_id(data: builtins.bytes) -> builtins.str | None:
    """Return the id of the schema in the first bytes of a registry's formats: a number, or a UUID."""
    if data[:1] == b"\0" and len(data) >= 5:
        return builtins.str(int.from_bytes(data[1:5], "big"))
    return builtins.str(UUID(bytes=data[1:17])) if data[:1] == b"\1" and len(data) >= 17 else None


def _why(error: Exception) -> builtins.str:
    if 404 in _http_statuses(error):
        return "the registry does not know it"
    return builtins.str(error) if isinstance(error, TypeError) else type(error).__name__


def _http_statuses(error: BaseException | None) -> Iterator[int]:
    while error is not None:
        yield getattr(error, "http_status_code", 0)
        error = error.__cause__ or error.__context__


def _is_away(error: BaseException | None) -> bool:
    """Return whether a registry's client failed for a reason that has nothing to do with the message."""
    while error is not None:
        if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _HTTP_CLIENTS:
            return True
        status = getattr(error, "http_status_code", 0)
        if status in (401, 403, 408, 429) or status >= 500:
            return True
        error = error.__cause__
    return False


_HTTP_CLIENTS = ("httpx", "httpx2", "httpcore", "authlib")
_AVRO_VALUES = (builtins.bytes, datetime, date, UUID)
_AVRO_TYPES: dict[Any, Any] = {
    builtins.str: "string",
    int: "long",
    float: "double",
    bool: "boolean",
    builtins.bytes: "bytes",
    datetime: {"type": "long", "logicalType": "timestamp-micros"},
    date: {"type": "int", "logicalType": "date"},
    UUID: {"type": "string", "logicalType": "uuid"},
}


def _avro_type(hint: Any, named: dict[builtins.str, Any]) -> Any:
    """Return the Avro schema of a type; `named` has the classes that are in the schema already, by name."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _AVRO_TYPES:
        return _AVRO_TYPES[hint]
    if origin is list:
        return {"type": "array", "items": _avro_type(arguments[0], named)}
    if origin is dict and arguments[0] is builtins.str:
        return {"type": "map", "values": _avro_type(arguments[1], named)}
    if origin in (Union, UnionType):
        # Null is first, because the first type is that of a default.
        kinds = sorted(arguments, key=lambda each: each is not NoneType)
        return ["null" if kind is NoneType else _avro_type(kind, named) for kind in kinds]
    if not isinstance(hint, type) or not (
        dataclasses.is_dataclass(hint) or hasattr(hint, "model_fields") or issubclass(hint, Enum)
    ):
        raise InvalidOption(f"codecs.avro knows no Avro type for {hint!r}: give the schema, by schema=")
    if hint in named.values():
        return hint.__name__
    if hint.__name__ in named:  # by that schema, this class would lose the fields that the first one does not have
        raise InvalidOption(f"codecs.avro found two classes {hint.__name__}: rename one, or give the schema (schema=)")
    named[hint.__name__] = hint
    if issubclass(hint, Enum):
        return {"type": "enum", "name": hint.__name__, "symbols": [each.value for each in hint]}
    types = {name: _avro_type(kind, named) for name, kind in get_type_hints(hint).items()}
    fields = [{"name": n, "type": t} | ({"default": None} if isinstance(t, list) else {}) for n, t in types.items()]
    return {"type": "record", "name": hint.__name__, "fields": fields}


bytes: _Bytes = _Bytes()
str: _Str = _Str()
json: _Json = _Json()
