"""The openings of ids, and whether an owner's records still count under them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from txnbridge._decisions.records import IdPath, OpeningRef
from txnbridge._messages import Position


@dataclass(frozen=True)
class KnownOpening:
    """One opening of an id: its name and number, its position in the log, and what its owner said about itself."""

    under: OpeningRef
    position: Position
    host: str
    data: Mapping[str, Any]


class Openings(dict[IdPath, KnownOpening]):
    """The newest known opening of each id."""

    def is_next(self, under: OpeningRef) -> bool:
        """Return whether an opening that is read now counts.

        Each opening of an id takes the next number, so a copy that arrives late does not count. The owner of a made-up
        id appends its opening again now and then: the last copy says how long the opening is kept.
        """
        newest = self.get(under.id)
        return newest is None or newest.under.number < under.number or (under.made_up and newest.under == under)

    def is_newest(self, under: OpeningRef) -> bool:
        """Return whether an opening is the newest of its id. An owner's records behind a newer opening do not count.

        The opening of a made-up id need not be known: it is forgotten in time, and no other process opens that id.
        """
        newest = self.get(under.id)
        return under.made_up if newest is None else newest.under == under

    def is_void(self, under: OpeningRef) -> bool:
        """Return whether a newer opening shuts out the records that the owner of `under` appends now."""
        newest = self.get(under.id)
        # Two processes may have tried to take one number. Only the opening that counts has an owner who acts under it.
        return newest is not None and newest.under.number > under.number

    def kept(self, since: Position | None) -> Openings:
        """Return the openings that stay in memory and in snapshots.

        The opening of a made-up id stays while its owner may live: `since` is the position of the oldest living
        presence, and an owner appends its opening behind each of its presences.
        """
        return Openings({id: known for id, known in self.items() if _is_kept(known, since)})


def _is_kept(known: KnownOpening, since: Position | None) -> bool:
    return not known.under.made_up or (since is not None and known.position >= since)
