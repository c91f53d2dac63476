"""Processors whose inputs are a pattern of topics' names."""

from __future__ import annotations

import pytest

from tests.in_time import wait_until
from txnbridge import App, InvalidOption, NotFound, NotSupported, Topic, codecs, connect


def test_a_function_reads_the_topics_that_fit_its_pattern_also_those_that_come_later(tmp_path, with_timing):
    url = f"embedded:{tmp_path}/broker.db?lease_seconds=0.5"
    with_timing(pattern_look=0.05)
    app = App(url)
    failed: list[int] = []

    @app.process(
        Topic("orders-*", codecs.json), group="g", to="out", start="latest", retry=[0.05], dead_letter="orders-dead"
    )
    def ship(order: dict[str, int]) -> bytes:
        if (number := order["id"]) == 9 or number not in failed:
            failed.append(number)
            raise ValueError
        return b"%d" % number

    def send(topic: str, number: int) -> None:
        with bridge.transaction() as txn:
            txn.send(Topic(topic, codecs.json), {"id": number}, key="k")

    with connect(url) as bridge:
        bridge.ensure_topics("out", "orders-dead", "others", "orders-retry-5s")
        with pytest.raises(NotFound, match=r"no topic fits orders-\*: create one first"), app:
            pass
        bridge.ensure_topics("orders-a")
        send("orders-a", 0)
        with app:
            wait_until(lambda: app.stats["ship"].messages == 0 and app._processors[0].lag == 0)
            send("orders-a", 1)
            send("others", 1)
            wait_until(lambda: len(bridge.read("out", 9)) == 1)
            bridge.ensure_topics("orders-b")
            send("orders-b", 2)
            send("orders-b", 9)
            wait_until(lambda: len(bridge.read("out", 9)) == 2 and bridge.read("orders-dead", 9))
            bridge.admin.delete_topic("orders-a")
            send("orders-b", 3)
            wait_until(lambda: len(bridge.read("out", 9)) == 3)
        assert [(message.key, message.value) for message in bridge.read("out", 9)] == [
            (b"k", b"1"),
            (b"k", b"2"),
            (b"k", b"3"),
        ]
        with pytest.raises(InvalidOption, match="would read its own results: 'orders-b' fits"):
            app.process("orders-*", group="h", to="orders-b")(lambda value: value)
        with pytest.raises(NotSupported, match="pattern"):
            bridge.processor("orders-*", group="h", each=print, db=f"sqlite:///{tmp_path}/other.db")
