"""The description of an app as a document of AsyncAPI 3: its channels, operations, and the schemas of its values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import quote

from txnbridge import codecs
from txnbridge._app.handler import Handler
from txnbridge._app.value_types import by_type, codec_for
from txnbridge._base.topic import Topic
from txnbridge._base.url import parse_url
from txnbridge.codecs import Codec

Document = dict[str, Any]

_PLAIN: dict[int, tuple[str, Document]] = {
    id(codecs.bytes): ("bytes", {"contentType": "application/octet-stream"}),
    id(codecs.str): ("text", {"contentType": "text/plain", "payload": {"type": "string"}}),
    id(codecs.json): ("json", {"contentType": "application/json"}),
}


class _Content(NamedTuple):
    """One kind of message: its name, its AsyncAPI message object, and the schemas to which the object refers."""

    name: str
    message: Document
    schemas: Document


def describe(title: str, version: str, urls: Mapping[str, str | None], handlers: dict[str, Handler]) -> Document:
    """Return the description of the functions, given by their names, of an app with brokers at `urls`, by name."""
    channels: Document = {}
    operations: Document = {}
    schemas: Document = {}

    def add(
        name: str, action: str, topic: Topic, contents: Iterable[_Content], handler: Handler, on: str | None = None
    ) -> None:
        place = f"{on}/{topic.name}" if on else topic.name
        channel = channels.setdefault(place, {"address": topic.name, "messages": {}})
        if len(urls) > 1 and urls.get(on or "broker"):
            channel["servers"] = [_reference("servers", on or "broker")]
        operation: Document = {"action": action, "channel": _reference("channels", place), "messages": []}
        if summary := (handler.function.__doc__ or "").strip().partition("\n")[0]:
            operation["summary"] = summary
        operation |= {"x-group": handler.group} if action == "receive" else {}
        for content in contents:
            channel["messages"][content.name] = content.message
            operation["messages"].append(_reference("channels", place, "messages", content.name))
            if any(schemas.setdefault(name, schema) != schema for name, schema in content.schemas.items()):
                content.message.pop("payload")  # another class of the same name has this schema
        operations[name] = operation

    for name, handler in handlers.items():
        for number, topic in enumerate(handler.inputs):
            add(f"{name}-input-{number + 1}" if number else name, "receive", topic, [_content(topic.codec)], handler)
        if handler.to is not None:
            add(f"{name}-result", "send", handler.to, _results(handler.to, handler.output_types), handler, handler.on)
    document: Document = {"asyncapi": "3.0.0", "info": {"title": title, "version": version or "0"}}
    addresses = {server: parse_url(url)[0] for server, url in urls.items() if url}
    if addresses:
        document["servers"] = {
            server: {"host": str(address).partition(":")[2].removeprefix("//"), "protocol": address.scheme}
            for server, address in addresses.items()
        }
    return document | {"channels": channels, "operations": operations, "components": {"schemas": schemas}}


def _reference(*path: str) -> Document:
    # The escapes of JSON pointers come first, then those of URLs.
    parts = (quote(part.replace("~", "~0").replace("/", "~1"), safe="~") for part in path)
    return {"$ref": "#/" + "/".join(parts)}


def _results(topic: Topic, types: list[Any]) -> Iterator[_Content]:
    if topic.codec is not by_type:
        yield _content(topic.codec)
    elif not types:
        yield _Content("value", {}, {})
    else:
        yield from (_content(codec) for kind in types if (codec := codec_for(kind)) is not None)


def _content(codec: Codec) -> _Content:
    """Return the kind of message that a codec encodes and decodes; for an unknown codec only a name."""
    if id(codec) in _PLAIN:
        name, message = _PLAIN[id(codec)]
        return _Content(name, message.copy(), {})
    with suppress(Exception):  # neither msgspec nor pydantic has a schema of every type
        if isinstance(codec, codecs.dataclass_json):
            import msgspec

            kind: Any = codec._cls
            [schema], inner = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
            name = kind.__name__
            return _of_schema(name, inner.pop(name, schema), inner)
        if isinstance(codec, codecs.pydantic):
            schema = codec._adapter.json_schema(ref_template="#/components/schemas/{model}")
            return _of_schema(schema.get("title", "value"), schema, schema.pop("$defs", {}))
    return _Content(type(codec).__name__.lower(), {}, {})


def _of_schema(name: str, schema: Document, inner: Document) -> _Content:
    message: Document = {"name": name, "contentType": "application/json", "payload": schema}
    if name in ("list", "dict", "value"):  # types of other elements have the same name
        return _Content(name, message, inner)
    return _Content(name, message | {"payload": _reference("components", "schemas", name)}, {**inner, name: schema})
