"""The producer groups of a bridge. Brokers send the check-backs of a producer group to its members."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from txnbridge.spi import Deadline
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.groups import Membership
from txnbridge_rocketmq.client.retry import retry
from txnbridge_rocketmq.client.send_requests import CheckBack


@dataclass
class CheckBackRouter:
    """Passes check-backs to the handler of their producer group.

    A client takes the router when it is created; handlers are added later.
    """

    handlers: dict[str, Callable[[Sequence[CheckBack]], None]] = field(default_factory=dict)  # by producer group

    def call(self, checks: Sequence[CheckBack]) -> None:
        """Pass check-backs to their handlers. Those without a handler are dropped; the broker repeats them."""
        for group, handler in list(self.handlers.items()):
            if own := [check for check in checks if check.half.group == group]:
                handler(own)


class ProducerGroups:
    """Joins and leaves producer groups for a bridge's client. Safe for use by several threads."""

    def __init__(self, client: RemotingClient, router: CheckBackRouter) -> None:
        self._client = client
        self._router = router
        self._lock = threading.Lock()

    @property
    def groups(self) -> frozenset[str]:
        return frozenset(self._router.handlers)

    def join(self, groups: Sequence[str], handler: Callable[[Sequence[CheckBack]], None], deadline: Deadline) -> None:
        """Join producer groups. `handler` gets their check-backs, several in one call."""
        with self._lock:
            self._router.handlers.update(dict.fromkeys(groups, handler))
            self._register(deadline)

    def leave(self, groups: Sequence[str], deadline: Deadline) -> None:
        """Leave producer groups, so that brokers send their check-backs to other members."""
        with self._lock:
            for group in groups:
                self._router.handlers.pop(group, None)
            self._register(deadline)

    def _register(self, deadline: Deadline) -> None:
        membership = Membership(self.groups)
        retry(lambda: self._client.join(membership, deadline.left()), "joining groups", deadline)
