"""Detects that a group has lost its subscription on a partition, or that open transactions have acknowledged for it.

Brokers can be configured to drop unused subscriptions, and administrators may delete some. A member that subscribes
again creates a new subscription, and would read all messages again, or skip some. So the decision log records, for each
topic, how many partitions the group has begun to read, and REST says whether the subscription on a partition exists.
The binary protocol has no request for this (hazard H57).
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any
from urllib.parse import quote

from txnbridge.errors import AccessDenied, BrokerUnavailable, DeadlineExceeded, PositionLost
from txnbridge.spi import Context, Deadline, LedgerValue, Subscription
from txnbridge_pulsar.admin.rest import Rest, RestRefused, path_of
from txnbridge_pulsar.settings import Timing

_log = logging.getLogger("txnbridge")


class GroupRegistry:
    """Knows from the decision log which partitions a group has begun to read, and finds lost subscriptions by REST."""

    def __init__(self, rest: Rest, subscription: Subscription, context: Context, timing: Timing) -> None:
        self._rest = rest
        self._group = subscription.group or ""
        self._context = context
        self._timing = timing
        self._is_disabled = subscription.group is None or not (rest or subscription.start != "earliest")
        self._no_rest_until = 0.0
        self._asks = threading.Lock()  # so that one thread alone waits for an answer that does not come

    def partitions(self, topic: str, deadline: Deadline) -> int:
        """Return how many of a topic's partitions the group is recorded to have begun to read; 0 for a new group."""
        if self._is_disabled:
            return 0
        try:
            value = self._value(topic).read(deadline)
        except AccessDenied as error:
            self._disable_check(error)
            return 0
        return 0 if value is None else int(value["partitions"])

    def record(self, topic: str, count: int, deadline: Deadline) -> None:
        """Record that the group has begun to read a topic's first `count` partitions, unless more are recorded."""
        if self._is_disabled:
            return
        try:
            self._value(topic).update(
                lambda value: None if value and int(value["partitions"]) >= count else {"partitions": count}, deadline
            )
        except AccessDenied as error:
            self._disable_check(error)

    def check(self, concrete: str, deadline: Deadline) -> None:
        """Raise `PositionLost` if the group has no subscription on a partition that the group has begun to read."""
        if self._rest and not self._is_disabled and not self._has_subscription(concrete, deadline):
            raise PositionLost(
                f"group {self._group!r} has read {concrete}, but its subscription is gone: it was deleted, or not used"
                " for too long (subscriptionExpirationTimeMinutes). Nothing was skipped or read again: read with a new"
                " group, or set where this one continues: pulsar-admin topics create-subscription"
                f" --subscription {self._group} --messageId earliest|latest|LEDGER:ENTRY {concrete}"
            )

    def has_pending_acks(self, concrete: str, deadline: Deadline) -> bool:
        """Return whether an open transaction is known to have acknowledged messages of the group on a partition."""
        if not self._rest:
            return False
        path = f"/admin/v3/transactions/pendingAckStats/{path_of(concrete)}/{quote(self._group, safe='')}"
        try:
            return bool(self._ask(path, deadline)["ongoingTxnSize"])
        except (RestRefused, AccessDenied, BrokerUnavailable) as error:
            _log.debug("the pending acks of group %r on %s are not known: %s", self._group, concrete, error)
            return False

    def _has_subscription(self, concrete: str, deadline: Deadline) -> bool:
        path = f"/admin/v2/persistent/{path_of(concrete)}/subscription/{quote(self._group, safe='')}/properties"
        try:
            self._ask(path, deadline)
        except RestRefused as refused:
            # Status 404 also means that the topic is not loaded yet.
            return not (refused.status == 404 and refused.text.startswith("Subscription"))
        except AccessDenied as error:
            self._disable_check(error)
        except BrokerUnavailable as error:
            _log.debug("whether group %r has a subscription on %s is not known: %s", self._group, concrete, error)
        return True

    def _ask(self, path: str, deadline: Deadline) -> Any:
        """Return the JSON answer to a GET request. For a while after a timeout, raise `BrokerUnavailable` instead."""
        with deadline.holding(self._asks, "another thread asked REST"):
            if time.monotonic() < self._no_rest_until:
                raise BrokerUnavailable("REST did not answer a moment ago")
            asked = Deadline(min(self._timing.rest_seconds, deadline.left()))
            try:
                return self._rest.get(path, asked)
            except DeadlineExceeded:
                self._no_rest_until = time.monotonic() + asked.seconds * self._timing.no_rest_factor
                raise

    def _value(self, topic: str) -> LedgerValue:
        return LedgerValue(self._context.ledger(self._context.application, f"group/{self._group}/{topic}"))

    def _disable_check(self, error: AccessDenied) -> None:
        if not self._is_disabled:
            self._is_disabled = True
            _log.warning("group %r: it will not be noticed if its subscriptions are lost: %s", self._group, error)
