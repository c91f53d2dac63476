"""The producer groups of a bridge. Brokers send the check-backs of a producer group to its members."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from txnbridge.errors import AccessDenied, InvalidOption
from txnbridge.spi import Deadline
from txnbridge_rocketmq.client.administration import Producer, producers
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.errors import RemotingError
from txnbridge_rocketmq.client.groups import Membership
from txnbridge_rocketmq.client.protocol.send_requests import CheckBack
from txnbridge_rocketmq.client.retry import retry
from txnbridge_rocketmq.errors import translate

_log = logging.getLogger("txnbridge")

# The client ids and the language of bridges: a host, a process, and eight random digits.
_BRIDGE_ID, _BRIDGE_LANGUAGE = re.compile(r"[^@]+@\d+@[0-9a-f]{8}"), "OTHER"
# Timeout of listing the members of groups. A live broker answers in milliseconds.
_LIST_SECONDS = 3.0


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
        """Join producer groups. `handler` gets their check-backs, several in one call.

        Raise `InvalidOption` if other clients are in one of the groups.
        """
        for group, strangers in self.strangers(groups, deadline).items():
            raise InvalidOption(described(group, strangers))
        with deadline.holding(self._lock, "another thread changed the groups"):
            self._router.handlers.update(dict.fromkeys(groups, handler))
            self._register(deadline)

    def leave(self, groups: Sequence[str], deadline: Deadline) -> None:
        """Leave producer groups, so that brokers send their check-backs to other members."""
        with deadline.holding(self._lock, "another thread changed the groups"):
            for group in groups:
                self._router.handlers.pop(group, None)
            self._register(deadline)

    def _register(self, deadline: Deadline) -> None:
        retry(lambda: self._client.join(Membership(self.groups), deadline.left()), "joining groups", deadline)

    def strangers(self, groups: Iterable[str], deadline: Deadline, *, strict: bool = False) -> dict[str, list[str]]:
        """Return the client ids of other clients, which are no bridges, in these producer groups, by group.

        Brokers that do not answer are left out. So are those that refuse to list members, unless `strict`: then raise
        `AccessDenied`.
        """
        seconds = min(_LIST_SECONDS, deadline.left())
        found: dict[str, set[str]] = {}
        try:
            asked = [(broker, group) for broker in self._client.brokers(seconds) for group in groups]
            answers = self._client.call_all([(broker, producers(group)) for broker, group in asked], seconds)
        except RemotingError as error:
            _log.debug("the members of producer groups are not known: %s", error)
            return {}
        for (broker, group), answer in zip(asked, answers, strict=True):
            if isinstance(answer, RemotingError):
                refused = translate(answer, f"listing the members of producer group {group}")
                if strict and isinstance(refused, AccessDenied):
                    raise refused from answer
                _log.debug("broker %s does not list the members of producer group %s: %s", broker, group, answer)
            elif strangers := {member.client_id for member in answer if not _is_bridge(member)}:
                found.setdefault(group, set()).update(strangers)
        return {group: sorted(strangers) for group, strangers in found.items()}


def described(group: str, strangers: Sequence[str]) -> str:
    """Return the warning that other clients, the `strangers`, are members of a producer group of bridges."""
    return (
        f"the clients {', '.join(strangers)} are in producer group {group!r} and are no bridges: brokers send them"
        " check-backs about half messages of txnbridge, and publish or drop these as they answer. Have these clients"
        " leave the group, or choose another application= or prefix"
    )


def _is_bridge(member: Producer) -> bool:
    return member.language == _BRIDGE_LANGUAGE and bool(_BRIDGE_ID.fullmatch(member.client_id))
