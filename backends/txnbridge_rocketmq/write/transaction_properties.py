"""What each message of a transaction says about it: which one it belongs to, and where that is decided."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from txnbridge_rocketmq.client import Record
from txnbridge_rocketmq.write.message_format import OWN

_TRANSACTION, _NUMBER = f"{OWN}transaction", f"{OWN}number"
_LOG, _DEADLINE, _OPENING = f"{OWN}log", f"{OWN}deadline", f"{OWN}opening"

# Brokers take 32 KB of properties; a transaction's name is short, and so is what says where its evidence begins.
_DIGITS = re.compile(r"\d{1,18}")
# Deadlines are compared with the clocks of other hosts. Those that are kept by NTP differ by milliseconds; one that is
# further ahead than this would abort what its owner still may commit.
CLOCKS_DIFFER_SECONDS = 5.0


@dataclass(frozen=True)
class Mark:
    """A message's place in its transaction: of all that it has in this topic the `number`-th, from 0."""

    transaction: str
    number: int


@dataclass(frozen=True)
class Origin:
    """Where a half's transaction is decided, and from when on a process that was not told to may abort it."""

    log: Mapping[str, Any]  # `Evidence.log`
    deadline: int  # milliseconds since 1970
    opening: str | None = None  # of the transactional id, by its owner; behind a newer one he can commit nothing


def mark_of(record: Record) -> Mark | None:
    """The mark of a message that was sent in a transaction of ours; None for all others."""
    transaction, number = record.properties.get(_TRANSACTION), record.properties.get(_NUMBER, "")
    if not transaction or not _DIGITS.fullmatch(number):
        return None
    return Mark(transaction, int(number))


def origin_of(record: Record) -> Origin | None:
    """Where the transaction of a half of ours is decided; None for other clients' halves."""
    deadline = record.properties.get(_DEADLINE, "")
    try:
        log = json.loads(record.properties.get(_LOG, ""))
    except ValueError:
        return None
    if not isinstance(log, dict) or not _DIGITS.fullmatch(deadline):
        return None
    return Origin(log, int(deadline), record.properties.get(_OPENING))


def is_over(deadline: int) -> bool:
    """Whether a transaction's time is over on every host, so that anybody may abort it."""
    return time.time() >= deadline / 1000 + CLOCKS_DIFFER_SECONDS


def properties(mark: Mark, origin: Origin) -> dict[str, str]:
    """What a half carries so that both can be read back."""
    return {
        _TRANSACTION: mark.transaction,
        _NUMBER: str(mark.number),
        _LOG: json.dumps(dict(origin.log), separators=(",", ":")),
        _DEADLINE: str(origin.deadline),
        **({} if origin.opening is None else {_OPENING: origin.opening}),
    }


def unique_key(topic: str, mark: Mark) -> str:
    """The unique key of a half and of what is published from it: whoever knows the mark finds both by it."""
    named = hashlib.sha256(json.dumps([mark.transaction, topic]).encode()).hexdigest()
    return f"{named[:24]}{mark.number:08x}".upper()
