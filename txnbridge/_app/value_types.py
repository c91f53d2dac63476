"""Codecs chosen by the types of an application's values."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from functools import lru_cache, reduce
from operator import or_
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from txnbridge import codecs
from txnbridge._base.topic import Topic
from txnbridge.codecs import Codec, CodecContext
from txnbridge.errors import InvalidOption

_SUITABLE = "bytes, str, dict, list, a dataclass or a pydantic model"


@lru_cache
def codec_for(kind: Any) -> Codec | None:
    """Return the codec for values of a type; None if the type does not tell how to encode its values.

    Raise `InvalidOption` for a type that needs pydantic if pydantic is not installed.
    """
    if kind is bytes:
        return codecs.bytes
    if kind is str:
        return codecs.str
    if _is_model(kind):
        return codecs.pydantic(kind)
    if (get_origin(kind) or kind) in (dict, list) or (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return _pydantic(kind) if _needs_pydantic(kind, ()) else codecs.dataclass_json(kind)
    return None


def require_codec(kind: Any, what: str) -> Codec:
    """Return the codec for values of a type. Raise `InvalidOption` (its text begins with `what`) if there is none."""
    codec = codec_for(kind)
    if codec is None:
        name = kind.__name__ if isinstance(kind, type) else kind
        raise InvalidOption(f"{what} {name}: without a codec of the topic it takes {_SUITABLE}")
    return codec


def alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the member types of a union; for any other type, the type itself."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def without_none(kind: Any) -> tuple[Any, bool]:
    """Return a type without its None, and whether it had one."""
    parts = alternatives(kind)
    rest = [part for part in parts if part is not NoneType]
    if len(rest) == len(parts):
        return kind, False
    return reduce(or_, rest) if rest else NoneType, True


def _needs_pydantic(kind: Any, above: tuple[Any, ...]) -> bool:
    """Return whether a type has a part that msgspec does not check: a model, or a union of several dataclasses.

    `above` are the dataclasses of which this type is a part, so that one that contains itself ends the search.
    """
    if _is_model(kind) or hasattr(kind, "__pydantic_validator__"):
        return True
    parts = get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind not in above:
        above = (*above, kind)
        parts = tuple(get_type_hints(kind).values())
    several = get_origin(kind) in (Union, UnionType) and sum(map(dataclasses.is_dataclass, parts)) > 1
    return several or any(_needs_pydantic(part, above) for part in parts)


def _is_model(kind: Any) -> bool:
    pydantic = sys.modules.get("pydantic")  # imported already by the model's class
    return pydantic is not None and isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)


def _pydantic(kind: Any) -> Codec:
    try:
        return codecs.pydantic(kind)
    except ModuleNotFoundError as error:
        if error.name != "pydantic":
            raise
        raise InvalidOption(
            f"{kind.__name__} has a union of dataclasses, for which pydantic is needed: pip install pydantic, or give"
            " the topic a codec"
        ) from error


class _ByType:
    """The codec for output topics that have none: it encodes each value by the value's type."""

    def encode(self, obj: Any, context: CodecContext) -> bytes:
        kind: Any = type(obj)
        codec = codecs.json if kind in (dict, list) else codec_for(kind)
        if codec is None:
            raise TypeError(f"{context.topic} takes {_SUITABLE}, not {type(obj).__name__}; give the topic a codec")
        return codec.encode(obj, context)

    def decode(self, data: bytes, context: CodecContext) -> Any:
        return data


by_type = _ByType()


def for_output(topic: Topic) -> Topic:
    """Return the topic; if it has no codec, a copy with a codec that encodes each value by the value's type."""
    return dataclasses.replace(topic, codec=by_type) if topic.codec is codecs.bytes else topic


def for_input(topic: Topic, codec: Callable[[], Codec] | None) -> Topic:
    """Return a topic with the codec of its handler's value type, which `codec()` returns; unchanged if `codec` is None.

    A topic's own codec stays, except that `codecs.json` is replaced for a type other than bytes and str.
    """
    if codec is None or topic.codec not in (codecs.bytes, codecs.json):
        return topic
    found = codec()
    if topic.codec is codecs.json and found in (codecs.bytes, codecs.str):
        return topic
    return dataclasses.replace(topic, codec=found)
