"""Keeps coordinators' low water marks behind an owner's transactions, so that no later end takes a lost commit back.

The end of a transaction tells a topic its coordinator's low water mark: all transactions up to it have ended. If the
topic still has an open transaction that is not above the mark, it aborts it. So if a topic misses a commit (hazard
H49), the next end there, perhaps of another program, takes the commit back. A mark never reaches an open transaction.
So an owner first begins an empty transaction, an anchor, and ends it only after the later ones have ended everywhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from txnbridge.spi import Deadline
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.client import TxnId
from txnbridge_pulsar.cluster import ClusterAccess

# Seconds in which new transactions use an anchor. Brokers refuse no late messages while it is open (hazard H44).
_USE_SECONDS = 1.0
# Seconds for which an anchor is kept after the end of its last transaction: most brokers have closed producers on
# topics that they are unloading by then. Administrators wait about as long until late messages are refused.
_KEEP_SECONDS = 1.0
# An anchor times out this long after the last transaction that may use it.
_MARGIN_SECONDS = 10.0
_SEND_SECONDS = 1.0


@dataclass(eq=False)
class _Anchor:
    """An open transaction without topics, and the number of later ones that have not ended."""

    txn: TxnId
    begun_at: float
    expires_at: float
    used: int = 0
    unused_since: float = 0.0


class Anchors:
    """The anchors of an owner's transactions. Thread-safe."""

    def __init__(self, cluster: ClusterAccess) -> None:
        self._cluster = cluster
        self._beginning = threading.Lock()
        self._lock = threading.Lock()
        self._newest: _Anchor | None = None
        self._open: list[_Anchor] = []
        self._of: dict[TxnId, _Anchor] = {}

    def begin(self, seconds: Callable[[], float], timeout: float, alone: bool = False) -> TxnId:
        """Begin a transaction behind an anchor of the same coordinator, `alone` or with others; it times out after
        `seconds()`.

        Raise the errors of `Transactions.begin`; then the next call asks another coordinator. An anchor that was begun
        for this is ended, because a coordinator at its limit of open transactions does not answer.
        """
        deadline = Deadline(timeout)
        anchor = (self._begin_anchor if alone else self._take)(seconds(), deadline)
        try:
            txn = self._cluster.client.transactions.begin(_milliseconds(seconds()), deadline.left(), anchor.txn.most)
        except BaseException:
            with self._lock:
                self._newest = None
                anchor.used -= 1
                is_needed = anchor.used or anchor.unused_since  # by others, or by what may not have arrived everywhere
                self._open = [each for each in self._open if each is not anchor or is_needed]
            if not is_needed:
                end_anchors(self._cluster, [anchor.txn], Deadline(_SEND_SECONDS))
            raise
        with self._lock:
            self._of[txn] = anchor
        return txn

    def _take(self, seconds: float, deadline: Deadline) -> _Anchor:
        """Return the newest anchor, or a new one if it is too old, or would not outlast a transaction of `seconds`."""
        held: list[bool] = []
        try:
            if not deadline.acquire(self._beginning, held):
                raise wire.RequestTimedOut("another thread still begins an anchor")
            now = time.monotonic()
            with self._lock:
                newest = self._newest
                if newest and now < min(newest.begun_at + _USE_SECONDS, newest.expires_at - seconds - _KEEP_SECONDS):
                    newest.used += 1
                    return newest
            self._newest = anchor = self._begin_anchor(seconds, deadline)
            return anchor
        finally:
            if held:
                self._beginning.release()

    def _begin_anchor(self, seconds: float, deadline: Deadline) -> _Anchor:
        now = time.monotonic()
        lasts = _USE_SECONDS + seconds + _MARGIN_SECONDS
        txn = self._cluster.client.transactions.begin(_milliseconds(lasts), deadline.left())
        anchor = _Anchor(txn, now, now + lasts, used=1)
        with self._lock:
            self._open.append(anchor)
        return anchor

    def ended(self, txn: TxnId) -> None:
        """Note that a transaction has ended, though perhaps not yet on all of its topics."""
        with self._lock:
            if (anchor := self._of.pop(txn, None)) is not None:
                anchor.used -= 1
                anchor.unused_since = time.monotonic()

    def hand_over(self, txn: TxnId) -> TxnId | None:
        """Return the anchor of a transaction that is alone with it. Whoever ends the transaction ends the anchor."""
        with self._lock:
            anchor = self._of.pop(txn, None)
            self._open = [each for each in self._open if each is not anchor]
            return None if anchor is None else anchor.txn

    def open(self, prepared: Iterable[TxnId] = ()) -> Sequence[TxnId]:
        """Return the open anchors, without those of `prepared` transactions."""
        with self._lock:
            theirs = [self._of.get(txn) for txn in prepared]
            return [anchor.txn for anchor in self._open if anchor not in theirs]

    @property
    def has_unused(self) -> bool:
        """Return whether there is an anchor that no open transaction uses."""
        with self._lock:
            return any(not anchor.used for anchor in self._open)

    def drop_unused(self, undelivered: Collection[TxnId], closing: Deadline | None = None) -> None:
        """End the anchors that no transaction needs; when `closing`, by then, also young ones.

        Transactions that are `undelivered` have ended, but not on all of their topics.
        """
        now = time.monotonic()
        with self._lock:
            unused = [
                anchor
                for anchor in self._open
                if not anchor.used
                and (closing or now > max(anchor.begun_at + _USE_SECONDS, anchor.unused_since + _KEEP_SECONDS))
                and not any(txn.most == anchor.txn.most and txn > anchor.txn for txn in undelivered)
            ]
            self._open = [each for each in self._open if each not in unused and now < each.expires_at]
        end_anchors(self._cluster, [each.txn for each in unused], closing or Deadline(len(unused) * _SEND_SECONDS))


def end_anchors(cluster: ClusterAccess, anchors: Iterable[TxnId], deadline: Deadline) -> None:
    """Have anchors ended, without waiting for it. An anchor that is not ended times out."""
    for anchor in anchors:
        with suppress(wire.PulsarError):
            cluster.client.transactions.send_abort(anchor, min(_SEND_SECONDS, deadline.left()))


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))
