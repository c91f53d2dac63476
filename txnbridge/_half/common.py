"""Functions for half messages that both sending them (`half_messages`) and answering check-backs (`resolver`) need."""

from __future__ import annotations

import re
import time

from txnbridge._base.connection import Connection
from txnbridge._base.deadline import Deadline
from txnbridge._base.token import Decision, Outcome
from txnbridge._half.span_sweep import PART_OF_SPAN
from txnbridge.capabilities import Capability
from txnbridge.errors import BrokerUnavailable, EvidenceLost, InvalidOption, OutcomeUnknown
from txnbridge.spi import Half, HalfStore

# The pauses between two attempts to end a half at a broker that does not answer: each is twice as long.
_FIRST_PAUSE, _LAST_PAUSE = 0.1, 2.0

names_records_of_spans = re.compile(r"\bspans-.+-[0-9a-f]{12}\b").search


class RefusedHalf(OutcomeUnknown):
    """Raised if a topic refuses half messages that were to be published. Repeating the call at once will not help."""


def half_store(connection: Connection) -> HalfStore:
    """Return the broker's store of half messages, or the core's own one. Raise `NotSupported` if there is none."""
    connection.capabilities.require(Capability.HALF_MESSAGES)
    return connection.broker.half_store() or connection.half_lanes()


def check_group(group: object) -> str:
    if not isinstance(group, str) or not group or any(c.isspace() for c in group):
        text = f"a group of half messages, also by application=, is text without white space, not {group!r}"
        raise InvalidOption(text)
    return group


def refuse_records_of_spans(group: object) -> None:
    """Raise `InvalidOption` for the group of spans' records: if they are ended alone, nobody ends the spans' parts."""
    if isinstance(group, str) and names_records_of_spans(group):
        raise InvalidOption(f"each half message of group {group!r} is {PART_OF_SPAN}")


def check_decision(what: str, decision: object) -> None:
    if not isinstance(decision, Decision):
        text = f"{what} returned {type(decision).__name__}; it must return Decision.COMMIT, ABORT or UNDECIDED"
        raise InvalidOption(text)


def end_half(connection: Connection, store: HalfStore, half: Half, decision: Decision, deadline: Deadline) -> Outcome:
    """Publish or drop the half messages of a transaction, by a decision; return the outcome.

    The request is repeated until the broker answers. Raise the last error at the deadline.
    """
    pause = _FIRST_PAUSE
    with connection.events.step("half.end", half.transaction, decision=decision.value) as found:
        while True:
            try:
                outcome = store.end(half, decision, deadline)
            except (EvidenceLost, RefusedHalf):  # a repeated request will not help
                raise
            except (OutcomeUnknown, BrokerUnavailable):
                if deadline.left() <= pause:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE)
            else:
                found["outcome"] = outcome.value
                return outcome
