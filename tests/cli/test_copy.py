"""`txnbridge copy`: every part of every message arrives once, and a copy that is killed goes on where it stood."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import txnbridge
from tests.cli.conftest import Invoke
from tests.in_time import wait_until


@pytest.fixture
def urls(tmp_path: Path) -> tuple[str, str]:
    return f"embedded:{tmp_path}/a.db", f"embedded:{tmp_path}/b.db"


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
    assert json.loads(
        invoke("copy", urls[1], "--topics", "ord*", "--until-idle", "--json", "--url", urls[0]).stdout
    ) == {"copied": 0}
    with txnbridge.connect(urls[0]) as source, txnbridge.connect(urls[1]) as target:
        assert everything(target, "orders") == everything(source, "orders")
        assert [topic.name for topic in target.admin.topics()] == ["orders"]
    assert "no topic of" in invoke("copy", urls[1], "--topics", "nosuch*", "--url", urls[0]).stderr


def has(bridge: txnbridge.Bridge, count: int) -> bool:
    return len(bridge.read("orders", 10_000)) >= count


def test_a_copy_that_is_killed_goes_on_where_it_stood(urls: tuple[str, str]):
    numbers = [b"%d" % number for number in range(2000)]
    with txnbridge.connect(urls[0]) as source, txnbridge.connect(urls[1]) as target:
        source.ensure_topics("orders")
        target.ensure_topics("orders")
        with source.transaction() as txn:
            txn.send_many("orders", numbers)
        command = [sys.executable, "-m", "txnbridge.cli", "copy", urls[1], "--topics", "orders", "--batch", "50"]
        for stop in (signal.SIGKILL, signal.SIGKILL, None):
            end = ["--until-idle"] if stop is None else []
            before = len(target.read("orders", 10_000))
            with subprocess.Popen([*command, *end, "--url", urls[0], "--timeout", "3"], env={**os.environ}) as copy:
                if stop is not None:
                    wait_until(partial(has, target, min(before + 200, 1900)))
                    copy.send_signal(stop)
                assert copy.wait(120) == (0 if stop is None else -stop)
        wait_until(partial(has, target, 2000))
        assert sorted(message.value or b"" for message in target.read("orders", 10_000)) == sorted(numbers)
