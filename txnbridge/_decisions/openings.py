"""The newest opening of each id, by which an owner's records are judged: they count until a newer opening."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from txnbridge._base.messages import Position
from txnbridge._decisions.records import IdPath, OpeningRef


@dataclass(frozen=True)
class KnownOpening:
    """The record by which a process became an id's owner: its name, number and position, the owner's host and data."""

    under: OpeningRef
    position: Position
    host: str
    data: Mapping[str, Any]


class Openings(dict[IdPath, KnownOpening]):
    """Maps each id to its newest known opening."""

    def is_next(self, under: OpeningRef) -> bool:
        """Return whether the next record of the log, which is this opening, becomes the newest opening of its id.

        Each opening of an id takes the next number, so a late copy does not count. The owner of a made-up id may open
        it again, and then the data and the position of the last opening count.
        """
        newest = self.get(under.id)
        return newest is None or newest.under.number < under.number or (under.made_up and newest.under == under)

    def is_newest(self, under: OpeningRef) -> bool:
        """Return whether an opening is the newest of its id. An owner's records after a newer opening do not count.

        The opening of a made-up id need not be known: it is forgotten in time, and no other process opens such an id.
        """
        newest = self.get(under.id)
        return under.made_up if newest is None else newest.under == under

    def is_void(self, under: OpeningRef) -> bool:
        """Return whether a newer owner makes void all that the owner with the opening `under` appends now."""
        newest = self.get(under.id)
        # Two processes may append openings with the same number. Only the process whose opening counts uses it.
        return newest is not None and newest.under.number > under.number

    def kept(self, since: Position | None) -> Openings:
        """Return the openings to keep in memory and in snapshots: without those of made-up ids before `since`.

        `since` is the position of the oldest presence record that is still needed.
        """
        return Openings({id: known for id, known in self.items() if _is_kept(known, since)})


def _is_kept(known: KnownOpening, since: Position | None) -> bool:
    return not known.under.made_up or (since is not None and known.position >= since)
