"""`PassTransaction`: the methods that a processor calls on its transaction, which is a broker's or a database's."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Protocol

from txnbridge._base.messages import Message
from txnbridge._base.token import Outcome, State


class CommitRefused(Exception):
    """Raised by the commit of a `PassTransaction` if the database refuses what the handler has written.

    Nothing is committed. `error` is the database's error.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class PassTransaction(Protocol):
    """The transaction in which a processor handles messages of a poll: a `Transaction` or a `DatabaseTransaction`."""

    _lent: bool  # True while the handler has the transaction: the handler may not commit it
    _cause: BaseException | None  # the error because of which the state is FAILED

    @property
    def id(self) -> str: ...

    @property
    def state(self) -> State: ...

    @property
    def outcome(self) -> Outcome | None: ...

    @property
    def deadline(self) -> float: ...

    def send(
        self, topic: str, value: Any, *, key: Any, headers: Iterable[tuple[str, Any]], partition: int | None = None
    ) -> None: ...

    def _store(self) -> None: ...

    def ack(self, messages: Iterable[Message]) -> None: ...

    def commit(self) -> None: ...

    def abort(self) -> None: ...

    def _end_by(self, at: float) -> None: ...

    def __enter__(self) -> PassTransaction: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...
