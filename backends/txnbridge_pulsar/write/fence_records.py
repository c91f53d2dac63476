"""The records on a fence topic: who owns a transactional id, and which of its transactions have not ended.

Each record says all of it, so that the last one suffices and all before it can go.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from txnbridge.errors import EvidenceLost
from txnbridge_pulsar.client import TxnId
from txnbridge_pulsar.settings.topic_names import whole_topic

VERSION = 1


@dataclass(frozen=True)
class ProofLocation:
    """Where the record stands that a transaction puts inside itself: its evidence.

    `since` is the position of a plain record with a random `nonce`, which the writer has stored there before: a topic
    that does not begin with that record has lost some, or was made anew. `at` is where the transaction's own record
    stands, once its receipt has told.
    """

    topic: str  # its full name
    since: tuple[int, int]
    nonce: str
    at: tuple[int, int] | None = None

    def fields(self) -> dict[str, Any]:
        found: dict[str, Any] = {"m": self.topic, "s": list(self.since), "n": self.nonce}
        return found if self.at is None else {**found, "p": list(self.at)}

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> ProofLocation:
        """Raises `KeyError`, `TypeError` or `ValueError` for other fields."""
        if not isinstance(fields["m"], str) or not isinstance(fields["n"], str):
            raise TypeError("names are text")
        at = _place(fields["p"]) if "p" in fields else None  # none in those of earlier versions
        return cls(fields["m"], _place(fields["s"]), fields["n"], at)


@dataclass(frozen=True)
class AnnouncedTransaction:
    """One transaction: all that a process needs to end it, and to have the brokers refuse its late messages."""

    transaction: str
    txn: TxnId
    topics: tuple[str, ...]  # concrete ones, the marker topic among them
    subscriptions: tuple[tuple[str, str], ...]
    proof: ProofLocation
    slot: int | None = None  # of one that is to be prepared
    expires_at: int | None = None  # milliseconds since 1970
    prepared: bool = False
    messages: int = 0

    @property
    def users_topics(self) -> tuple[str, ...]:
        return tuple(topic for topic in self.topics if topic != self.proof.topic)

    def fields(self) -> dict[str, Any]:
        places: dict[str, list[int]] = {}
        for concrete in self.topics:
            name, number = whole_topic(concrete)
            places.setdefault(name, []).append(-1 if name == concrete else number)
        found = {
            "t": self.transaction,
            "x": list(self.txn),
            "p": places,
            "a": [list(pair) for pair in self.subscriptions],
            "k": self.proof.fields(),
            "i": self.slot,
            "e": self.expires_at,
            "d": self.prepared or None,
            "c": self.messages or None,
        }
        return {name: value for name, value in found.items() if value not in (None, [])}

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> AnnouncedTransaction:
        most, least = fields["x"]
        return cls(
            transaction=str(fields["t"]),
            txn=TxnId(_number(most), _number(least)),
            topics=tuple(
                name if number < 0 else f"{name}-partition-{number}"
                for name, numbers in fields["p"].items()
                for number in numbers
            ),
            subscriptions=tuple((str(topic), str(name)) for topic, name in fields.get("a", ())),
            proof=ProofLocation.read(fields["k"]),
            slot=fields.get("i"),
            expires_at=fields.get("e"),
            prepared=bool(fields.get("d")),
            messages=int(fields.get("c", 0)),
        )


@dataclass(frozen=True)
class FenceRecord:
    """One record: who the owner is and since when, and its transactions that have not ended as far as it knows.

    Those `at_risk` were ended by other processes than their writers, and brokers do not yet refuse everywhere what
    these writers may still send: a message that comes late blocks its topic for all readers. `lineage` is the same in
    all notices of an id; see `Lineage`.
    """

    opening: str
    host: str
    at: int  # milliseconds since 1970
    under_way: Sequence[AnnouncedTransaction] = field(default=())
    at_risk: Sequence[AnnouncedTransaction] = field(default=())
    fence_id: str = ""  # of notices of earlier versions

    def pack(self) -> bytes:
        fields = {
            "v": VERSION,
            "o": self.opening,
            "h": self.host,
            "w": self.at,
            "u": [each.fields() for each in self.under_way],
            "r": [each.fields() for each in self.at_risk],
            "l": self.fence_id,
        }
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, data: bytes | None) -> FenceRecord:
        """Raises `EvidenceLost` for a record that is not ours: nobody knows then which transactions are unresolved."""
        try:
            fields = json.loads(data or b"")
            if fields["v"] != VERSION:
                raise ValueError("another version")
            return cls(
                opening=str(fields["o"]),
                host=str(fields["h"]),
                at=_number(fields["w"]),
                under_way=tuple(AnnouncedTransaction.read(each) for each in fields["u"]),
                at_risk=tuple(AnnouncedTransaction.read(each) for each in fields["r"]),
                fence_id=str(fields.get("l", "")),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EvidenceLost("a record on a fence topic is not one of this or an earlier txnbridge") from error


def _place(value: Any) -> tuple[int, int]:
    ledger, entry = value
    return _number(ledger), _number(entry)


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError("not a number")
    return value
