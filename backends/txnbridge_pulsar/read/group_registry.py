"""What REST tells of a group's subscriptions: whether those that it has begun to read are still there, and whether open
transactions hold some of their messages.

Brokers drop subscriptions that nobody uses, where they are told to, and administrators delete them. A member that
subscribes makes a missing one anew, and so would read everything again, or skip messages that are there. The decision
log says how many partitions of a topic a group has begun to read, and REST whether there is a subscription: the binary
protocol cannot ask.
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

# Reading does not depend on REST: no member waits longer for an answer that only tells of a lost subscription.
_ASK_SECONDS = 3.0
# Partitions are asked for one by one, and there may be many.
_SILENT_SECONDS = 30.0


class GroupRegistry:
    """What is known of one group. Any thread may call."""

    def __init__(self, rest: Rest | None, group: str | None, context: Context) -> None:
        self._rest = rest
        self._group = group or ""
        self._context = context
        self._blind = rest is None or group is None
        self._silent_until = 0.0

    def partitions(self, topic: str, deadline: Deadline) -> int:
        """How many partitions of a topic the group has begun to read; 0 for a new one."""
        if self._blind:
            return 0
        try:
            value = self._value(topic).read(deadline)
        except AccessDenied as error:
            self._go_on_without(error)
            return 0
        return 0 if value is None else int(value["partitions"])

    def record(self, topic: str, count: int, deadline: Deadline) -> None:
        """From now on the group has subscriptions for so many partitions, or more."""
        if self._blind:
            return
        try:
            self._value(topic).update(
                lambda value: None if value and int(value["partitions"]) >= count else {"partitions": count}, deadline
            )
        except AccessDenied as error:
            self._go_on_without(error)

    def check(self, concrete: str, deadline: Deadline) -> None:
        """Raises `PositionLost` for a partition whose subscription was there, and is not any more."""
        if not self._blind and not self._is_there(concrete, deadline):
            raise PositionLost(
                f"group {self._group!r} has read {concrete}, but its subscription is gone: it was deleted, or the"
                " broker drops those that nobody uses (subscriptionExpirationTimeMinutes). Nothing was skipped or read"
                " again:"
                " read with a new group, or say where this one goes on: pulsar-admin topics create-subscription"
                f" --subscription {self._group} --messageId earliest|latest|LEDGER:ENTRY {concrete}"
            )

    def is_held(self, concrete: str, deadline: Deadline) -> bool:
        """Whether open transactions are known to have acknowledged messages of the group on a partition."""
        if self._rest is None:
            return False
        path = f"/admin/v3/transactions/pendingAckStats/{path_of(concrete)}/{quote(self._group, safe='')}"
        try:
            return bool(self._told(self._rest, path, deadline)["ongoingTxnSize"])
        except (RestRefused, AccessDenied, BrokerUnavailable) as error:
            _log.debug("what open transactions hold of %r on %s: %s", self._group, concrete, error)
            return False

    def _is_there(self, concrete: str, deadline: Deadline) -> bool:
        assert self._rest is not None
        path = f"/admin/v2/persistent/{path_of(concrete)}/subscription/{quote(self._group, safe='')}/properties"
        try:
            self._told(self._rest, path, deadline)
        except RestRefused as refused:
            # The same number says that the topic is not loaded yet.
            return not (refused.status == 404 and refused.text.startswith("Subscription"))
        except AccessDenied as error:
            self._go_on_without(error)
        except BrokerUnavailable as error:
            _log.debug("whether %r still has a subscription on %s: %s", self._group, concrete, error)
        return True

    def _told(self, rest: Rest, path: str, deadline: Deadline) -> Any:
        """What REST says. Raises what `Rest.get` does, for a while without asking if it has been asked in vain."""
        if time.monotonic() < self._silent_until:
            raise BrokerUnavailable("REST did not answer a moment ago")
        try:
            return rest.get(path, Deadline(min(_ASK_SECONDS, deadline.left())))
        except DeadlineExceeded:
            self._silent_until = time.monotonic() + _SILENT_SECONDS
            raise

    def _value(self, topic: str) -> LedgerValue:
        return LedgerValue(self._context.ledger(self._context.application, f"group/{self._group}/{topic}"))

    def _go_on_without(self, error: AccessDenied) -> None:
        if not self._blind:
            self._blind = True
            _log.warning("group %r: nobody will notice if its subscriptions are lost: %s", self._group, error)
