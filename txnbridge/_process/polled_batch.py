"""`PolledBatch`: the messages of a processor's poll, with marks for those that its handler cannot process."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from txnbridge._base.messages import Message
from txnbridge.errors import Poison


class SetAside(NamedTuple):
    """The mark of a message that the handler cannot process: poison, or `delayed`, to be sent to a retry topic.

    `delayed` is None for a record of txnbridge's own in a retry topic (a note), which is only acknowledged.
    """

    error: Exception
    delayed: bool | None


@dataclass(slots=True, eq=False)
class PolledBatch:
    """The messages of a batch, with marks for those that cannot be processed.

    `delivered` are the messages to acknowledge. `originals` are the same messages, but those from a retry topic as they
    were in their original topic. `messages` are the originals, decoded for the handler.

    They are in parallel lists, because an object for each message would double the garbage collector's work.
    """

    delivered: list[Message]
    originals: list[Message]
    messages: list[Message]
    # Marks by index; shared with the longer batch, so some indexes may be beyond this batch.
    _set_aside: dict[int, SetAside]

    def __len__(self) -> int:
        return len(self.delivered)

    def first(self, count: int) -> PolledBatch:
        """Return the first `count` messages as a batch that shares its marks with this batch."""
        if count >= len(self):
            return self
        return PolledBatch(self.delivered[:count], self.originals[:count], self.messages[:count], self._set_aside)

    def behind(self, count: int) -> PolledBatch:
        """Return the messages after the first `count` as a new batch."""
        marks = {index - count: mark for index, mark in self._set_aside.items() if index >= count}
        return PolledBatch(self.delivered[count:], self.originals[count:], self.messages[count:], marks)

    def set_aside(self, index: int, error: Exception, *, delayed: bool | None = False) -> None:
        """Mark a message as poison, or as delayed: it goes to a retry topic."""
        self._set_aside[index] = SetAside(error, delayed)

    @property
    def notes(self) -> int:
        """The number of messages in the batch that are notes: txnbridge's own records in a retry topic."""
        return sum(mark.delayed is None and index < len(self) for index, mark in self._set_aside.items())

    @property
    def marked(self) -> Set[int]:
        """The indexes of messages marked as poison or delayed, perhaps beyond this batch, without later marks."""
        return frozenset(self._set_aside)

    @property
    def poison(self) -> dict[int, Exception]:
        """The errors of the poison messages, by index in ascending order."""
        return self._errors(delayed=False)

    @property
    def delayed(self) -> dict[int, Exception]:
        """The errors of the messages that go to a retry topic, by index in ascending order."""
        return self._errors(delayed=True)

    def _errors(self, delayed: bool) -> dict[int, Exception]:
        marks = self._set_aside
        return {i: marks[i].error for i in sorted(marks) if i < len(self) and marks[i].delayed is delayed}

    def good(self) -> Sequence[int]:
        """Return the indexes of messages that are marked neither as poison nor as delayed, for the handler."""
        if not self._set_aside:
            return range(len(self))
        return [index for index in range(len(self)) if index not in self._set_aside]

    def has_good(self, begin: int, end: int) -> bool:
        """Return whether any of the messages from index `begin` to before `end` is not marked."""
        return any(index not in self._set_aside for index in range(begin, end))

    def index_named_by(self, error: Exception) -> int | None:
        """Return the index of the message that caused a batch handler's error; None if this cannot be determined.

        It is the message of a `Poison` error, or the only message that is neither poison nor delayed.
        """
        good = self.good()
        if len(good) == 1:
            return good[0]
        named = error.message if isinstance(error, Poison) else None
        if not isinstance(named, Message):
            return None
        return next((index for index in good if self.originals[index][:3] == named[:3]), None)
