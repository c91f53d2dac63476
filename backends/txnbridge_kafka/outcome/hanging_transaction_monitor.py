"""A monitor that ends hanging transactions of dead processes in the partitions that this bridge uses (hazard H10).

A writer writes the missing markers of its own id only. If a process and its broker die at the same moment, the last
transaction of the process may block readers for ever. So each bridge checks its partitions every ten seconds.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref

from txnbridge.errors import AccessDenied, InvalidState, NotSupported, TxnBridgeError
from txnbridge.spi import Deadline, Partition
from txnbridge_kafka.cluster import KafkaCluster
from txnbridge_kafka.outcome.hanging_transactions import (
    OpenPartitions,
    open_transactions,
    write_missing_markers_of_others,
)
from txnbridge_kafka.settings.timing import Timing

_log = logging.getLogger("txnbridge")

_LONGEST_CHECK = 10.0
_SHARE = 0.01  # the largest share of the time that checks take


class HangingTransactionMonitor:
    """Looks for hanging transactions in `cluster.watched_partitions`, and ends them, on a background thread."""

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
                arguments = weakref.ref(self), self._ended, self._cluster.settings.timing
                self._thread = threading.Thread(target=_run, args=arguments, name="txnbridge-kafka-watch", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop the checks without waiting. A check that is under way ends when the bridge closes its connections."""
        self._ended.set()

    def check(self) -> bool:
        """Write the missing markers of transactions that this check and the last one found hanging.

        Return False if further checks are useless: the bridge is closed, its user lacks a right, or the broker the
        request.
        """
        try:
            for written in self._write_missing_markers(Deadline(_LONGEST_CHECK)):
                _log.warning("wrote the missing control marker of the hanging transaction %s", written)
        except (AccessDenied, NotSupported) as error:
            _log.warning(
                "readers may wait for a hanging transaction, which cannot be looked for or ended from here: %s. See"
                " txnbridge doctor",
                error,
            )
            return False  # each attempt would fence a running producer
        except InvalidState:
            return False  # the connection to the cluster is closed
        except TxnBridgeError as error:
            _log.debug("the next check repeats a failed search for hanging transactions: %s", error)
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


def _run(monitor_of: weakref.ref[HangingTransactionMonitor], ended: threading.Event, timing: Timing) -> None:
    repeat, took = True, 0.0
    while repeat and not ended.wait(max(timing.monitor_interval, min(took / _SHARE, timing.monitor_longest_interval))):
        if (monitor := monitor_of()) is None:
            return
        begun = time.monotonic()
        repeat = monitor.check()
        took = time.monotonic() - begun
        del monitor  # without this reference an unused monitor can be garbage-collected during the wait
