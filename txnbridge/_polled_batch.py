"""`PolledBatch`: the messages that a processor has polled and is processing, with its poison messages."""

from __future__ import annotations

from collections.abc import Sequence

from txnbridge._messages import Message
from txnbridge.errors import Poison


class PolledBatch:
    """The messages of a batch, raw and decoded for the handler, and the errors of the poison messages among them.

    They are in parallel lists, because an object for each message would double the garbage collector's work.
    """

    __slots__ = ("_poison", "messages", "raws")

    def __init__(self, raws: list[Message], messages: list[Message], poison: dict[int, Exception]) -> None:
        self.raws = raws
        self.messages = messages
        self._poison = poison  # errors by index; shared with the longer batch, so some indexes may be beyond this batch

    def __len__(self) -> int:
        return len(self.raws)

    def first(self, count: int) -> PolledBatch:
        """Return the first `count` messages as a batch that shares its marks of poison with this batch."""
        return self if count >= len(self) else PolledBatch(self.raws[:count], self.messages[:count], self._poison)

    def behind(self, count: int) -> PolledBatch:
        """Return the messages after the first `count` as a new batch."""
        poison = {index - count: error for index, error in self._poison.items() if index >= count}
        return PolledBatch(self.raws[count:], self.messages[count:], poison)

    def mark_poison(self, index: int, error: Exception) -> None:
        self._poison[index] = error

    @property
    def poison(self) -> dict[int, Exception]:
        """The errors of the poison messages, by index in ascending order."""
        return {index: self._poison[index] for index in sorted(self._poison) if index < len(self)}

    def good(self) -> Sequence[int]:
        """Return the indexes of the messages that are not poison."""
        if not (poison := self.poison):
            return range(len(self))
        return [index for index in range(len(self)) if index not in poison]

    def index_named_by(self, error: Exception) -> int | None:
        """Return the index of the message that caused a batch handler's error; None if this cannot be determined.

        It is the only good message, or the message of a `Poison` error.
        """
        good = self.good()
        if len(good) == 1:
            return good[0]
        named = error.message if isinstance(error, Poison) else None
        if not isinstance(named, Message):
            return None
        return next((index for index in good if self.raws[index][:3] == named[:3]), None)
