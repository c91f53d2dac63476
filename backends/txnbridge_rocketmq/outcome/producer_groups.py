"""The producer groups for which a bridge receives check-backs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from txnbridge.spi import Deadline
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.groups import Membership
from txnbridge_rocketmq.client.retry import retry
from txnbridge_rocketmq.client.sending import CheckBack


@dataclass
class CheckBackRouter:
    """Passes check-backs to their producer groups' handlers. The client gets the router before any handler exists."""

    handlers: dict[str, Callable[[Sequence[CheckBack]], None]] = field(default_factory=dict)  # by producer group

    def call(self, checks: Sequence[CheckBack]) -> None:
        """Call the handlers of the check-backs' producer groups. Brokers repeat a check-back that gets no response."""
        for group, handler in list(self.handlers.items()):
            if own := [check for check in checks if check.half.group == group]:
                handler(own)


class ProducerGroups:
    """The producer groups of a bridge's client. Safe for use by several threads."""

    def __init__(self, client: RemotingClient, router: CheckBackRouter) -> None:
        self._client = client
        self._router = router
        self._lock = threading.Lock()

    @property
    def groups(self) -> frozenset[str]:
        return frozenset(self._router.handlers)

    def join(self, groups: Sequence[str], handler: Callable[[Sequence[CheckBack]], None], deadline: Deadline) -> None:
        """Join producer groups. `handler` receives the check-backs of these groups, several in one call."""
        with self._lock:
            self._router.handlers.update(dict.fromkeys(groups, handler))
            self._register(deadline)

    def leave(self, groups: Sequence[str], deadline: Deadline) -> None:
        """Leave producer groups. Brokers send their check-backs to other members."""
        with self._lock:
            for group in groups:
                self._router.handlers.pop(group, None)
            self._register(deadline)

    def _register(self, deadline: Deadline) -> None:
        membership = Membership(self.groups)
        retry(lambda: self._client.join(membership, deadline.left()), "joining groups", deadline)
