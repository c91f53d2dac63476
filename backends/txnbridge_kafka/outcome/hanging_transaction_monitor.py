"""Finishes what a broker forgot of a process that is gone, where this bridge is at work: nobody else would look there.

A writer mends what is its own. But the last transaction of a process that died with its broker may stay open in a
partition for ever, and every reader stands still there. So each bridge looks now and then where it writes and reads.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref

from txnbridge.errors import AccessDenied, InvalidState, TxnBridgeError
from txnbridge.spi import Deadline, Partition
from txnbridge_kafka.cluster import KafkaCluster
from txnbridge_kafka.outcome.hanging_transactions import Held, open_transactions, write_missing_markers_of_others

_log = logging.getLogger("txnbridge")

# One request to each leader costs nothing at this pace. Coordinators are only asked about what is open in two looks,
# which is hardly anything: most transactions end within milliseconds.
_EVERY_SECONDS = 10.0
_LONGEST_LOOK = 10.0
# Leaders tell of every producer that they remember, which may be very many: then it looks less often, up to that.
_SHARE, _SELDOM_SECONDS = 0.01, 30.0


class HangingTransactionMonitor:
    """Over `cluster.places`, in a thread of its own from the first `start` on until it is closed or dropped."""

    def __init__(self, cluster: KafkaCluster) -> None:
        self._cluster = cluster
        self._ended = threading.Event()
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None
        self._before: dict[int, Held] = {}
        weakref.finalize(self, self._ended.set).atexit = False

    def start(self) -> None:
        with self._guard:
            if self._thread is None:
                arguments = weakref.ref(self), self._ended
                self._thread = threading.Thread(target=_run, args=arguments, name="txnbridge-kafka-watch", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """It looks no more. What it does just now ends with the connections."""
        self._ended.set()

    def look(self) -> bool:
        """Whether it makes sense to look again."""
        try:
            for written in self._mend(Deadline(_LONGEST_LOOK)):
                _log.warning("the broker had forgotten an end of %s: it is written now", written)
        except AccessDenied as error:
            _log.warning(
                "whether a broker has forgotten the end of a transaction that readers wait for cannot be found out, or"
                " not be mended, by this user: %s. See txnbridge doctor",
                error,
            )
            return False  # each try would shut a living producer out
        except InvalidState:
            return False  # closed
        except TxnBridgeError as error:
            _log.debug("whether an end was forgotten is looked for again: %s", error)
        return True

    def _mend(self, deadline: Deadline) -> list[str]:
        now = open_transactions(self._cluster, list(self._cluster.watched_partitions), deadline, readable_only=True)
        before, self._before = self._before, now
        still: list[Partition] = [
            where
            for pid, held in now.items()
            for where, active in held.items()
            if (then := before.get(pid, {}).get(where)) and then.start_offset == active.start_offset
        ]
        return write_missing_markers_of_others(self._cluster, still, deadline) if still else []


def _run(watch_of: weakref.ref[HangingTransactionMonitor], ended: threading.Event) -> None:
    going_on, took = True, 0.0
    while going_on and not ended.wait(max(_EVERY_SECONDS, min(took / _SHARE, _SELDOM_SECONDS))):
        if (watch := watch_of()) is None:
            return
        begun = time.monotonic()
        going_on = watch.look()
        took = time.monotonic() - begun
        del watch  # not kept while this waits
