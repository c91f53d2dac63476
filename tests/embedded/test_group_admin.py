"""Groups as an administrator sees and sets them, and what their members tell in the log."""

import logging
import os
import re
import time

import pytest
from txnbridge_conformance.observing import eventually

import txnbridge
from tests.in_time import wait_until
from txnbridge import Conflict, NotFound
from txnbridge.testing import Child, tell


@pytest.fixture
def bridge(path):
    with txnbridge.connect(f"embedded:{path}") as bridge:
        bridge.admin.create_topic("orders", 2)
        with bridge.transaction() as txn:
            txn.send("orders", b"a", partition=0)
            txn.send("orders", b"b", partition=1)
        yield bridge


def read_all(bridge):
    with bridge.consumer("orders", "shipping") as consumer:
        messages: list[txnbridge.Message] = []
        while len(messages) < 2:
            messages += consumer.poll()


def test_a_group_goes_on_at_a_time_and_in_one_topic_only(bridge):
    with bridge.transaction() as txn:
        txn.send("other", b"c")
    with bridge.consumer(["orders", "other"], "shipping"):
        pass
    with pytest.raises(NotFound, match="never read topic 'nothing'"):
        bridge.admin.reset_group("shipping", "latest", ["orders", "nothing"])
    assert bridge.admin.reset_group("shipping", "latest", "orders") == {("orders", 0): (1,), ("orders", 1): (1,)}
    assert bridge.admin.group("shipping").lag == {("orders", 0): 0, ("orders", 1): 0, ("other", 0): 1}
    assert bridge.admin.reset_group("shipping", 1, "orders") == {("orders", 0): (0,), ("orders", 1): (0,)}
    assert bridge.admin.reset_group("shipping", 1 << 50)["other", 0] == (1,)


@pytest.mark.parametrize("sharing", ["partition", "message"])
def test_a_member_taken_for_dead_cannot_acknowledge_after_a_reset_of_its_group(path, bridge, sharing, monkeypatch):
    monkeypatch.setattr("txnbridge_embedded.read.group_assignments.Heartbeat._renew", lambda *given: None)
    with txnbridge.connect(f"embedded:{path}?lease_seconds=0.2") as silent:
        consumer = silent.consumer("orders", "shipping", sharing=sharing)
        messages = consumer.poll()
        wait_until(lambda: bridge.admin.groups() == {"shipping": 0})
        bridge.admin.reset_group("shipping", "earliest")
        with pytest.raises(Conflict), silent.transaction() as txn:
            txn.ack(messages)
    assert sum(bridge.admin.group("shipping").lag.values()) == 2


def read_and_wait(url):
    with txnbridge.connect(url) as bridge:
        consumer = bridge.consumer("orders", "shipping")
        consumer.poll()
        tell(os.getpid())
        time.sleep(60)


def test_a_member_that_waits_for_a_dead_members_lease_logs_its_owner_and_its_end(path, bridge, caplog):
    with Child(read_and_wait, f"embedded:{path}?lease_seconds=6") as child:
        pid = child.told()
    caplog.set_level(logging.INFO, "txnbridge.embedded")
    read_all(bridge)
    told = [record.getMessage() for record in caplog.records if record.name == "txnbridge.embedded"]
    assert told[0] == "group 'shipping': joined"
    held = re.compile(rf"orders\[\d\].*: assigned to \S+:{pid}, whose lease ends at [\d:]+ unless")
    waits = [line for line in told if held.search(line)]
    assert waits
    assert {f"group 'shipping': orders[{number}] is read here, from 0 on" for number in range(2)} <= set(told)
    assert told[-1] == "group 'shipping': left"
    assert told.index(waits[0]) < told.index("group 'shipping': orders[0] is read here, from 0 on")


def test_the_log_does_not_repeat_who_has_a_partition_when_others_come_and_go(bridge, caplog):
    caplog.set_level(logging.INFO, "txnbridge.embedded")
    first, second = (bridge.consumer("orders", "shipping") for _ in range(2))

    def told(text: str) -> list[str]:
        for consumer in (first, second):
            consumer.poll(timeout=0.01)
        return [line for line in map(logging.LogRecord.getMessage, caplog.records) if f"{text}: assigned to" in line]

    eventually(lambda: told("orders[0]") and told("orders[1]"), "each has one")
    for topic in ("one", "two", "three"):
        with bridge.consumer(topic, "shipping") as third:
            third.poll(timeout=0)
            eventually(lambda: len(told(f"{topic}[0]")) == 2, "both have seen it")  # noqa: B023
    # Each of the five members tells it once, and one perhaps twice while the partitions move.
    assert max(len(told("orders[0]")), len(told("orders[1]"))) <= 6
