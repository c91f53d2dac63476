"""Every block of Python in README and guide runs, in order, as it stands there.

The pages leave out what a program has of its own, such as a place to store tokens. The test has that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import sqlalchemy as sa
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from sqlalchemy import orm

import txnbridge
from tests.house.rooms import ROOT
from txnbridge import Bridge, Outcome


class Done(Exception):
    """Ends a loop that runs for ever."""


@dataclasses.dataclass
class Item:
    name: str


class Base(orm.DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)


def run_blocks(page: str, names: dict[str, Any]) -> int:
    """Run the blocks of a page with these names, to which they add; return how many there are."""
    text = (ROOT / page).read_text()
    found = list(re.finditer(r"^```python\n(.+?)^```$", text, re.MULTILINE | re.DOTALL))
    for block in found:
        line = text.count("\n", 0, block.start()) + 1
        if "orders.insert()" in block[1]:  # the table, not the topic
            names["orders"] = Order.__table__
        with contextlib.suppress(Done):
            exec(compile("\n" * line + block[1], page, "exec"), names)
        names["bridge"] = names["open_bridge"]  # some blocks close one of their own
        if names["stored"]:
            names["token"] = names["stored"][-1]
    return len(found)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Yield the names that the blocks use and do not define."""
    monkeypatch.chdir(tmp_path)
    engine = sa.create_engine(f"sqlite:///{tmp_path}/orders.db")
    Base.metadata.create_all(engine)
    shipped: list[bytes] = []
    stored: list[str] = []

    def ship(value: bytes) -> bytes:
        shipped.append(value)
        if len(shipped) > 1:
            raise Done
        with bridge.transaction() as txn:
            txn.send("orders", b"the second")
        return value

    with txnbridge.connect("embedded:shop.db") as bridge:
        yield {
            "Item": Item,
            "JSONDeserializer": JSONDeserializer,
            "JSONSerializer": JSONSerializer,
            "Session": orm.Session,
            "bridge": bridge,
            "client": SchemaRegistryClient.new_client({"url": "mock://guide"}),
            "engine": engine,
            "open_bridge": bridge,
            "remember": stored.append,
            "rows": [b"1", b"2"],
            "schema": '{"title": "Item", "type": "object"}',
            "ship": ship,
            "shipped": shipped,
            "store": stored.append,
            "stored": stored,
            "txnbridge": txnbridge,
        }
    engine.dispose()


def values(bridge: Bridge, topic: str) -> list[bytes | None]:
    return [message.value for message in bridge.read(topic, 100)]


def test_every_block_of_the_guide_runs(names):
    registered = set(txnbridge.plugins.manager.get_plugins())
    try:
        assert run_blocks("docs/guide.md", names) > 10
    finally:
        for plugin in set(txnbridge.plugins.manager.get_plugins()) - registered:
            txnbridge.plugins.unregister(plugin)
    bridge = names["bridge"]
    assert names["outcome"] is Outcome.COMMITTED
    assert values(bridge, "shipments") == names["shipped"][:1]
    assert values(bridge, "lines") == [b"1", b"2", b"3"]
    assert values(bridge, "rows") == [b"1", b"2"]
    # Sent, sent again, prepared and committed, with the database.
    assert len(values(bridge, "orders")) == 4
    with orm.Session(names["engine"]) as session:
        assert {order.id for order in session.scalars(sa.select(Order))} == {42}


def test_every_block_of_the_readme_runs(names):
    names["stored"].append("")
    names["database"] = names["producer"] = names["order"] = Mock()
    assert run_blocks("README.md", names) == 3
    assert values(names["bridge"], "shipments") == [b"ship order 42"]
    assert values(names["bridge"], "audit") == [b"order 42 taken"]
    assert len(values(names["bridge"], "orders")) == 2
