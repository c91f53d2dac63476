"""`txnbridge copy`: every part of every message arrives once; `txnbridge spans`: what a dead copy left is ended."""

import json
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest
from click.testing import Result
from txnbridge_conformance.brokers._broker import free_ports
from txnbridge_embedded.backend import EmbeddedBackend

import txnbridge
from tests.cli.conftest import Invoke, started
from tests.conformance.broken import Broken, around
from tests.core.half.ends import EndedBridge, Ends, failing
from tests.core.half.span_programs import Pair, copy_all
from tests.core.processor_kit import numbers, send, values
from tests.in_time import wait_until
from txnbridge._half.span import sweep_of
from txnbridge._half.span_sweep import SpanSweep
from txnbridge.cli import main
from txnbridge.spi import Capability, OpenTransaction, absent
from txnbridge.testing import Child


@pytest.fixture
def urls(tmp_path: Path) -> tuple[str, str]:
    return f"embedded:{tmp_path}/a.db", f"embedded:{tmp_path}/b.db"


@pytest.fixture
def source(urls: tuple[str, str]) -> Iterator[txnbridge.Bridge]:
    """A broker with a topic of orders, which are copied from there."""
    with txnbridge.connect(urls[0]) as source:
        source.ensure_topics("orders")
        yield source


@pytest.fixture
def target(urls: tuple[str, str]) -> Iterator[txnbridge.Bridge]:
    with txnbridge.connect(urls[1]) as target:
        yield target


@pytest.fixture
def copy_all_orders(invoke: Invoke, urls: tuple[str, str]) -> Callable[..., Result]:
    """Copy the orders until nothing is left, with these options and perhaps from or to another address."""
    given = "--topics", "orders", "--until-idle", "--timeout", "5"
    return lambda *more, to=urls[1], url=urls[0]: invoke("copy", to, *given, *more, "--url", url)


def everything(bridge: txnbridge.Bridge, topic: str) -> list[list[object]]:
    messages = bridge.read(topic, 10_000)
    found = [(m.partition, m.position, m.key, m.value, m.timestamp, m.headers.raw) for m in messages]
    return [[partition, *rest] for partition, _, *rest in sorted(found, key=lambda each: each[:2])]


def test_every_part_of_every_message_is_copied(invoke: Invoke, urls: tuple[str, str]):
    with txnbridge.connect(urls[0]) as source:
        source.ensure_topics(txnbridge.Topic("orders", partitions=3), "other")
        with source.transaction() as txn:
            for number in range(100):
                key, headers = f"k{number % 7}", [("n", str(number)), ("n", b"\\xff"), ("bare", None)]
                txn.send("orders", b"%d" % number, key=key, headers=headers, timestamp=1_700_000_000_000 + number)
            txn.send("orders", None, key="k1")
            txn.send("orders", b"", key="k2")
    copied = invoke("copy", urls[1], "--topics", "ord*", "--until-idle", "--json", "--url", urls[0])
    assert json.loads(copied.stdout) == {"copied": 102}
    again = invoke("copy", urls[1], "--topics", "ord*", "--until-idle", "--json", "--url", urls[0])
    assert json.loads(again.stdout) == {"copied": 0}
    with txnbridge.connect(urls[0]) as source, txnbridge.connect(urls[1]) as target:
        assert everything(target, "orders") == everything(source, "orders")
        assert [topic.name for topic in target.admin.topics()] == ["orders"]
    assert "same as" in invoke("copy", urls[0], "--topics", "ord*", "--url", urls[0]).stderr
    assert "no topic of" in invoke("copy", urls[1], "--topics", "nosuch*", "--url", urls[0]).stderr


def copy_in_child(*arguments: str) -> None:
    main(arguments, standalone_mode=False)


def die(urls: tuple[str, str], at: str) -> None:
    """Let a copy of the orders die at an event."""
    copy = "copy", urls[1], "--topics", "orders", "--timeout", "3", "--url", urls[0]
    with Child(copy_in_child, *copy, kill=at) as dead:
        dead.stopped()


def test_a_copy_until_idle_waits_for_what_a_dead_copy_has_left(copy_all_orders, urls, source, target, quick_sweep):
    send(source, "orders", b"1")
    die(urls, at="resolve/after")
    assert len(source.admin.transactions()) == 1
    again = copy_all_orders()
    assert again.exit_code == 0 and source.admin.transactions() == []
    assert "waiting for the end of another copy's transactions: 1" in again.stderr
    send(source, "orders", b"2")
    die(urls, at="half.store/before")
    assert len(target.admin.transactions()) == 1
    assert copy_all_orders().exit_code == 0 and target.admin.transactions() == []


def test_a_copy_keeps_to_its_rate(copy_all_orders, source, monkeypatch):
    slept = [0.0]
    monkeypatch.setattr("txnbridge.cli.copy.time", SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append))
    send(source, "orders", *[b"1"] * 25)
    copied = copy_all_orders("--rate", "10")
    assert "copied: 25 messages" in copied.stdout
    assert sum(slept) == pytest.approx(2.0)  # five in a transaction, and no wait behind the last


def test_prometheus_reads_the_metrics_of_a_copy(urls, source):
    (port,) = free_ports(1)
    send(source, "orders", b"1", b"2")
    sample = 'txnbridge_processor_messages_total{backend="embedded",group="txnbridge-copy",topics="orders"} 2.0'

    def is_told() -> bool:
        with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            return sample in page.read().decode()
        return False

    with started("copy", urls[1], "--topics", "orders", "--metrics-port", str(port), "--url", urls[0]):
        wait_until(is_told)


def has(bridge: txnbridge.Bridge, count: int) -> bool:
    return len(bridge.read("orders", 10_000)) >= count


def test_two_copies_of_one_group_share_the_work_and_copy_everything_once(urls, source, target):
    copy = "copy", urls[1], "--topics", "orders", "--batch", "50", "--json", "--url", urls[0]
    source.admin.grow_topic("orders", 2)
    with started(*copy, stdout=subprocess.PIPE) as one, started(*copy, stdout=subprocess.PIPE) as other:
        wait_until(lambda: source.admin.groups().get("txnbridge-copy") == 2)
        wait_until(lambda: all(m.partitions for m in source.admin.group("txnbridge-copy").members))
        for number in range(1000):
            send(source, "orders", b"%d" % number, partition=number % 2)
        wait_until(partial(has, target, 1000))
        copied = []
        for each in (one, other):
            each.terminate()
            copied.append(json.loads(each.communicate(timeout=60)[0])["copied"])
    assert min(copied) > 0 and sum(copied) == 1000
    assert everything(target, "orders") == everything(source, "orders")


@pytest.mark.parametrize("at", ["half.store/before", "resolve/after"])
def test_a_copy_until_idle_waits_for_what_a_copy_leaves_that_dies_meanwhile(
    copy_all_orders, urls, source, target, quick_sweep, broken_broker, at
):
    died = list[object]()

    def let_another_die(broker: Broken, *given: Any) -> Any:
        if not died:
            died.append(given)
            die(urls, at)
        return broker.inner.reader(*given)

    send(source, "orders", b"1")
    copied = copy_all_orders(url=urls[0].replace("embedded", broken_broker(reader=let_another_die)))
    assert copied.exit_code == 0 and source.admin.transactions() == [] == target.admin.transactions()
    assert values(target, "orders") == [b"1"]


def test_a_copy_until_idle_copies_what_an_abort_gives_back_right_before_it_looks_for_one(
    copy_all_orders, urls, source, target, monkeypatch
):
    left = list[str]()

    def abort(bridges: Sequence[txnbridge.Bridge]) -> SpanSweep:
        for bridge in reversed(bridges if not left else ()):
            left.extend(part.transaction for part in bridge.admin.transactions())
            bridge.admin.abort(left[-1], reason="a test says so")
        return sweep_of(bridges)

    send(source, "orders", b"1")
    die(urls, at="half.store/before")
    monkeypatch.setattr("txnbridge.cli.copy.sweep_of", abort)
    assert copy_all_orders().exit_code == 0
    assert len(left) == 2 and values(target, "orders") == [b"1"]


def test_a_copy_until_idle_waits_for_open_parts_without_a_name_that_are_there_at_its_end(
    copy_all_orders, urls, source, broken_broker
):
    until, looks = int(time.time() + 60) * 1000, count()

    def transactions(*_: object) -> list[OpenTransaction]:
        return [OpenTransaction(f"anonymous-{next(looks) // 3}", "open", prepares_until=until)]

    target = urls[1].replace("embedded", broken_broker(Administering=around(transactions=transactions)))
    copied = copy_all_orders(to=target)
    assert copied.exit_code == 0 and "waiting for the end of" in copied.stderr
    assert next(looks) > 3


def test_a_copy_until_idle_says_where_it_cannot_look_for_what_other_copies_left_open(
    copy_all_orders, source, monkeypatch
):
    fewer = EmbeddedBackend.capabilities.but({Capability.LIST_OPEN: absent("it is old")})
    monkeypatch.setattr(EmbeddedBackend, "capabilities", fewer)
    copied = copy_all_orders()
    assert copied.exit_code == 0 and copied.stderr.count("lists no open transactions") == 2


def test_a_copy_until_idle_does_not_wait_for_the_spans_of_other_programs(copy_all_orders, source, target):
    ends = Ends()
    ends.by["commit"] = failing(txnbridge.BrokerUnavailable("a test says so"))
    away: Any = EndedBridge(source, ends)
    with txnbridge.spanning(target, away) as span:
        for bridge in (away, target):
            bridge.ensure_topics("other")
            span.on(bridge).send("other", b"1")
    assert copy_all_orders().exit_code == 0
    assert len(source.admin.transactions()) == 1


def test_a_message_that_the_target_refuses_ends_the_copy_or_is_a_dead_letter(copy_all_orders, urls, source, target):
    small = f"{urls[1]}?max_message_bytes=1000"
    source.ensure_topics("dead")
    send(source, "orders", b"1", bytes(2000), b"3")
    with sqlite3.connect(urls[0].removeprefix("embedded:")) as file:
        file.execute("UPDATE messages SET timestamp = -1")  # "no time", as Kafka has it, which no target takes
    refused = copy_all_orders(to=small)
    assert refused.exit_code != 0
    told = " ".join(refused.stderr.split())
    assert "<Message orders[0] at (" in told and "has 2000 bytes with its key and headers; this broker" in told
    assert "--dead-letter" in told
    assert copy_all_orders("--dead-letter", "dead", to=small).stdout == "copied: 1 messages\n"
    assert (values(target, "orders"), values(source, "dead")) == ([b"1", b"3"], [bytes(2000)])


def test_a_topic_that_grows_during_the_copy_does_not_hold_it_up(copy_all_orders, urls, source, target, broken_broker):
    def grow(broker: Broken, *given: Any) -> Any:
        if source.admin.topic("orders").partitions == 1:
            source.admin.grow_topic("orders", 2)
            send(source, "orders", b"1", partition=1)
        return broker.inner.reader(*given)

    assert copy_all_orders(url=urls[0].replace("embedded", broken_broker(reader=grow))).exit_code == 0
    assert values(target, "orders") == [b"1"]


def test_topics_of_a_pattern_come_and_go_during_the_copy(invoke, urls, source, target, broken_broker, caplog):
    def renew(broker: Broken, *given: Any) -> Any:
        opened = broker.inner.reader(*given)
        if "orders-gone" in {topic.name for topic in source.admin.topics()}:
            source.admin.delete_topic("orders-gone")
            send(source, "orders-new", b"new")
        return opened

    source.ensure_topics("orders-gone")
    send(source, "orders", b"1")
    send(source, "orders-retry-5s", b"waits")
    renewed = urls[0].replace("embedded", broken_broker(reader=renew))
    copied = invoke("copy", urls[1], "--topics", "ord*", "--until-idle", "--json", "--url", renewed)
    assert json.loads(copied.stdout) == {"copied": 3}
    assert [values(target, name) for name in ("orders", "orders-new", "orders-retry-5s")] == [
        [b"1"],
        [b"new"],
        [b"waits"],
    ]
    assert caplog.text.count("topic 'orders-gone' is gone") == 1


def test_a_copy_that_is_killed_goes_on_where_it_stood(urls: tuple[str, str]):
    urls = f"{urls[0]}?like=kafka", urls[1]
    with txnbridge.connect(urls[0]) as source, txnbridge.connect(urls[1]) as target:
        for bridge in (source, target):
            bridge.ensure_topics("orders")
        send(source, "orders", *numbers(2000))
        command = [sys.executable, "-m", "txnbridge.cli", "copy", urls[1], "--topics", "orders", "--batch", "50"]
        for stop in (signal.SIGKILL, signal.SIGKILL, None):
            end = ["--until-idle"] if stop is None else []
            before = len(target.read("orders", 10_000))
            with subprocess.Popen([*command, *end, "--url", urls[0], "--timeout", "3"]) as copy:
                if stop is not None:
                    wait_until(partial(has, target, min(before + 200, 1900)))
                    copy.send_signal(stop)
                assert copy.wait(120) == (0 if stop is None else -stop)
        wait_until(partial(has, target, 2000))
        # The embedded broker may deliver what a dead copy had acknowledged behind later messages.
        assert sorted(map(int, values(target, "orders"))) == list(range(2000))


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_copy_until_idle_that_is_stopped_before_does_not_end_as_if_everything_were_copied(urls, source, target, stop):
    target.ensure_topics("orders")
    send(source, "orders", *numbers(100))
    command = [sys.executable, "-m", "txnbridge.cli", "copy", urls[1], "--topics", "orders", "--rate", "4"]
    for end, code in ([], 0), (["--until-idle"], 128 + stop):
        before = len(target.read("orders", 100))
        process = subprocess.Popen([*command, *end, "--url", urls[0]], stdout=subprocess.PIPE, text=True)
        with process as copy:
            wait_until(partial(has, target, before + 1))
            copy.send_signal(stop)
            told, _ = copy.communicate(timeout=60)
        assert copy.returncode == code and re.fullmatch("copied: [1-9][0-9]* messages\n", told)
    assert len(target.read("orders", 100)) < 100


def test_a_broker_that_does_not_tell_its_transactions_is_not_taken_for_one_without_any(
    invoke, copy_all_orders, urls, source, target, broken_broker
):
    looks, fails = count(), failing(txnbridge.BrokerUnavailable("a test says so"), *range(3))
    transactions = lambda inner, *given: fails(next(looks), partial(inner.transactions, *given))  # noqa: E731
    failing_first = urls[0].replace("embedded", broken_broker(Administering=around(transactions=transactions)))
    assert invoke("spans", "list", urls[1], "--url", failing_first).exit_code == 3
    assert copy_all_orders(url=failing_first).exit_code == 0
    assert next(looks) > 4  # a copy has asked again


def test_a_transaction_that_a_dead_process_left_prepared_is_listed_and_ended(invoke, urls, source, target):
    for bridge in (source, target):
        bridge.ensure_topics("source", "target")
    send(source, "source", b"1", b"2")
    with Child(copy_all, Pair(urls[0], urls[1], "source", "target"), kill="half.store/before") as dead:
        wait_until(lambda: len(source.admin.transactions()) == 1 == len(target.admin.transactions()))
        dead.kill()
    listed = invoke("spans", "list", urls[1], "--url", urls[0], "--json").stdout.splitlines()
    assert [json.loads(each)["place"] for each in listed] == [0, 1]
    assert "2 parts" in invoke("spans", "list", urls[1], "--url", urls[0]).stdout
    (part,) = source.admin.transactions()
    assert "part of a span" in invoke("transactions", "list", "--url", urls[0]).stdout.replace("\n", " ")
    assert "part of a span" in invoke("transactions", "describe", part.transaction, "--url", urls[0]).stdout
    assert "spans run" in "".join(advice.remedy for advice in source.admin.doctor())
    for name in (part.transaction, str(part.token)):
        told = invoke("transactions", "abort", name, "--yes", "--reason", "a test", "--url", urls[0])
        assert told.exit_code == 2
        assert "part of a span" in told.stderr
    assert source.admin.transactions() == [part]
    with started("spans", "run", urls[1], "--url", urls[0]) as ending:
        wait_until(lambda: source.admin.transactions() == [] == target.admin.transactions())
        ending.terminate()
        assert ending.wait(60) == 0
    assert [bridge.read("target", 1) for bridge in (source, target)] == [[], []]
