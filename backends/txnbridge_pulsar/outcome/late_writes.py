"""Makes brokers refuse messages of a transaction that arrive after its end.

Such a late message may block its topic for all readers, or take a commit back. A broker refuses the message once the
topic's low water mark has passed the transaction. The mark moves when a later transaction on the same topic ends, even
an empty one; but it does not move while an older transaction of the same coordinator is open. The canary topic, which
nobody reads, shows whether late messages are refused (hazards H44, H45).

Late acknowledgements are never refused. Each of them withholds its message from the group until the group's next
transaction on the topic ends. So late acknowledgements are aborted, if the bridge's user has the right to do so.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from txnbridge.errors import TxnBridgeError
from txnbridge.spi import Deadline
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.cluster import ClusterAccess
from txnbridge_pulsar.errors import translated
from txnbridge_pulsar.outcome.end_delivery import EndDelivery
from txnbridge_pulsar.outcome.in_doubt import InDoubt
from txnbridge_pulsar.outcome.outcome import terminated
from txnbridge_pulsar.write.fence_records import AnnouncedTransaction

_log = logging.getLogger("txnbridge")

# Timeout of the empty transaction, which lives for milliseconds. After its process's death it holds no reader back.
_EMPTY_TRANSACTION_TTL_MS = 10_000
# Pauses between tries, growing: older transactions may stay open until they time out.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 30.0
_ATTEMPT_SECONDS = 10.0


def refuse_late_writes(cluster: ClusterAccess, ended: AnnouncedTransaction, deadline: Deadline) -> bool:
    """Commit an empty transaction on the topics of `ended`, so that brokers refuse late messages of `ended`.

    The empty transaction's end moves the topics' low water marks. Return whether the canary topic now refuses such a
    message. Terminated topics are left out: they accept no late messages, and the empty transaction would never end.
    """
    canary = cluster.topics.internal(cluster.settings.late_write_canary, deadline)
    transactions = cluster.client.transactions
    closed = terminated(cluster, ended.topics, deadline)
    topics = [topic for topic in ended.topics if topic not in closed]
    with translated(f"having brokers refuse late messages of {ended.txn}"):
        empty = transactions.begin(_EMPTY_TRANSACTION_TTL_MS, deadline.left(), ended.txn.most)
        transactions.register(empty, deadline.left(), [*topics, canary], ended.subscriptions)
        transactions.end(empty, True, deadline.left())
        for topic, subscription in ended.subscriptions:
            try:  # so that the subscription redelivers the messages of late acknowledgements
                transactions.end_on_subscription(ended.txn, topic, subscription, False, deadline.left())
            except wire.ServerError as error:  # with authorization on, only a superuser has the right
                _log.debug("late acknowledgements of %s on %s may stay pending: %s", ended.txn, topic, error)
    return _is_refused(cluster, ended.txn, canary, deadline)


def _is_refused(cluster: ClusterAccess, txn: wire.TxnId, canary: str, deadline: Deadline) -> bool:
    """Send a late message of a transaction to the canary topic, where it harms nobody; return whether it is refused."""
    what = f"checking whether late messages of {txn} are refused"
    with translated(what):
        opened = cluster.client.create_producer(canary, timeout=deadline.left())
        with wire.closing(opened, deadline.left) as producer:
            try:
                producer.send(wire.Single(b"late"), txn, timeout=deadline.left()).result(deadline.left())
            except wire.NotAllowed:
                return True
    return False


class LateWriteGuard:
    """Makes brokers refuse messages that arrive after the end of their transaction, at once or in the background."""

    def __init__(self, cluster: ClusterAccess, end_delivery: EndDelivery, in_doubt: InDoubt) -> None:
        self._cluster = cluster
        self._end_delivery = end_delivery
        self._in_doubt = in_doubt
        self._lock = threading.Lock()
        self._at_risk: list[AnnouncedTransaction] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def at_risk(self) -> Sequence[AnnouncedTransaction]:
        with self._lock:
            return tuple(self._at_risk)

    def add(self, ended: AnnouncedTransaction, deadline: Deadline) -> None:
        """Make brokers refuse an ended transaction's late messages; if that fails, a background thread tries again."""
        if self._try(ended, deadline):
            return
        with self._lock:
            self._at_risk.append(ended)
            if self._thread is None:
                (thread := threading.Thread(target=self._run, name="txnbridge-pulsar-refuse", daemon=True)).start()
                self._thread = thread

    def _try(self, ended: AnnouncedTransaction, deadline: Deadline) -> bool:
        if self._in_doubt.touching((*ended.topics, *(topic for topic, _ in ended.subscriptions))):
            return False  # the empty transaction's end could take back the commit of one in doubt
        try:
            self._end_delivery.settle(set(ended.topics), deadline)
            return refuse_late_writes(self._cluster, ended, deadline)
        except (TxnBridgeError, RuntimeError) as error:  # the last if this machine starts no more threads now
            _log.debug("late messages of %s are not refused yet: %s", ended.transaction, error)
            return False

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        while not self._stop.wait(pause):
            pause = min(2 * pause, _LONGEST_PAUSE)
            for ended in self.at_risk:
                if not self._stop.is_set() and self._try(ended, Deadline(_ATTEMPT_SECONDS)):
                    with self._lock:
                        self._at_risk.remove(ended)
            with self._lock:
                if not self._at_risk:
                    self._thread = None
                    return

    def close(self, deadline: Deadline) -> None:
        """Stop the background thread. The next owner finds the remaining transactions on the fence topic."""
        self._stop.set()
        if (thread := self._thread) is not None:
            thread.join(min(deadline.left(), _ATTEMPT_SECONDS))
