"""The message properties that name a message's transaction, and the decision log in which it is decided."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from txnbridge_rocketmq.client.protocol.records import MessageExt
from txnbridge_rocketmq.write.message_format import OWN

_TRANSACTION, _NUMBER = f"{OWN}transaction", f"{OWN}number"
_LOG, _DEADLINE, _OPENING, _WHOLE = f"{OWN}log", f"{OWN}deadline", f"{OWN}opening", f"{OWN}whole"

# Brokers accept 32 KB of properties. The values here are short.
_DIGITS = re.compile(r"\d{1,18}")


@dataclass(frozen=True)
class TransactionPlace:
    """A message's transaction, and the message's number among those of the transaction in the same topic, from 0."""

    transaction: str
    number: int


@dataclass(frozen=True)
class HalfOrigin:
    """The decision log in which a half's transaction is decided, and the time after which any process may abort it."""

    log: Mapping[str, Any]  # `Evidence.log`
    deadline: int  # milliseconds since 1970
    # The id of the opening by which its owner opened the transactional id. After a newer opening it cannot commit.
    opening: str | None = None
    # Only for a half that is a whole half message, and therefore has no prepare record: the time up to which it can be
    # decided, in milliseconds since 1970.
    whole_until: int | None = None


def place_of(record: MessageExt) -> TransactionPlace | None:
    """Return a message's place in its transaction, from its properties; None if no bridge sent it in a transaction."""
    transaction, number = record.properties.get(_TRANSACTION), record.properties.get(_NUMBER, "")
    if not transaction or not _DIGITS.fullmatch(number):
        return None
    return TransactionPlace(transaction, int(number))


def origin_of(record: MessageExt) -> HalfOrigin | None:
    """Return the decision log and deadline in a half's properties; None for halves of other clients."""
    deadline, whole_until = record.properties.get(_DEADLINE, ""), record.properties.get(_WHOLE, "")
    try:
        log = json.loads(record.properties.get(_LOG, ""))
    except (ValueError, RecursionError):
        return None
    if not isinstance(log, dict) or not _DIGITS.fullmatch(deadline):
        return None
    whole = int(whole_until) if _DIGITS.fullmatch(whole_until) else None
    return HalfOrigin(log, int(deadline), record.properties.get(_OPENING), whole)


def is_over(deadline: int, clocks_differ: float) -> bool:
    """Return whether a transaction's deadline is past on every host, even if clocks differ (hazard H67)."""
    return time.time() >= deadline / 1000 + clocks_differ


def properties(place: TransactionPlace, origin: HalfOrigin) -> dict[str, str]:
    """Return a half's properties that name its transaction and decision log (see `place_of`, `origin_of`)."""
    return {
        _TRANSACTION: place.transaction,
        _NUMBER: str(place.number),
        _LOG: json.dumps(dict(origin.log), separators=(",", ":")),
        _DEADLINE: str(origin.deadline),
        **({} if origin.opening is None else {_OPENING: origin.opening}),
        **({} if origin.whole_until is None else {_WHOLE: str(origin.whole_until)}),
    }


def unique_key(topic: str, place: TransactionPlace) -> str:
    """Return the unique key of a half and of its published message, which any process can compute and look up."""
    named = hashlib.sha256(json.dumps([place.transaction, topic]).encode()).hexdigest()
    return f"{named[:24]}{place.number:08x}".upper()
