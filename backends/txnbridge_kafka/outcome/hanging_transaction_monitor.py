"""A monitor that ends hanging transactions of dead processes in the partitions that this bridge uses (hazard H10).

A writer writes the missing markers of its own id. But the last transaction of a process that died with its broker may
stay open in a partition for ever, and block its readers. So each bridge checks its partitions every ten seconds.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref

from txnbridge.errors import AccessDenied, InvalidState, TxnBridgeError
from txnbridge.spi import Deadline, Partition
from txnbridge_kafka.cluster import KafkaCluster
from txnbridge_kafka.outcome.hanging_transactions import (
    OpenPartitions,
    open_transactions,
    write_missing_markers_of_others,
)

_log = logging.getLogger("txnbridge")

# One request to each leader is cheap at this interval. Coordinators are only asked about transactions that are open in
# two checks, which are very few: most transactions end within milliseconds.
_EVERY_SECONDS = 10.0
_LONGEST_CHECK = 10.0
# Leaders list every producer that they remember, which may be very many. Then the interval grows, so that checks take
# one per cent of the time, but to no more than half a minute.
_SHARE, _SELDOM_SECONDS = 0.01, 30.0


class HangingTransactionMonitor:
    """Checks `cluster.watched_partitions` on a background thread, from `start` until `close` or garbage collection."""

    def __init__(self, cluster: KafkaCluster) -> None:
        self._cluster = cluster
        self._ended = threading.Event()
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None
        self._before: dict[int, OpenPartitions] = {}
        weakref.finalize(self, self._ended.set).atexit = False

    def start(self) -> None:
        with self._guard:
            if self._thread is None:
                arguments = weakref.ref(self), self._ended
                self._thread = threading.Thread(target=_run, args=arguments, name="txnbridge-kafka-watch", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop the checks without waiting. A check that is under way ends when the connections are closed."""
        self._ended.set()

    def check(self) -> bool:
        """Write the markers of transactions that hang in two checks. Return whether later checks may succeed."""
        try:
            for written in self._write_missing_markers(Deadline(_LONGEST_CHECK)):
                _log.warning("the broker had forgotten an end of %s: it is written now", written)
        except AccessDenied as error:
            _log.warning(
                "whether a broker has forgotten the end of a transaction that readers wait for cannot be found out, or"
                " not be mended, by this user: %s. See txnbridge doctor",
                error,
            )
            return False  # each attempt would fence a running producer
        except InvalidState:
            return False  # the connection to the cluster is closed
        except TxnBridgeError as error:
            _log.debug("whether an end was forgotten is looked for again: %s", error)
        return True

    def _write_missing_markers(self, deadline: Deadline) -> list[str]:
        now = open_transactions(self._cluster, list(self._cluster.watched_partitions), deadline, readable_only=True)
        before, self._before = self._before, now
        still: list[Partition] = [
            partition
            for pid, open_in in now.items()
            for partition, active in open_in.items()
            if (then := before.get(pid, {}).get(partition)) and then.start_offset == active.start_offset
        ]
        return write_missing_markers_of_others(self._cluster, still, deadline) if still else []


def _run(monitor_of: weakref.ref[HangingTransactionMonitor], ended: threading.Event) -> None:
    going_on, took = True, 0.0
    while going_on and not ended.wait(max(_EVERY_SECONDS, min(took / _SHARE, _SELDOM_SECONDS))):
        if (monitor := monitor_of()) is None:
            return
        begun = time.monotonic()
        going_on = monitor.check()
        took = time.monotonic() - begun
        del monitor  # without this reference an unused monitor can be garbage-collected during the wait
