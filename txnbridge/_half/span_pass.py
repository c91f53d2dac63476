"""`SpanPass`: the transaction of one pass of a processor whose handler sends to another broker (`to=`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType

from txnbridge import errors
from txnbridge._base.messages import Message
from txnbridge._base.token import Outcome, State
from txnbridge._half.span import Span
from txnbridge._half.span_sweep import SpannedBridge


class SpanPass:
    """A transaction over two brokers: the source, whose messages are processed, and the target of the handler's sends.

    The target's part decides, and the source's part, which has the acknowledgements, ends last: where a group's
    positions wait for it, no other member goes on before the outputs are there.
    """

    def __init__(self, source: SpannedBridge, target: SpannedBridge, timeout: float) -> None:
        self._span = Span([target, source], None, timeout, None, in_order=True)
        try:
            # Always in one order: passes in opposite directions would wait for the writers of each other.
            for bridge in sorted((source, target), key=lambda bridge: bridge.cluster):
                self._span.on(bridge)
            # The source's part is also the transaction of dead letters and retries.
            self.of_source, self._target = self._span.on(source), self._span.on(target)
        except BaseException:
            self._span.abort()
            raise
        self.id = self.of_source.id
        # The handler sends to the target, as with a `Transaction` of its own.
        self.send: Callable[..., None] = self._target.send
        self.send_many: Callable[..., None] = self._target.send_many
        self._send_encoded: Callable[..., None] = self._target._send_encoded
        self.ack: Callable[[Iterable[Message]], None] = self.of_source.ack

    @property
    def state(self) -> State:
        if self._span.outcome is not None:
            return State[self._span.outcome.name]
        return State.OPEN if self.of_source.state is State.OPEN is self._target.state else State.FAILED

    @property
    def outcome(self) -> Outcome | None:
        return self._span.outcome

    @property
    def deadline(self) -> float:
        return min(self.of_source.deadline, self._target.deadline)

    @property
    def _cause(self) -> BaseException | None:
        return self._target._cause or self.of_source._cause

    @property
    def _lent(self) -> bool:
        return self._target._lent

    @_lent.setter
    def _lent(self, lent: bool) -> None:
        self._target._lent = lent

    def _store(self) -> None:
        self._target._store()
        self.of_source._store()

    def commit(self) -> None:
        if self._lent:
            self._target.commit()  # refuses it, and fails
        self._span.__exit__(None, None, None)
        if self.outcome is not Outcome.COMMITTED:  # a stop by force has aborted it on another thread
            raise errors.TransactionAborted(f"transaction {self.id} was aborted meanwhile")

    def abort(self) -> None:
        self._span.abort()

    def _end_by(self, at: float) -> None:
        self._span._deadline.shorten(at)
        self._target._end_by(at)
        self.of_source._end_by(at)

    def __enter__(self) -> SpanPass:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._span.__exit__(kind, error, trace)
