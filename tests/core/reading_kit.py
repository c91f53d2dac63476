"""Helpers of the tests of readers of every broker: a listener that stands in for the core, and waits."""

from typing import Any

from txnbridge.spi import Deadline, Headers, Message, MessageColumns, Reader

# Far more than anything takes, also on a busy machine.
SOON = 60.0


def rows(columns: MessageColumns) -> list[Message]:
    """The messages that columns stand for; equal messages are equal in all but the number of their deliveries."""
    topic, number = columns.topic, columns.partition
    positions = list(zip(*columns.numbers, strict=True))
    fields = zip(positions, columns.keys, columns.values, columns.headers, columns.timestamps, strict=True)
    return [
        Message(topic, number, at, key, value, Headers(raw or ()), time, 1, None)
        for at, key, value, raw, time in fields
    ]


class Listener:
    """A listener in the core's place: it notes the partitions with this reader, and those that left."""

    def __init__(self):
        self.here = {}
        self.told = []

    def assigned(self, partition):
        self.told.append(("assigned", partition))
        self.here[partition] = object()
        return self.here[partition]

    def revoking(self, partitions):
        self._left("revoking", partitions)

    def lost(self, partitions):
        self._left("lost", partitions)

    def _left(self, how, partitions):
        for partition in partitions:
            self.told.append((how, partition))
            del self.here[partition]


class Polling:
    """A reader of which so many messages, or something else, can be waited for. Whatever else it is asked, the reader
    is.
    """

    reader: Reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reader, name)

    def poll(self, count=500, timeout=0.1):
        return self.reader.poll(count, Deadline(timeout))

    def take(self, count, timeout=SOON):
        """Return exactly so many messages."""
        found: list[Any] = []
        deadline = Deadline(timeout)
        while len(found) < count:
            found += self.reader.poll(count - len(found), deadline)
            deadline.check(f"{count} messages of which {len(found)} came")
        return found

    def until(self, true, timeout=SOON):
        """Poll until something has come about; what was read meanwhile."""
        found: list[Any] = []
        deadline = Deadline(timeout)
        while not true():
            found += self.poll(timeout=0.02)
            deadline.check("waiting")
        return found

    def has(self, count):
        """Poll until so many partitions are here."""
        return self.until(lambda: len(self.reader.positions()) == count)


def by_partition(messages):
    """The positions of messages, by their partitions."""
    found: dict[Any, Any] = {}
    for message in messages:
        found.setdefault((message.topic, message.partition), []).append(message.position)
    return found


def values(messages):
    return [message.value for message in messages]
