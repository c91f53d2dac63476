"""`DecisionLogs`: opens the decision logs that a bridge uses, and returns the ledgers in them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from txnbridge._base.connection import Connection, close_logging_errors
from txnbridge._base.deadline import Deadline
from txnbridge._base.token import Token
from txnbridge.capabilities import Capability
from txnbridge.errors import InvalidToken
from txnbridge.spi import DecisionLog, Ledger

if TYPE_CHECKING:
    from txnbridge._decisions.decisions import Decisions

P = ParamSpec("P")
R = TypeVar("R")


class LogProvider(Protocol):
    """A store of decision logs other than the bridge's own broker: another broker, or a database."""

    def cluster(self, deadline: Deadline) -> str:
        """Return the id of this store, which tokens contain."""

    def decision_log(self, name: str, deadline: Deadline) -> DecisionLog: ...

    def close(self) -> None: ...


class DecisionLogs:
    """Opens each of a bridge's decision logs at its first use, and keeps it open until the bridge is closed."""

    def __init__(self, connection: Connection, elsewhere: LogProvider | None) -> None:
        self._connection = connection
        self._elsewhere = elsewhere
        self._opening = threading.Lock()
        self._opened: dict[str, Decisions] = {}  # the decision logs that ledgers use, by the logs' names
        self._closed = False

    def own_ledger(self) -> Ledger:
        """Return this bridge's ledger: the records of its transactional id in its application's decision log."""
        identity = self._connection.identity
        return self.ledger(identity.application, identity.name, made_up=not identity.owned)

    def ledger(self, application: str, id: str, made_up: bool = False) -> Ledger:
        return LazyLedger(lambda deadline: self.shared(application, deadline).ledger(id, made_up=made_up))

    def ledger_of(self, token: Token) -> Ledger:
        """Return the ledger of a token's transaction: its id's records in the decision log that the token names."""
        owner = token.transaction.rsplit("/", 2)[0]
        evidence = token.log or {}

        def find(deadline: Deadline) -> Ledger:
            place = self._place(deadline)
            if evidence.get("on") != place:
                raise InvalidToken(
                    f"the decision log of this token's transaction is kept by {evidence.get('on') or 'its own broker'},"
                    f" this bridge's by {place or 'its own broker'}: connect with the same decision_log"
                )
            name = evidence.get("log") or self._connection.identity.application
            return self.shared(name, deadline).ledger(owner, token.log)

        return LazyLedger(find)

    def open(self, name: str, deadline: Deadline) -> Decisions:
        """Open a decision log by its name; the caller closes it."""
        from txnbridge._decisions.decisions import Decisions

        connection = self._connection
        if self._elsewhere is None:
            connection.capabilities.require(Capability.DECISION_LOG)
        place = self._place(deadline)
        log = (self._elsewhere or connection.broker).decision_log(name, deadline)
        return Decisions(
            log,
            timeout=connection.timeout,
            events=connection.events,
            name=name,
            place=place,
            cluster=None if place is None else connection.broker.cluster,
            host=connection.identity.host,
            timing=connection.timing,
        )

    def close(self) -> None:
        self._closed = True
        for log in list(self._opened.values()):  # a copy, because a call that is still running may open another log
            close_logging_errors(log.close)

    def close_provider(self) -> None:
        if self._elsewhere is not None:
            close_logging_errors(self._elsewhere.close)

    def shared(self, name: str, deadline: Deadline) -> Decisions:
        """Return a decision log by its name, which the bridge opens once and closes itself."""
        if (found := self._opened.get(name)) is not None:
            return found
        with deadline.holding(self._opening, "another thread opened a decision log"):
            if name not in self._opened:
                self._opened[name] = self.open(name, deadline)
            if self._closed:  # a broker may send check-backs, which open logs, until the broker itself is closed
                close_logging_errors(self._opened[name].close)
            return self._opened[name]

    def _place(self, deadline: Deadline) -> str | None:
        """Return the id of the database or other broker that stores the decision logs; None for the bridge's broker."""
        return None if self._elsewhere is None else self._elsewhere.cluster(deadline)


def _found(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return a method that finds the ledger (part of a decision log) by the call's deadline, and calls `method`."""

    def call(self: LazyLedger, /, *arguments: P.args, **named: P.kwargs) -> R:
        (deadline,) = (argument for argument in arguments if isinstance(argument, Deadline))
        function: Callable[P, R] = getattr(self._find_ledger(deadline), method.__name__)
        return function(*arguments, **named)

    return call


class LazyLedger(Ledger):
    """A ledger, a part of a decision log, which `find_ledger` opens within the deadline of the first call on it."""

    def __init__(self, find_ledger: Callable[[Deadline], Ledger]) -> None:
        self._find_ledger = find_ledger

    opened = _found(Ledger.opened)
    open_behind = _found(Ledger.open_behind)
    newest_opening = _found(Ledger.newest_opening)
    begin = _found(Ledger.begin)
    record = _found(Ledger.record)
    find = _found(Ledger.find)
    entries = _found(Ledger.entries)
    claim = _found(Ledger.claim)
    decided = _found(Ledger.decided)
    claims = _found(Ledger.claims)
    acknowledged = _found(Ledger.acknowledged)
    positions = _found(Ledger.positions)
    holds = _found(Ledger.holds)
