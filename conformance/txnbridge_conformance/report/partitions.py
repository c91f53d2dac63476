"""`Partitions`: the messages of each partition in their order, to show those around the message of a finding."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from txnbridge_conformance.history import History, Key, Position

# How many messages are shown before and after the one of a finding.
_SPAN = 3


@dataclass(frozen=True)
class PlacedMessage:
    """A message at a position of a partition. `operation` is the number of the call that sent it, None if unknown."""

    partition: str
    position: Position
    value: str
    operation: int | None


class Partitions:
    """The messages of each partition by position, as far as processes read them or recorded where they are stored."""

    def __init__(self, history: History) -> None:
        self._writers = {value: order for order, _, values in history.sends for value in values}
        found: dict[Key, set[tuple[Position, str]]] = defaultdict(set)
        for _, _, messages in history.polls:
            for topic, partition, position, value in messages:
                if position is not None and value is not None:
                    found[topic, partition].add((tuple(position), value))
        for key, values, positions in history.stored:
            found[key].update(zip(map(tuple, positions), values, strict=True))
        self._messages = {key: sorted(messages) for key, messages in found.items()}
        self._rows: dict[str, list[tuple[Key, int]]] = defaultdict(list)
        for key, placed in self._messages.items():
            for row, (_, text) in enumerate(placed):
                self._rows[text].append((key, row))

    def around(self, value: str) -> list[PlacedMessage]:
        """Return the messages around each place of a value, in their order, with the value's own message."""
        return [
            self._place(key, row)
            for key, row in self._rows.get(value, ())
            for row in range(max(0, row - _SPAN), min(len(self._messages[key]), row + _SPAN + 1))
        ]

    def _place(self, key: Key, row: int) -> PlacedMessage:
        position, value = self._messages[key][row]
        return PlacedMessage(f"{key[0]}[{key[1]}]", position, value, self._writers.get(value))
