"""Detects that a group has lost a subscription, and that open transactions hold the group's messages as pending acks.

Brokers can be configured to drop unused subscriptions, and administrators may delete some. A member that subscribes
again creates a new subscription, and would read all messages again or skip some. So the decision log records how many
partitions of a topic a group has begun to read, and REST says whether the subscription exists: the binary protocol has
no request for this (hazard H57).
"""

from __future__ import annotations

import logging
import time
from typing import Any
from urllib.parse import quote

from txnbridge.errors import AccessDenied, BrokerUnavailable, DeadlineExceeded, PositionLost
from txnbridge.spi import Context, Deadline, LedgerValue
from txnbridge_pulsar.client.rest import Rest, RestRefused, path_of

_log = logging.getLogger("txnbridge")

# Seconds to wait for a REST answer, which only serves to detect a lost subscription.
_ASK_SECONDS = 3.0
# After a REST timeout no request is sent for this long: there would be one for each partition.
_SILENT_SECONDS = 30.0


class GroupRegistry:
    """The record of how many partitions one group has begun to read, and checks by REST. Thread-safe."""

    def __init__(self, rest: Rest | None, group: str | None, context: Context) -> None:
        self._rest = rest
        self._group = group or ""
        self._context = context
        self._blind = rest is None or group is None
        self._quiet_until = 0.0

    def partitions(self, topic: str, deadline: Deadline) -> int:
        """Return how many partitions of a topic the group has begun to read; 0 for a new group."""
        if self._blind:
            return 0
        try:
            value = self._value(topic).read(deadline)
        except AccessDenied as error:
            self._go_on_without(error)
            return 0
        return 0 if value is None else int(value["partitions"])

    def record(self, topic: str, count: int, deadline: Deadline) -> None:
        """Record that the group has subscriptions on at least this many partitions of a topic."""
        if self._blind:
            return
        try:
            self._value(topic).update(
                lambda value: None if value and int(value["partitions"]) >= count else {"partitions": count}, deadline
            )
        except AccessDenied as error:
            self._go_on_without(error)

    def check(self, concrete: str, deadline: Deadline) -> None:
        """Raise `PositionLost` if the group has lost its subscription on a partition that it has begun to read."""
        if not self._blind and not self._has_subscription(concrete, deadline):
            raise PositionLost(
                f"group {self._group!r} has read {concrete}, but its subscription is gone: it was deleted, or the"
                " broker drops those that nobody uses (subscriptionExpirationTimeMinutes). Nothing was skipped or read"
                " again:"
                " read with a new group, or say where this one goes on: pulsar-admin topics create-subscription"
                f" --subscription {self._group} --messageId earliest|latest|LEDGER:ENTRY {concrete}"
            )

    def is_held(self, concrete: str, deadline: Deadline) -> bool:
        """Return whether open transactions are known to have acknowledged the group's messages on a partition."""
        if self._rest is None:
            return False
        path = f"/admin/v3/transactions/pendingAckStats/{path_of(concrete)}/{quote(self._group, safe='')}"
        try:
            return bool(self._ask(self._rest, path, deadline)["ongoingTxnSize"])
        except (RestRefused, AccessDenied, BrokerUnavailable) as error:
            _log.debug("what open transactions hold of %r on %s: %s", self._group, concrete, error)
            return False

    def _has_subscription(self, concrete: str, deadline: Deadline) -> bool:
        assert self._rest is not None
        path = f"/admin/v2/persistent/{path_of(concrete)}/subscription/{quote(self._group, safe='')}/properties"
        try:
            self._ask(self._rest, path, deadline)
        except RestRefused as refused:
            # Status 404 also means that the topic is not loaded yet.
            return not (refused.status == 404 and refused.text.startswith("Subscription"))
        except AccessDenied as error:
            self._go_on_without(error)
        except BrokerUnavailable as error:
            _log.debug("whether %r still has a subscription on %s: %s", self._group, concrete, error)
        return True

    def _ask(self, rest: Rest, path: str, deadline: Deadline) -> Any:
        """Send a REST request, with the errors of `Rest.get`. After a timeout, raise `BrokerUnavailable` for
        a while.
        """
        if time.monotonic() < self._quiet_until:
            raise BrokerUnavailable("REST did not answer a moment ago")
        try:
            return rest.get(path, Deadline(min(_ASK_SECONDS, deadline.left())))
        except DeadlineExceeded:
            self._quiet_until = time.monotonic() + _SILENT_SECONDS
            raise

    def _value(self, topic: str) -> LedgerValue:
        return LedgerValue(self._context.ledger(self._context.application, f"group/{self._group}/{topic}"))

    def _go_on_without(self, error: AccessDenied) -> None:
        if not self._blind:
            self._blind = True
            _log.warning("group %r: nobody will notice if its subscriptions are lost: %s", self._group, error)
