"""Members of groups, as the tests of groups use them."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from tests.embedded import kit
from txnbridge.spi import Broker, Deadline, Message, Partition, Subscription

GROUP = "shipping"


class Member:
    """A reader in a group, and what it was told; acknowledges what it was given, with the context of its delivery."""

    def __init__(
        self,
        broker: Broker,
        *topics: str,
        group: str = GROUP,
        sharing: str = "partition",
        start: str | int = "earliest",
        on_revoking: Callable[[Sequence[Partition]], object] | None = None,
    ) -> None:
        self.told: list[tuple[str, Partition]] = []
        self.on_revoking = on_revoking
        self.broker = broker
        self._contexts: dict[Any, Any] = {}
        subscription = Subscription(topics or ("orders",), group, start, sharing)
        self.reader = broker.reader(subscription, self, Deadline(10))

    # The listener: each assignment has a number of its own, which its messages carry.

    def assigned(self, partition: Partition) -> object:
        self.told.append(("assigned", partition))
        return len(self.told)

    def revoking(self, partitions: Sequence[Partition]) -> None:
        self.told += [("revoking", partition) for partition in partitions]
        if self.on_revoking:
            self.on_revoking(partitions)

    def lost(self, partitions: Sequence[Partition]) -> None:
        self.told += [("lost", partition) for partition in partitions]

    # What it does.

    @property
    def partitions(self) -> list[int]:
        return sorted(number for _, number in self.reader.positions())

    def poll(self, limit: int = 500, timeout: float = 0.001) -> list[Message]:
        messages = self.reader.poll(limit, Deadline(timeout))
        for message in messages:
            self._contexts.setdefault(message.source, self.reader.ack_context())
        return messages

    def take(self, count: int, timeout: float = 20) -> list[Message]:
        """Exactly so many messages, in however many polls."""
        messages: list[Message] = []
        deadline = Deadline(timeout)
        while len(messages) < count:
            messages += self.poll(count - len(messages), 0.1)
            deadline.check(f"reading {count} messages, of which {len(messages)} came")
        return messages

    def take_values(self, count: int) -> list[Any]:
        return [message.value for message in self.take(count)]

    def context(self, message: Message) -> Any:
        """The context under which a message was delivered."""
        return self._contexts[message.source]

    def tell(self, writer: Any, *messages: Message) -> None:
        """Acknowledge in the writer's transaction."""
        for message in messages:
            writer.ack(self.context(message), {(message.topic, message.partition): [message.position]})

    def ack(self, *messages: Message) -> None:
        """Acknowledge in a transaction of its own."""
        with closing(kit.open_writer(self.broker)) as writer:
            kit.begin(writer)
            self.tell(writer, *messages)
            writer.commit(Deadline(10))

    def reserve(self, *messages: Message) -> Any:
        """Acknowledge in a prepared transaction; its token."""
        writer = kit.open_preparing(self.broker)
        transaction = kit.begin(writer, prepare=True)
        self.tell(writer, *messages)
        writer.prepare(Deadline(10))
        token = kit.token_of(self.broker, writer, transaction, prepared=True)
        writer.close()
        return token

    def close(self) -> None:
        self.reader.close(Deadline(10))


def settle(*members: Member, until: Callable[[], bool], timeout: float = 20) -> None:
    """Let members follow what happens in their group, without taking messages, until something is so."""
    deadline = time.monotonic() + timeout
    while not until():
        assert time.monotonic() < deadline, [(member.partitions, member.told) for member in members]
        for member in members:
            member.reader.poll(0, Deadline(0.001))
        time.sleep(0.005)
