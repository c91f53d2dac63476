"""Answers what brokers ask about halves whose owner has not ended them: from the decision log, for the application."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from txnbridge.errors import EvidenceLost, TxnBridgeError
from txnbridge.spi import Deadline, Decision, Ledger, LedgerClaim
from txnbridge_rocketmq.client import reading
from txnbridge_rocketmq.client.codes import DISCARDED_TOPIC, Property
from txnbridge_rocketmq.client.reading import PullResult
from txnbridge_rocketmq.client.records import StoredMessage
from txnbridge_rocketmq.client.retry import retry_call
from txnbridge_rocketmq.client.sending import CheckBack
from txnbridge_rocketmq.outcome.end_transaction import HalfEnder, LockHolder
from txnbridge_rocketmq.outcome.outcome import PREPARE
from txnbridge_rocketmq.write.half_batch import TopicPart, parts_as_json, parts_from_json
from txnbridge_rocketmq.write.transaction_properties import HalfOrigin, is_over, origin_of, slot_of

_log = logging.getLogger("txnbridge")

# The bridge answers for one transaction at a time; a broker repeats each question that it gets no answer to. An answer
# may have to publish thousands of messages, one after another.
_ANSWER_SECONDS = 30.0
# So many transactions are remembered that are settled, or whose evidence is lost: brokers ask about each half of them.
_REMEMBERED = 10_000
# The bridge looks again after this at discarded halves that it could not end: mostly a log that was away is back by
# then, or another process has ended them.
_AGAIN_SECONDS = 60.0
# They are never looked for more often than this, however soon a broker discards.
_LEAST_PAUSE = 1.0


class CheckBackHandler:
    """The bridge's answers. Silence means "undecided": the broker asks again.

    Nobody answers that a half is aborted because nothing is known of it: that is first written down, and not before the
    half's own deadline, or before somebody else has become the owner of its transactional id.
    """

    def __init__(self, ender: HalfEnder) -> None:
        self._ender = ender
        self._cluster = ender.cluster
        self._group = ender.cluster.settings.producer_group
        self._lock = threading.Lock()
        self._settled: OrderedDict[str, None] = OrderedDict()
        self._lost: OrderedDict[str, None] = OrderedDict()  # of which it was said that nobody can tell
        self._deadlines: set[Deadline] = set()
        self._closed = threading.Event()

    def start(self, deadline: Deadline) -> None:
        """Be asked from now on about halves of this application, and look after those that are not asked about."""
        self._cluster.producer_groups.join([self._group], self.answer, deadline)
        threading.Thread(target=self._look_after_discarded, name="txnbridge-rocketmq-discarded", daemon=True).start()

    def close(self) -> None:
        """Answer nothing more; an answer that is under way is given up at once."""
        with self._lock:
            self._closed.set()
            for deadline in self._deadlines:
                deadline.shorten(0.0)

    @contextmanager
    def _in_time(self) -> Iterator[Deadline]:
        deadline = Deadline(_ANSWER_SECONDS)
        with self._lock:
            self._deadlines.add(deadline)
            if self._closed.is_set():
                deadline.shorten(0.0)
        try:
            yield deadline
        finally:
            with self._lock:
                self._deadlines.discard(deadline)

    # --- halves that are asked about ----------------------------------------------------------------------------------

    def answer(self, checks: Sequence[CheckBack]) -> None:
        """What brokers have asked meanwhile. Never raises an error of ours.

        They ask about each half of a transaction, and again about each copy that they made when they asked: thousands
        of questions, for which one look at the log is enough.
        """
        asked: dict[str, list[CheckBack]] = {}
        for check in checks:
            if (slot := slot_of(check.record)) is not None:
                asked.setdefault(slot.transaction, []).append(check)
            else:
                _log.debug("a half of this application that no bridge has sent")
        for transaction, own in asked.items():
            if self._settles(transaction, [check.record for check in own]):
                # These may be copies of halves whose messages were published before; published messages stay.
                copies = [(check.broker or self._cluster.topics.home, check.half) for check in own]
                with self._in_time() as deadline:
                    self._ender.drop(copies, deadline)

    def _settles(self, transaction: str, halves: Sequence[StoredMessage]) -> bool:
        """Carry out the decision about a transaction; whether nothing is left to be published from these halves."""
        try:
            with self._in_time() as deadline:
                return transaction in self._settled or self._settle(transaction, halves, deadline)
        except EvidenceLost as error:
            if transaction not in self._lost:
                _log.warning("nobody can tell what became of transaction %s: %s", transaction, error)
                self._remember(self._lost, transaction)
        except TxnBridgeError as error:
            _log.debug("the broker asks again about transaction %s: %s", transaction, error)
        return False

    def _settle(self, transaction: str, halves: Sequence[StoredMessage], deadline: Deadline) -> bool:
        claim = self._decided(transaction, halves[0], deadline)
        if claim is None:
            return False
        parts = parts_from_json(claim.data)
        if claim.decision is Decision.ABORT:
            self._remember(self._settled, transaction)
            return True
        if not any(_has(parts, half) for half in halves):
            return True
        with self._ender.exclusively(transaction, deadline) as turn:
            if turn is not LockHolder.CALLER:
                return False
            with self._cluster.context.events.step("step:publish", transaction, asked=True):
                self._ender.publish(transaction, parts, deadline)
        self._remember(self._settled, transaction)
        return True

    def _decided(self, transaction: str, half: StoredMessage, deadline: Deadline) -> LedgerClaim | None:
        origin = origin_of(half)
        if origin is None:
            return None
        application = str(origin.log.get("log") or self._cluster.settings.application)
        ledger = self._cluster.context.ledger(application, transaction.rsplit("/", 2)[0])
        claim = ledger.decided(transaction, deadline, log=origin.log)
        if claim is not None or not self._is_own(half):
            return claim
        if is_over(origin.deadline) or _is_left(ledger, transaction, origin, deadline):
            with self._cluster.context.events.step("step:decide", transaction, decision="abort", asked=True):
                claim = ledger.claim(transaction, Decision.ABORT, parts_as_json([]), deadline, log=origin.log)
        return claim

    def _is_own(self, half: StoredMessage) -> bool:
        """Return whether this is asked about it; about half messages of applications these are asked themselves."""
        return half.properties.get(Property.GROUP) == self._group

    def _remember(self, known: OrderedDict[str, None], transaction: str) -> None:
        with self._lock:
            known[transaction] = None
            if len(known) > _REMEMBERED:
                known.popitem(last=False)

    # --- and those that are not, any more -----------------------------------------------------------------------------

    def _look_after_discarded(self) -> None:
        while not self._closed.wait(self._look_at_discarded()):
            pass

    def _look_at_discarded(self) -> float:
        """A broker that has asked often enough puts a half aside, also if no bridge was there to answer.

        The decision about its transaction still holds. The bridge ends the half's copies in the half topic: the record
        here stands in another queue, and a broker that is told to end that would end the half of the same offset. Half
        messages of applications about which nothing was decided wait to be resumed, or ended, by hand.

        Returns for how many seconds that is enough.
        """
        pause = _AGAIN_SECONDS
        try:
            with self._in_time() as deadline:
                brokers = self._cluster.brokers.names(deadline)
                patience = min(self._cluster.brokers.config(broker, deadline).discarded_after for broker in brokers)
            left = [
                transaction
                for broker in brokers
                for transaction, half in self._discarded(broker)
                if not self._settles(transaction, [half]) and transaction not in self._lost and self._is_own(half)
            ]
            if not left:
                pause = patience / 3
        except Exception as error:  # whatever it is, the next look may succeed
            _log.debug("discarded halves are looked at again later: %s", error)
        return max(_LEAST_PAUSE, pause)

    def _discarded(self, broker: str) -> Iterator[tuple[str, StoredMessage]]:
        """One half of each transaction that has some, of this application and of its half messages."""
        groups = {self._group, *self._cluster.producer_groups.groups}
        seen: set[str] = set()
        at: int | None = 0
        while at is not None:
            pulled = self._pull(broker, at)
            for record in pulled.records:
                slot = slot_of(record)
                if slot and slot.transaction not in seen and record.properties.get(Property.GROUP) in groups:
                    seen.add(slot.transaction)
                    yield slot.transaction, record
            at = pulled.next_offset if at < pulled.next_offset <= pulled.max_offset else None

    def _pull(self, broker: str, at: int) -> PullResult:
        request = reading.pull(DISCARDED_TOPIC, 0, at, self._group)
        what = f"reading discarded halves of broker {broker}"
        with self._in_time() as deadline:
            return retry_call(self._cluster.client, broker, request, what, deadline)


def _has(parts: Sequence[TopicPart], half: StoredMessage) -> bool:
    """Return whether a half of a transaction is one of those that were decided on."""
    slot, topic = slot_of(half), half.properties.get(Property.REAL_TOPIC, half.topic)
    return any(slot is not None and part.topic == topic and slot.number < part.count for part in parts)


def _is_left(ledger: Ledger, transaction: str, origin: HalfOrigin, deadline: Deadline) -> bool:
    """Return whether nobody can commit it any more: a newer owner has opened its id, and it was not prepared."""
    if origin.opening is None:
        return False
    newest = ledger.newest_opening(deadline)
    if newest is None or newest[0] == origin.opening:
        return False
    return all(entry.kind != PREPARE for entry in ledger.find(transaction, deadline, log=origin.log))
