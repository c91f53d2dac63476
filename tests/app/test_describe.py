"""The description of an app as a document of AsyncAPI: complete, and every reference leads somewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, make_dataclass
from datetime import date
from typing import Any, Literal
from urllib.parse import unquote

import pydantic
import pytest
from click.testing import CliRunner

from txnbridge import App, Message, Outgoing, Router, Topic, codecs
from txnbridge.cli import main


@dataclass
class Order:
    id: int
    lines: list[str]
    kind: Literal["new", "old"] = "new"
    note: str | None = None
    prices: dict[str, float] | None = None


@dataclass
class Delivery:
    day: date


class Shipment(pydantic.BaseModel):
    order: int
    delivery: Delivery


class OwnCodec:
    def encode(self, obj: Any, context: codecs.CodecContext) -> bytes:
        return b""

    def decode(self, data: bytes, context: codecs.CodecContext) -> Any: ...


app = App("kafka://one:9092,two:9092?sasl.password=env:SECRET", title="shop", version="1.2")
router = Router()
app.include(router)


@app.process(["orders", "other/orders"], group="shipping", to="shipments")
def ship(order: Order | None) -> Iterator[Shipment | str | None]:
    """Ship an order.

    More about it.
    """
    yield None


@router.process("shipments", group="billing", to=Topic("bills", codecs.json))
def bill(message: Message[Shipment]) -> list[dict[str, Any] | Outgoing]:
    return []


@router.process(Topic("orders", OwnCodec()), group="audit", to="audit")
async def note(value): ...


def note_again(value: bytes) -> None: ...


note_again.__name__ = "ship"
router.process("audit", group="again")(note_again)


def references(document: Any) -> Iterator[str]:
    for key, value in document.items() if isinstance(document, dict) else enumerate(document):
        if key == "$ref":
            yield value
        elif isinstance(value, dict | list):
            yield from references(value)


def look_up(document: Any, reference: str) -> Any:
    assert reference.startswith("#/")
    for part in reference[2:].split("/"):
        document = document[unquote(part).replace("~1", "/").replace("~0", "~")]
    return document


@pytest.fixture
def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(app.describe()))
    return found


def test_every_reference_leads_somewhere(document):
    found = list(references(document))
    assert len(found) > 10
    assert all(look_up(document, reference) is not None for reference in found)


def test_the_document_has_what_asyncapi_requires(document):
    assert document["asyncapi"] == "3.0.0"
    assert document["info"] == {"title": "shop", "version": "1.2"}
    assert document["servers"] == {"broker": {"host": "one:9092,two:9092", "protocol": "kafka"}}
    assert document.keys() <= {"asyncapi", "info", "servers", "channels", "operations", "components"}
    for channel in document["channels"].values():
        assert channel.keys() == {"address", "messages"}
        for message in channel["messages"].values():
            assert message.keys() <= {"name", "contentType", "payload"}
    for operation in document["operations"].values():
        assert operation["action"] in ("send", "receive")
        channel = operation["channel"]["$ref"]
        assert all(message["$ref"].startswith(f"{channel}/messages/") for message in operation["messages"])


def test_each_function_receives_and_sends(document):
    assert {
        name: (each["action"], each.get("x-group"), each["channel"]["$ref"], len(each["messages"]))
        for name, each in document["operations"].items()
    } == {
        "ship": ("receive", "shipping", "#/channels/orders", 1),
        "ship-input-2": ("receive", "shipping", "#/channels/other~1orders", 1),
        "ship-result": ("send", None, "#/channels/shipments", 2),
        "bill": ("receive", "billing", "#/channels/shipments", 1),
        "bill-result": ("send", None, "#/channels/bills", 1),
        "note": ("receive", "audit", "#/channels/orders", 1),
        "note-result": ("send", None, "#/channels/audit", 1),
        "ship-2": ("receive", "again", "#/channels/audit", 1),
    }
    assert document["operations"]["ship"]["summary"] == "Ship an order."
    channels = {name: set(channel["messages"]) for name, channel in document["channels"].items()}
    assert channels == {
        "orders": {"Order", "owncodec"},
        "other/orders": {"Order"},
        "shipments": {"Shipment", "text"},
        "bills": {"json"},
        "audit": {"value", "bytes"},
    }


def test_schemas_are_those_of_dataclasses_and_models(document):
    schemas = document["components"]["schemas"]
    assert schemas["Order"]["required"] == ["id", "lines"]
    assert schemas["Order"]["properties"] == {
        "id": {"type": "integer"},
        "lines": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["new", "old"], "default": "new"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "prices": {
            "anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}],
            "default": None,
        },
    }
    assert schemas["Shipment"]["properties"]["delivery"] == {"$ref": "#/components/schemas/Delivery"}
    assert schemas["Delivery"]["properties"]["day"]["format"] == "date"


class Callback(pydantic.BaseModel):
    call: Callable[[], int]


def test_a_type_without_a_name_of_its_own_or_a_schema_harms_no_other():
    several = App()
    kinds = [list[int], list[str], Callback, Order, make_dataclass("Order", [("total", int)])]
    for topic, kind in zip("abcde", kinds, strict=True):

        def take(value): ...

        take.__annotations__["value"] = kind
        several.process(topic, group="g")(take)
    messages = [m for channel in several.describe()["channels"].values() for m in channel["messages"].values()]
    lists = [{"type": "array", "items": {"type": kind}} for kind in ("integer", "string")]
    assert [m.get("payload") for m in messages] == [*lists, None, {"$ref": "#/components/schemas/Order"}, None]


PROGRAM = """
import txnbridge

app = txnbridge.App()

@app.process("orders", group="g")
def take(order: str): ...

bridge = None
"""


def test_the_command_describes_an_app_of_a_module(tmp_path, monkeypatch, own_path):
    (tmp_path / "described.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    results = [CliRunner().invoke(main, ["app", "describe", "described:app", *more]) for more in ([], ["--json"])]
    refused = CliRunner().invoke(main, ["app", "describe", "described:bridge"])
    sys.modules.pop("described")
    shown = [json.loads(result.stdout) for result in results]
    assert shown[0] == shown[1]
    assert shown[0]["channels"]["orders"]["messages"]["text"]["payload"] == {"type": "string"}
    assert "servers" not in shown[0]
    assert (refused.exit_code, "described:bridge is NoneType, not an App" in refused.stderr) == (2, True)
