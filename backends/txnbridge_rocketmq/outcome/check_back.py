"""Answers the broker's check-backs from the decision log, for halves that their owner has not ended."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from txnbridge.errors import EvidenceLost, TxnBridgeError
from txnbridge.spi import Deadline, Decision, Ledger, LedgerClaim
from txnbridge_rocketmq.client.protocol import read_requests
from txnbridge_rocketmq.client.protocol.codes import DISCARDED_TOPIC, Property
from txnbridge_rocketmq.client.protocol.read_requests import PullResult
from txnbridge_rocketmq.client.protocol.records import MessageExt
from txnbridge_rocketmq.client.protocol.send_requests import CheckBack
from txnbridge_rocketmq.client.retry import retry_call
from txnbridge_rocketmq.outcome.end_transaction import HalfEnder, LockHolder, remember
from txnbridge_rocketmq.outcome.outcome import PREPARE, was_published
from txnbridge_rocketmq.outcome.producer_groups import described
from txnbridge_rocketmq.settings.names import encoded
from txnbridge_rocketmq.write.half_buffer import HalfCount, halves_as_json, halves_from_json
from txnbridge_rocketmq.write.transaction_properties import HalfOrigin, is_over, origin_of, place_of

_log = logging.getLogger("txnbridge")

# Brokers may keep halves for longer than a thread can wait, and other clients may enter a producer group at any time.
_LONGEST_PAUSE_SECONDS = 3600.0


class CheckBackHandler:
    """Answers brokers' check-backs: ends half messages of decided transactions, and leaves undecided ones alone.

    A half is never aborted only because its transaction is undecided. First an ABORT claim is written to the decision
    log. That is done after the half's deadline, or after another process opened the transactional id (hazard H67).
    """

    def __init__(self, ender: HalfEnder) -> None:
        self._ender = ender
        self._cluster = ender.cluster
        self._timing = ender.cluster.settings.timing
        self._group = ender.cluster.settings.producer_group
        self._lock = threading.Lock()
        self._lost: OrderedDict[str, float] = OrderedDict()  # transactions that were reported as lost
        self._warned: set[str] = set()  # producer groups with other clients in them
        self._deadlines: set[Deadline] = set()
        self._closed = threading.Event()

    def start(self, deadline: Deadline) -> None:
        """Join the application's producer group, and start the thread that ends discarded halves.

        Raise `InvalidOption` if other clients are in the group to which the application's halves belong.
        """
        self._cluster.producer_groups.join([self._group], self.answer, deadline)
        threading.Thread(target=self._end_discarded_halves, name="txnbridge-rocketmq-discarded", daemon=True).start()

    def close(self) -> None:
        """Let the deadlines of running answers pass at once, and answer no further check-backs."""
        with self._lock:
            self._closed.set()
            for deadline in self._deadlines:
                deadline.shorten(0.0)

    @contextmanager
    def _in_time(self) -> Iterator[Deadline]:
        deadline = Deadline(self._timing.settle_timeout)
        with self._lock:
            self._deadlines.add(deadline)
            if self._closed.is_set():
                deadline.shorten(0.0)
        try:
            yield deadline
        finally:
            with self._lock:
                self._deadlines.discard(deadline)

    def answer(self, checks: Sequence[CheckBack]) -> None:
        """End the halves of these check-backs if their transactions are decided. Log errors."""
        asked: dict[str, list[CheckBack]] = {}
        for check in checks:
            if (place := place_of(check.record)) is not None:
                asked.setdefault(place.transaction, []).append(check)
            else:
                _log.debug("ignored a half that no bridge has sent, in this application's producer group")
        for transaction, own in asked.items():
            named = [(check.broker or self._cluster.topics.home, check) for check in own]
            if self._settle_quietly(transaction, [(broker, check.record) for broker, check in named]):
                # Abort these halves, so that the broker stops asking: the transaction is aborted, or its messages are
                # published. Published messages stay.
                with self._in_time() as deadline:
                    self._ender.drop([(broker, check.half) for broker, check in named], deadline)

    def _settle_quietly(self, transaction: str, halves: Sequence[tuple[str, MessageExt]]) -> bool:
        """Publish a transaction if it is committed, and log errors. Return whether the given halves may be aborted.

        Each half comes with the name of its broker. The halves may be aborted if the transaction is aborted, or if
        every message that it publishes is published already.
        """
        try:
            with self._in_time() as deadline:
                return self._ender.has_settled(transaction) or self._settle(transaction, halves, deadline)
        except EvidenceLost as error:
            if transaction not in self._lost:
                _log.warning("the outcome of transaction %s is lost: %s", transaction, error)
                with self._lock:
                    remember(self._lost, transaction)
        except TxnBridgeError as error:
            _log.debug("transaction %s waits for the broker's next check-back: %s", transaction, error)
        return False

    def _settle(self, transaction: str, halves: Sequence[tuple[str, MessageExt]], deadline: Deadline) -> bool:
        claim = self._decided(transaction, *halves[0], deadline)
        if claim is None:
            return self._ender.has_settled(transaction)
        topics = halves_from_json(claim.data)
        if claim.decision is Decision.ABORT:
            self._ender.remember_settled(transaction)
            return True
        if not any(_is_decided_half(topics, half) for _, half in halves):
            return True
        self._ender.require_brokers(topics, deadline)
        with self._ender.exclusively(transaction, deadline) as holder:
            if holder is not LockHolder.CALLER:
                return False
            with self._cluster.context.events.step("step:publish", transaction, asked=True):
                self._ender.publish(transaction, topics, deadline)
        self._ender.remember_settled(transaction)
        return True

    def _decided(self, transaction: str, broker: str, half: MessageExt, deadline: Deadline) -> LedgerClaim | None:
        """Return the decision about a transaction; None if it is undecided, or needs no decision any more."""
        origin = origin_of(half)
        if origin is None:
            return None
        ledger = self._cluster.ledger(transaction, origin.log)
        # Read the clock first: what is published without a decision is published before the deadline (hazard H102).
        was_over = is_over(origin.deadline, self._timing.clocks_differ)
        claim = ledger.decided(transaction, deadline, log=origin.log)
        if claim is not None or not self._is_own(half):
            return claim
        decides = was_over or _is_abandoned(ledger, transaction, origin, deadline)
        if self._is_published(transaction, broker, half, deadline, twice=decides):
            # If its owner has decided it since, it may have other messages, which are not published yet (hazard H102).
            if (claim := ledger.decided(transaction, deadline, log=origin.log)) is None:
                self._ender.remember_settled(transaction)
        elif decides:
            with self._cluster.context.events.step("step:decide", transaction, decision="abort", asked=True):
                claim = ledger.claim(transaction, Decision.ABORT, halves_as_json([]), deadline, log=origin.log)
        return claim

    def _is_published(
        self, transaction: str, broker: str, half: MessageExt, deadline: Deadline, *, twice: bool
    ) -> bool:
        """Return whether a half is the first of its transaction, and its message is published.

        The broker asks only after the time in which the owner can publish the message without a decision. Set `twice`
        if the transaction is aborted after False: then look twice, and raise the errors of `was_published`.
        """
        place, topic = place_of(half), half.properties.get(Property.REAL_TOPIC, half.topic)
        if place is None or place.number > 0:
            return False
        topics = [HalfCount(topic, broker, 1)]
        if twice:
            return was_published(self._ender, transaction, topics, deadline)
        return not self._ender.missing(transaction, topics, deadline)

    def _is_own(self, half: MessageExt) -> bool:
        """Return whether a half is in the producer group of the application, and not in one for half messages."""
        return half.properties.get(Property.GROUP) == self._group

    def _end_discarded_halves(self) -> None:
        while not self._closed.wait(self._end_discarded_once()):
            pass

    def _end_discarded_once(self) -> float:
        """End the halves that brokers have discarded. Return the seconds until the next call.

        After the last check-back a broker moves a half to its discarded topic, also if no bridge was running to answer.
        The decision about the half's transaction still counts (hazard H70). This method ends the copies in the half
        topic, and never names the discarded record: the broker would end another half, which has the same offset in the
        half topic. Undecided half messages of applications wait until an administrator resumes or ends them.
        """
        pauses: list[float] = []
        try:
            with self._in_time() as deadline:
                self._review_groups(deadline)
                brokers = self._cluster.brokers.names(deadline)
            pauses = [self._end_discarded_of(broker) for broker in brokers]
        except Exception as error:  # after any error the next call may succeed
            _log.debug("discarded halves are tried again later: %s", error)
        return max(self._timing.discarded_pause, min(pauses, default=self._timing.discarded_retry))

    def _end_discarded_of(self, broker: str) -> float:
        """End the halves that one broker has discarded. Return the seconds until the next call."""
        try:
            with self._in_time() as deadline:
                patience = self._cluster.brokers.config(broker, deadline).discarded_after
            left = [
                transaction
                for transaction, half in self._discarded(broker)
                if not self._settle_quietly(transaction, [(broker, half)])
                and transaction not in self._lost
                and self._is_own(half)
            ]
            if not left:
                return min(patience / 3, _LONGEST_PAUSE_SECONDS)
        except Exception as error:  # the other brokers' halves do not wait for this broker
            _log.debug("discarded halves of broker %s are tried again later: %s", broker, error)
        return self._timing.discarded_retry

    def _review_groups(self, deadline: Deadline) -> None:
        """Log a warning, once for each producer group of this bridge, if other clients are members of the group."""
        groups = self._cluster.producer_groups
        for group, strangers in groups.strangers(groups.groups, deadline).items():
            if group not in self._warned:
                _log.warning("%s", described(group, strangers))
                self._warned.add(group)

    def _discarded(self, broker: str) -> Iterator[tuple[str, MessageExt]]:
        """Yield one discarded half of each transaction, if the half is in a producer group of this bridge."""
        groups = {self._group, *self._cluster.producer_groups.groups}
        seen: set[str] = set()
        at: int | None = 0
        while at is not None:
            pulled = self._pull(broker, at)
            for record in pulled.records:
                place = place_of(record)
                if place and place.transaction not in seen and record.properties.get(Property.GROUP) in groups:
                    seen.add(place.transaction)
                    yield place.transaction, record
            at = pulled.next_offset if at < pulled.next_offset <= pulled.max_offset else None

    def _pull(self, broker: str, at: int) -> PullResult:
        request = read_requests.pull(DISCARDED_TOPIC, 0, at, encoded(self._cluster.settings.application))
        action = f"reading discarded halves of broker {broker}"
        with self._in_time() as deadline:
            return retry_call(self._cluster.client, broker, request, action, deadline)


def _is_decided_half(topics: Sequence[HalfCount], half: MessageExt) -> bool:
    """Return whether a half is one of those that the COMMIT claim counted: `topics` has their number by topic."""
    place, topic = place_of(half), half.properties.get(Property.REAL_TOPIC, half.topic)
    return any(place is not None and each.topic == topic and place.number < each.count for each in topics)


def _is_abandoned(ledger: Ledger, transaction: str, origin: HalfOrigin, deadline: Deadline) -> bool:
    """Return whether a transaction cannot commit: it is unprepared, and its id has a newer owner (hazard H72)."""
    if origin.opening is None:
        return False
    newest = ledger.newest_opening(deadline)
    if newest is None or newest[0] == origin.opening:
        return False
    return all(entry.kind != PREPARE for entry in ledger.find(transaction, deadline, log=origin.log))
