"""Processors whose inputs are a pattern of topics' names."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.conformance.broken import Broken, around
from tests.core.processor_kit import send
from tests.failing import raising
from tests.in_time import wait_until
from txnbridge import App, Message, Topic, Transaction, codecs, connect, errors, spi


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

    def order(topic: str, number: int) -> None:
        send(bridge, Topic(topic, codecs.json), {"id": number}, key="k")

    with connect(url) as bridge:
        bridge.ensure_topics("out", "orders-dead", "others", "orders-retry-5s")
        with pytest.raises(errors.NotFound, match=r"no topic fits orders-\*: create one first"), app:
            pass
        bridge.ensure_topics("orders-a")
        order("orders-a", 0)
        with app:
            wait_until(lambda: app.stats["ship"].messages == 0 and app._processors[0].lag == 0)
            order("orders-a", 1)
            order("others", 1)
            wait_until(lambda: len(bridge.read("out", 9)) == 1)
            bridge.ensure_topics("orders-b")
            order("orders-b", 2)
            order("orders-b", 9)
            wait_until(lambda: len(bridge.read("out", 9)) == 2 and bridge.read("orders-dead", 9))
            bridge.admin.delete_topic("orders-a")
            order("orders-b", 3)
            wait_until(lambda: len(bridge.read("out", 9)) == 3)
        assert [message[3:5] for message in bridge.read("out", 9)] == [(b"k", b"%d" % number) for number in (1, 2, 3)]
        with pytest.raises(errors.InvalidOption, match="would read its own results: 'orders-b' fits"):
            app.process("orders-*", group="h", to="orders-b")(lambda value: value)
        with pytest.raises(errors.NotSupported, match="pattern"):
            bridge.processor("orders-*", group="h", each=print, db=f"sqlite:///{tmp_path}/other.db")


def test_a_message_that_waits_for_a_retry_is_processed_if_this_member_has_not_found_its_topic_yet(tmp_path):
    url, seen = f"embedded:{tmp_path}/broker.db", []

    def note(order: Message, txn: Transaction) -> None:
        seen.append((order.topic, order.value))

    settings: Any = {"group": "g", "retry": [1.0]}
    with connect(url) as bridge:
        bridge.ensure_topics("orders-a", "orders-b")
        send(bridge, Topic("orders-b", codecs.json), {"id": 1})
        # A member that has found the topic.
        with bridge.processor("orders-b", each=raising(ValueError), **settings) as earlier:
            wait_until(lambda: earlier.stats.delayed == 1)
        bridge.admin.delete_topic("orders-b")
        with bridge.processor(Topic("orders-*", codecs.json), each=note, **settings):
            wait_until(lambda: seen)
    assert seen == [("orders-b", {"id": 1})]


@pytest.mark.parametrize(
    "error", [errors.BrokerUnavailable("away"), errors.AccessDenied("not yours"), errors.InvalidOption("is odd")]
)
def test_a_topic_is_read_later_if_the_processor_that_found_it_could_not_join(
    tmp_path, with_timing, broken_broker, error
):
    with_timing(pattern_look=0.02)
    seen, failed = list[str](), list[object]()

    def reader(broker: Broken, subscription: spi.Subscription, *rest: Any) -> Any:
        if len(subscription.topics) == 2 and not failed:
            failed.append(subscription)
            raise error
        return broker.inner.reader(subscription, *rest)

    with connect(f"{broken_broker(reader=reader)}:{tmp_path}/broker.db?lease_seconds=0.5") as bridge:
        bridge.ensure_topics("orders-a")
        with bridge.processor("orders-*", group="g", each=lambda order, txn: seen.append(order.topic)):
            bridge.ensure_topics("orders-b")
            send(bridge, "orders-b", b"1")
            wait_until(lambda: seen)
    assert (seen, len(failed)) == (["orders-b"], 1)


@pytest.mark.parametrize("create", [0, 1])
def test_a_topic_that_is_deleted_just_before_it_is_read_ends_no_processor_and_is_not_made_again(
    tmp_path, broken_broker, create
):
    seen: list[str] = []

    def reader(broker: Broken, subscription: spi.Subscription, *rest: Any) -> Any:
        for topic in {"orders-b", "orders-d"}.intersection(subscription.topics):
            bridge.admin.delete_topic(topic)
        return broker.inner.reader(subscription, *rest)

    with connect(f"{broken_broker(reader=reader)}:{tmp_path}/broker.db", create_topics=create) as bridge:
        for name in "abc":
            bridge.admin.create_topic(f"orders-{name}")
        with bridge.processor("orders-*", group="g", each=lambda order, txn: seen.append(order.topic)) as processor:
            bridge.admin.create_topic("orders-d")
            bridge.admin.delete_topic("orders-c")
            wait_until(lambda: not processor.healthy or len(bridge.admin.topics()) == 1)
            with bridge.transaction() as txn:
                txn.send("orders-a", b"1")
            wait_until(lambda: not processor.healthy or seen)
        assert [topic.name for topic in bridge.admin.topics()] == ["orders-a"]


def test_a_list_without_topics_as_of_a_name_server_just_started_ends_no_loop(tmp_path, with_timing, broken_broker):
    with_timing(pattern_look=0.02)
    seen, hidden, looks = list[str](), list[bool](), list[object]()

    def names(inner: Any, *given: Any) -> list[str]:
        looks.extend(hidden)
        return [] if hidden else inner.topic_names(*given)

    with connect(f"{broken_broker(Administering=around(topic_names=names))}:{tmp_path}/broker.db") as bridge:
        bridge.ensure_topics("orders-a")
        with bridge.processor("orders-*", group="g", each=lambda order, txn: seen.append(order.topic)):
            hidden.append(True)
            wait_until(lambda: len(looks) > 2)
            send(bridge, "orders-a", b"1")
            wait_until(lambda: seen)


def test_a_topic_that_one_list_lacks_is_read_on_and_one_that_two_lists_lack_is_not(
    tmp_path, with_timing, broken_broker
):
    with_timing(pattern_look=0.02)
    joins: list[int] = []

    def reader(broker: Broken, subscription: spi.Subscription, *rest: Any) -> Any:
        joins.append(len(subscription.topics))
        return broker.inner.reader(subscription, *rest)

    def names(inner: Any, *given: Any) -> list[str]:
        if not joins:
            return inner.topic_names(*given)  # type: ignore[no-any-return]
        return lists.pop(0) if lists else ["orders-a"]

    scheme = broken_broker(Administering=around(topic_names=names), reader=reader)
    with connect(f"{scheme}:{tmp_path}/broker.db") as bridge:
        bridge.ensure_topics("orders-a", "orders-b")
        lists = [["orders-a"], ["orders-a", "orders-b"], ["orders-a"], ["orders-a", "orders-b"]]
        with bridge.processor("orders-*", group="g", each=lambda order, txn: None):
            wait_until(lambda: len(joins) > 1)
    assert (joins, lists) == ([2, 1], [])


def test_a_processor_waits_for_the_only_topic_of_its_pattern_while_it_is_gone(tmp_path):
    seen: list[str] = []
    with connect(f"embedded:{tmp_path}/broker.db", create_topics=0) as bridge:
        bridge.admin.create_topic("orders-a")
        each = lambda order, txn: seen.append(order.topic)  # noqa: E731
        with bridge.processor("orders-*", group="g", each=each, backoff=(0.01, 0.1)) as processor:
            bridge.admin.delete_topic("orders-a")
            wait_until(lambda: processor.stats.retries > 1)
            bridge.admin.create_topic("orders-a")
            send(bridge, "orders-a", b"1")
            wait_until(lambda: seen)


@pytest.mark.parametrize("gone", [True, False])
def test_a_fatal_error_of_the_handler_is_not_taken_for_one_about_its_topics(tmp_path, gone):
    calls = []

    def each(order, txn):
        calls.append(order)
        if gone:
            bridge.admin.delete_topic("orders-a")
        raise errors.NotFound("a test says so")

    with connect(f"embedded:{tmp_path}/broker.db") as bridge:
        send(bridge, "orders-a", b"1")
        processor = bridge.processor("orders-*", group="g", each=each, fatal=errors.NotFound, retry_for=5)
        with pytest.raises(errors.NotFound, match="a test says so"):
            processor.run()
        assert len(calls) == 1


def test_a_paused_function_goes_on_when_one_of_its_topics_is_deleted(tmp_path):
    app = App(f"embedded:{tmp_path}/broker.db?lease_seconds=0.5")

    @app.process("orders-*", group="g", to="out")
    def ship(order: bytes) -> bytes:
        return order

    with connect(f"embedded:{tmp_path}/broker.db") as bridge:
        bridge.ensure_topics("orders-a", "orders-b", "out")
        with app:
            app.pause("ship")
            time.sleep(0.5)  # the poll in which it was paused ends
            bridge.admin.delete_topic("orders-a")
            time.sleep(0.5)
            app.resume("ship")
            send(bridge, "orders-b", b"1")
            wait_until(lambda: not app.healthy or len(bridge.read("out", 9)) == 1)


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_topic_that_is_deleted_and_made_anew_between_two_looks_is_read_from_its_begin(tmp_path, concurrency):
    settings, seen = {"group": "g", "concurrency": concurrency}, []

    with connect(f"embedded:{tmp_path}/broker.db?lease_seconds=0.5") as bridge:
        bridge.ensure_topics("orders-a", "orders-b")
        with bridge.processor("orders-*", each=lambda order, txn: seen.append(order.value), **settings) as processor:
            for value in (b"1", b"2", b"3"):
                send(bridge, "orders-a", value)
                wait_until(lambda: processor.stats.messages == len(seen) and value in seen)  # noqa: B023
                bridge.admin.delete_topic("orders-a")
                bridge.ensure_topics("orders-a")
    assert seen == [b"1", b"2", b"3"]
