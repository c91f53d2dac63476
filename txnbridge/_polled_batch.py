"""A batch of messages on its way through a processor."""

from __future__ import annotations

from collections.abc import Sequence

from txnbridge._messages import Message
from txnbridge.errors import Poison


class PolledBatch:
    """The messages of a batch, as read and as decoded for the handler, and the errors of those that are poison.

    It keeps lists beside each other, because an object for each message would double the garbage collector's work.
    """

    __slots__ = ("_poison", "messages", "raws")

    def __init__(self, raws: list[Message], messages: list[Message], poison: dict[int, Exception]) -> None:
        self.raws = raws
        self.messages = messages
        self._poison = poison  # by index; shared with longer batches, so it may go on behind this one's end

    def __len__(self) -> int:
        return len(self.raws)

    def first(self, count: int) -> PolledBatch:
        """Return the first messages as a batch; poison that is marked there is marked here, too."""
        return self if count >= len(self) else PolledBatch(self.raws[:count], self.messages[:count], self._poison)

    def behind(self, count: int) -> PolledBatch:
        """Return the messages behind the first `count` as a batch."""
        poison = {index - count: error for index, error in self._poison.items() if index >= count}
        return PolledBatch(self.raws[count:], self.messages[count:], poison)

    def mark_poison(self, index: int, error: Exception) -> None:
        self._poison[index] = error

    @property
    def poison(self) -> dict[int, Exception]:
        """The errors of the poison messages by index, in order."""
        return {index: self._poison[index] for index in sorted(self._poison) if index < len(self)}

    def good(self) -> Sequence[int]:
        """Return the indexes of the messages that are not poison."""
        if not (poison := self.poison):
            return range(len(self))
        return [index for index in range(len(self)) if index not in poison]

    def index_named_by(self, error: Exception) -> int | None:
        """Return the index of the message that a batch handler's error names, or of the only good message."""
        good = self.good()
        if len(good) == 1:
            return good[0]
        named = error.message if isinstance(error, Poison) else None
        if not isinstance(named, Message):
            return None
        return next((index for index in good if self.raws[index][:3] == named[:3]), None)
