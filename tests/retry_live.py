"""A processor with retries on a real broker, killed in the middle: each message has its effect once."""

import uuid
from collections import Counter
from collections.abc import Callable

import pytest
from txnbridge_conformance.observing import eventually

import txnbridge
from txnbridge import Bridge, Message, NotFound, Topic, Transaction
from txnbridge.testing import Child

MESSAGES = 60
KEYS = 7
DELAYS = [1, 2]
END = b"end"


def fails(number: int, deliveries: int) -> bool:
    """Return whether a message fails: one of five fails at its first attempt, and another one always."""
    return number % 5 == 2 or (number % 5 == 1 and deliveries == 1)


def ship(message: Message, txn: Transaction) -> None:
    txn.send(message.headers["target"], message.value, headers={"tried": str(message.deliveries)})
    if fails(int(message.value), message.deliveries):
        raise ValueError("a test says so")


def serve(url: str, source: str, target: str, group: str, keep_order: bool) -> None:
    with txnbridge.connect(url) as bridge:
        bridge.processor(
            source,
            group=group,
            each=ship,
            retry=DELAYS,
            keep_order=keep_order,
            dead_letter=target,
            max_messages=7,
            max_dead_letters_in_a_row=None,
        ).run()


def assert_each_has_its_effect_once(
    url: str, bridge: Bridge, read: Callable[[str], list[bytes]], keep_order: bool
) -> None:
    """Kill a processor while it works, and its successor while messages wait; judge what the third leaves by `read`.

    `read` returns the values of a topic with one partition, up to `END`, and is not our reader.
    """
    name = f"retry-{uuid.uuid4().hex[:8]}"
    source, target = f"{name}-in", f"{name}-out"
    retries = [f"{name}-retry-{delay}s" for delay in DELAYS]
    bridge.ensure_topics(Topic(target, partitions=1), *(Topic(each, partitions=2) for each in (source, *retries)))
    given = url, source, target, name, keep_order
    expected = [b"%d" % number for number in range(MESSAGES)]

    def come(topic: str) -> list[Message]:
        return bridge.read(topic, 10 * MESSAGES)

    with Child(serve, *given) as first:
        with bridge.transaction() as txn:
            for value in expected:
                txn.send(source, value, key=b"%d" % (int(value) % KEYS), headers={"target": target})
        eventually(lambda: come(target), "nothing is passed on")
        first.kill()
    with Child(serve, *given) as second:
        eventually(lambda: any(m.value for m in come(retries[1])), "nothing fails twice")
        second.kill()
    with Child(serve, *given) as third:
        eventually(lambda: {m.value for m in come(target)} == set(expected), "not all are passed on")
        third.kill()
    found = come(target)
    assert {m.value for m in found if "txnbridge-dead-reason" in m.headers} == set(expected[2::5])
    assert {m.headers["txnbridge-dead-topic"] for m in found if "txnbridge-dead-topic" in m.headers} == {source}
    if keep_order:
        passed_on = [int(m.value) for m in found if "txnbridge-dead-reason" not in m.headers]
        by_key = [[number for number in passed_on if number % KEYS == key] for key in range(KEYS)]
        assert by_key == [sorted(numbers) for numbers in by_key]
    with bridge.transaction() as txn:
        txn.send(target, END)
    assert Counter(read(target)) == Counter([*expected, END])


def assert_a_missing_dead_letter_topic_is_told_at_the_start(bridge: Bridge, source: str, group: str) -> None:
    missing = f"{group}-missing"
    with pytest.raises(NotFound, match=missing), bridge.processor(source, group=group, each=ship, dead_letter=missing):
        pass
