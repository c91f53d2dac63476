"""Transactions that acknowledge parts of entries: nothing that they committed comes again, whatever the broker does."""

import itertools
import random
from collections.abc import Callable, Iterable

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers.plugin import StartPulsar
from txnbridge_pulsar.client import PulsarClient

from tests.core.reading_kit import values
from tests.pulsar.client_kit import admin, batch_of, fresh_topic, path_of, service
from tests.pulsar.reading_kit import Member, write

SHARINGS = ("partition", "message", "key")
ENTRIES = 8


def prefix(numbers: list[int]) -> list[int]:
    """Return what a poll brings that ends wherever its limit is."""
    return numbers[: random.randint(1, len(numbers))]


def middle(numbers: list[int]) -> list[int]:
    return prefix(numbers[random.randrange(len(numbers)) :])


def gaps(numbers: list[int]) -> list[int]:
    return sorted(random.sample(numbers, random.randint(1, len(numbers))))


class Group:
    """A topic with batches of 2 to 50 messages, and what no committed transaction of its group has acknowledged."""

    def __init__(self, broker: brokers.Pulsar, sharing: str) -> None:
        self._broker, self._sharing = broker, sharing
        self.topic = fresh_topic()
        self._numbers = itertools.count()
        self._left: set[int] = set()

    def feed(self) -> None:
        sizes = [random.randint(2, 50) for _ in range(ENTRIES)]
        batches = [list(itertools.islice(self._numbers, size)) for size in sizes]
        with PulsarClient(service(self._broker)) as client:
            write(client, self.topic, *(batch_of(*(b"%d" % number for number in batch)) for batch in batches))
        self._left.update(*batches)

    def work(self, *choices: Callable[[list[int]], list[int]]) -> None:
        """Read all that is left, and acknowledge a part of it in a transaction for each choice; some are aborted."""
        member = Member(self._broker.url, self.topic, sharing=self._sharing)
        found = member.take(len(self._left))
        assert sorted(map(int, values(found))) == sorted(self._left), self._sharing
        deliveries = {int(message.value): message for message in found}
        for choose in choices:
            chosen = choose(sorted(deliveries))
            commit = random.random() < 0.8
            txn = member.begin((self.topic, 0))
            member.ack(txn, [deliveries.pop(number) for number in chosen])
            member.end(txn, commit)
            if commit:
                self._left.difference_update(chosen)
            if not deliveries:
                break
        member.leave()

    def finish(self) -> None:
        """Show that nothing comes behind what is left."""
        self.work()
        with PulsarClient(service(self._broker)) as client:
            number = next(self._numbers)
            write(client, self.topic, b"%d" % number)
            self._left.add(number)
        self.work()


def unload(broker: brokers.Pulsar, groups: Iterable[Group]) -> None:
    for group in groups:
        admin(broker, "PUT", f"{path_of(group.topic)}/unload")


def restart(broker: brokers.Pulsar, groups: Iterable[Group]) -> None:
    broker.stop()
    broker.start()


def kill(broker: brokers.Pulsar, groups: Iterable[Group]) -> None:
    broker.kill()
    broker.start()


@pytest.mark.parametrize("by_index", ["true", "false"], ids=["by index", "whole"])
def test_committed_parts_of_entries_never_come_again_where_topics_load_anew(start_pulsar: StartPulsar, by_index: str):
    """A broker that loads a topic skips a whole ACK command of its log if it knows one of the positions already."""
    broker = start_pulsar(settings={"acknowledgmentAtBatchIndexLevelEnabled": by_index})
    groups = [Group(broker, sharing) for sharing in SHARINGS]
    for event in (unload, unload, unload, kill, unload, restart):
        for group in groups:
            group.feed()
            group.work(prefix, gaps, middle, prefix, middle)
        event(broker, groups)
    for group in groups:
        group.finish()
