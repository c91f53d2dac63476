"""The records on a fence topic. Each names the owner of a transactional id, and its transactions that have not ended.

Each record lists all such transactions, so only the last record is read, and earlier records can be trimmed.
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
    """The place where a transaction's outcome can be read: its proof topic, and the presence record before its proof.

    The writer stored the presence record before the transaction. Tokens and fence records contain this location.
    """

    topic: str  # full name
    since: tuple[int, int]  # position of the presence record
    nonce: str  # random text in the presence record
    at: tuple[int, int] | None = None  # position of the proof message, if it is known

    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"m": self.topic, "s": list(self.since), "n": self.nonce}
        return fields if self.at is None else {**fields, "p": list(self.at)}

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> ProofLocation:
        """Return the location in a token's or fence record's fields. Raise `KeyError`, `TypeError` or `ValueError`."""
        if not isinstance(fields["m"], str) or not isinstance(fields["n"], str):
            raise TypeError("names are text")
        at = _entry_position(fields["p"]) if "p" in fields else None
        return cls(fields["m"], _entry_position(fields["s"]), fields["n"], at)


@dataclass(frozen=True)
class AnnouncedTransaction:
    """A transaction that its owner has named on the fence topic, with all that another process needs to end it."""

    transaction: str
    txn: TxnId
    topics: tuple[str, ...]  # concrete topics, the proof topic among them
    subscriptions: tuple[tuple[str, str], ...]
    proof: ProofLocation
    slot: int | None = None  # of a transaction that will be prepared: see `PreparedSlots`
    expires_at: int | None = None  # milliseconds since 1970
    prepared: bool = False
    messages: int = 0

    @property
    def users_topics(self) -> tuple[str, ...]:
        return tuple(topic for topic in self.topics if topic != self.proof.topic)

    def fields(self) -> dict[str, Any]:
        partitions: dict[str, list[int]] = {}
        for concrete in self.topics:
            name, number = whole_topic(concrete)
            partitions.setdefault(name, []).append(-1 if name == concrete else number)
        fields: dict[str, Any] = {"t": self.transaction, "x": list(self.txn), "p": partitions}
        fields |= {"a": [list(pair) for pair in self.subscriptions], "k": self.proof.fields(), "i": self.slot}
        fields |= {"e": self.expires_at, "d": self.prepared or None, "c": self.messages or None}
        return {name: value for name, value in fields.items() if value not in (None, [])}

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> AnnouncedTransaction:
        txn, proof = _txn_id(fields["x"]), ProofLocation.read(fields["k"])
        named = [(name, number) for name, numbers in fields["p"].items() for number in numbers]
        topics = tuple(name if number < 0 else f"{name}-partition-{number}" for name, number in named)
        subscriptions = tuple((str(topic), str(name)) for topic, name in fields.get("a", ()))
        state = fields.get("i"), fields.get("e"), bool(fields.get("d")), int(fields.get("c", 0))
        return cls(str(fields["t"]), txn, topics, subscriptions, proof, *state)


@dataclass(frozen=True)
class FenceRecord:
    """A record on a fence topic: the owner, the time, and the transactions that the owner does not know to have ended.

    Transactions `at_risk` were ended by another process than their writer, and some broker does not refuse their late
    messages yet. If the writer still sends such a message, it blocks its topic for all readers. `fence_id` is the same
    in all records of a transactional id; see `FenceIdentity`. The next owner ends the open `anchors`; see `Anchors`.
    """

    opening: str
    host: str
    at: int  # milliseconds since 1970
    under_way: Sequence[AnnouncedTransaction] = field(default=())
    at_risk: Sequence[AnnouncedTransaction] = field(default=())
    fence_id: str = ""
    anchors: Sequence[TxnId] = field(default=())

    def pack(self) -> bytes:
        fields: dict[str, Any] = {"v": VERSION, "o": self.opening, "h": self.host, "w": self.at}
        fields |= {"u": [each.fields() for each in self.under_way], "r": [each.fields() for each in self.at_risk]}
        fields |= {"l": self.fence_id, "k": [list(each) for each in self.anchors]}
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, data: bytes | None) -> FenceRecord:
        """Return the fence record in this data. Raise `EvidenceLost` if it is invalid: its transactions are unknown."""
        try:
            fields = json.loads(data or b"")
            if fields["v"] != VERSION:
                raise ValueError("another version")
            under_way, at_risk = (tuple(map(AnnouncedTransaction.read, fields[name])) for name in "ur")
            (opening, host, fence_id), anchors = (str(fields[name]) for name in "ohl"), tuple(map(_txn_id, fields["k"]))
            return cls(opening, host, _number(fields["w"]), under_way, at_risk, fence_id, anchors)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise EvidenceLost("a record on a fence topic was not written by this or an earlier txnbridge") from error


def _txn_id(value: Any) -> TxnId:
    return TxnId(*_entry_position(value))


def _entry_position(value: Any) -> tuple[int, int]:
    ledger, entry = value
    return _number(ledger), _number(entry)


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError("not a number")
    return value
