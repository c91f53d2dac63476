"""A topic that is recreated, once or again and again while it is copied."""

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress

import pytest
from txnbridge_conformance.observing import eventually, seen, send, take, values

import txnbridge
from tests import chaos
from tests.failing import on_call
from txnbridge import Bridge, InvalidState, Message, PositionLost, TxnBridgeError

FEW = [b"old %d" % number for number in range(10)]
MORE = [b"new %d" % number for number in range(60)]


def delete_topic(bridge: Bridge, topic: str) -> None:
    """Delete a topic as soon as nothing that was committed counts as open there any more, which a broker notes late."""

    def is_deleted() -> bool:
        with suppress(InvalidState):
            bridge.admin.delete_topic(topic)
            return True
        return False

    eventually(is_deleted, "the topic is deleted")


def delete_for_good(bridge: Bridge, topic: str) -> None:
    """Delete a topic, and return when the broker lists it no more."""
    delete_topic(bridge, topic)
    eventually(lambda: topic not in [each.name for each in bridge.admin.topics()], "the topic is gone")


def delete_at_first(patch: pytest.MonkeyPatch, owner: type, name: str, bridge: Bridge, topic: str) -> None:
    """Let a topic be deleted right before a method's first call."""
    left = [topic]

    def delete(*_: object) -> None:
        if left:
            delete_for_good(bridge, left.pop())

    on_call(patch, owner, name, delete)


@pytest.fixture
def renew(bridge: Bridge) -> Callable[[str], None]:
    """Delete a topic and make it anew, with more messages than it had."""

    def renew(topic: str) -> None:
        delete_for_good(bridge, topic)
        bridge.admin.create_topic(topic, 1)
        send(bridge, topic, *MORE)

    return renew


def read_on_where_told(bridge: Bridge, topic: str, group: str | None, renew: Callable[[str], None]) -> list[Message]:
    """Check that a reader reads on in a topic that is recreated only where it is told; return what it then reads."""
    send(bridge, topic, *FEW)
    with bridge.consumer(topic, group) as consumer:
        old = take(consumer, 5)
        if group is not None:
            with bridge.transaction() as txn:
                txn.ack(old)
        assert values(take(consumer, 5)) == FEW[5:]
        renew(topic)
        for _ in range(2):
            with pytest.raises(PositionLost, match="created again"):
                take(consumer, 1)
        consumer.seek({(topic, 0): (0,)})
        new = take(consumer, len(MORE))
    assert values(new) == MORE
    return new


class Renewal:
    """A topic that is deleted and recreated at any instant; each message says which topic it is of, and its number."""

    def __init__(self, url: str, source: str) -> None:
        self.sizes: list[int] = []
        self._url, self._source = url, source
        self._chance = chaos.begin()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew_again_and_again)
        self._thread.start()

    def _renew_again_and_again(self) -> None:
        with txnbridge.connect(self._url) as own:
            self._fill(own)
            while not self._ended.wait(self._chance.uniform(0, 2)):
                delete_topic(own, self._source)
                while not self._is_made(own):
                    time.sleep(0.02)
                self._fill(own)

    def _is_made(self, own: Bridge) -> bool:
        with suppress(TxnBridgeError):
            return own.admin.create_topic(self._source)
        return False

    def _fill(self, own: Bridge) -> None:
        generation, size = len(self.sizes), self._chance.randint(1, 80)
        send(own, self._source, *[f"{generation}.{number}".encode() for number in range(size)])
        self.sizes.append(size)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


class Copier:
    """A process that copies in transactions, and starts again where it is told that its topic is another one."""

    def __init__(self, bridge: Bridge, source: str, target: str, group: str) -> None:
        self._bridge, self._source, self._target = bridge, source, target
        self._chance = random.Random(chaos.SEED)
        self.consumer = bridge.consumer(source, group)

    def copy(self) -> None:
        try:
            if batch := self.consumer.poll(self._chance.randint(1, 10), timeout=0.2):
                with self._bridge.transaction() as txn:
                    txn.send_many(self._target, values(batch))
                    time.sleep(self._chance.choice((0, 0, 0.3)))
                    txn.ack(batch)
        except PositionLost:
            with suppress(TxnBridgeError):
                self.consumer.seek({(self._source, 0): (0,)})
        except TxnBridgeError as error:
            chaos.say(f"{type(error).__name__}: {error}")

    def copied(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for value in values(seen(self._bridge, self._target)):
            assert isinstance(value, bytes)
            generation, _, number = value.decode().partition(".")
            found[int(generation)].append(int(number))
        return found


def made_anew_again_and_again(bridge: Bridge, source: str, target: str, group: str, url: str) -> None:
    """Copy a topic into another one while it is recreated, and check that nothing of it was skipped or doubled."""
    copier, renewal = Copier(bridge, source, target, group), Renewal(url, source)
    with copier.consumer:
        until = time.monotonic() + chaos.SECONDS / 5
        while time.monotonic() < until:
            copier.copy()
        renewal.end()
        while len(copier.copied()[len(renewal.sizes) - 1]) < renewal.sizes[-1]:
            assert time.monotonic() < until + chaos.SETTLING
            copier.copy()
    found = copier.copied()
    chaos.say(f"{len(renewal.sizes)} topics, {sum(map(len, found.values()))} messages of {len(found)} were copied")
    assert {generation: numbers for generation, numbers in found.items() if numbers != list(range(len(numbers)))} == {}
    assert len(found[len(renewal.sizes) - 1]) == renewal.sizes[-1]
