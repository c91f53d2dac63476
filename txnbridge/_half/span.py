"""`spanning`: one transaction over several brokers, all or none.

Each broker's part is prepared first. Then a half message, the span's record, stores all tokens, and the end of the
first part decides: if it is committed, the other parts are committed, and if it is aborted, they are aborted. Any
process that is asked about the record of a dead one aborts the first part, is told its true outcome, and ends the
others by it. The record is dropped when all parts have ended; no reader ever sees it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

from txnbridge import errors
from txnbridge._base.connection import Connection, random_name
from txnbridge._base.deadline import Deadline, check_seconds
from txnbridge._base.messages import Message
from txnbridge._base.token import Decision, Outcome, Token, TokenState
from txnbridge._half.half_messages import END_SECONDS, HalfMessages, HalfTransaction
from txnbridge._half.span_sweep import SpannedBridge, SpanSweep, digest, mark
from txnbridge._write.transaction import Transaction
from txnbridge.capabilities import Capability
from txnbridge.spi import Half

if TYPE_CHECKING:
    from txnbridge.sql.barrier import SessionOrEngine
    from txnbridge.sql.span import SpanBarriers, SpanTransaction

_log = logging.getLogger("txnbridge")

# The first part expires by so many seconds before the second one, and so on: so there is time to commit the others when
# the first one was committed at the last moment.
_SECONDS_BETWEEN = 60.0
_HOLD_SECONDS = 600.0  # unless a broker allows less


def _named(bridges: Sequence[SpannedBridge]) -> str:
    return digest(" ".join(sorted(bridge.cluster for bridge in bridges)))


def sweep_of(bridges: Sequence[SpannedBridge]) -> SpanSweep:
    """Return a service, not started, that ends transactions over these brokers (spans) whose processes have died."""
    by_cluster = {bridge.cluster: bridge for bridge in bridges}
    return SpanSweep(bridges[0]._connection, _named(bridges), lambda: by_cluster)


class Spans:
    """The records of spans (transactions over several brokers): stores them, and ends spans whose process has died."""

    def __init__(self, keeper: Connection, bridges: Sequence[SpannedBridge]) -> None:
        self._guard, self._opening = threading.Lock(), threading.Lock()
        self._bridges: WeakSet[SpannedBridge] = WeakSet()
        self.use(bridges)
        self.clusters = _named(bridges)
        self._connection = keeper
        self._group = f"spans-{self._connection.identity.application}-{self.clusters}"
        # The records name it, because a half message has a topic. Nothing is ever published there.
        self._topic = self._connection.broker.admin.internal_name("spans")
        with self._connection.call():
            self._connection.broker.admin.create_internal_topic(self._topic, self._connection.deadline())
        self._records: HalfMessages | None = None
        self._databases: SpanBarriers | None = None
        self._later: dict[str, tuple[Token, Outcome]] = {}  # parts that their brokers could not end yet
        self._sweep = SpanSweep(self._connection, self.clusters, self._open_bridges, self._end_again, self._settle)
        self._sweep.start()

    def use(self, bridges: Sequence[SpannedBridge]) -> None:
        """From now on use these bridges, too, to end transactions over several brokers whose processes have died."""
        with self._guard:
            self._bridges.update(bridges)

    def _open_bridges(self) -> dict[str, SpannedBridge]:
        """Return an open bridge to each cluster: a program may have closed another one to the same cluster."""
        with self._guard:
            return {bridge.cluster: bridge for bridge in self._bridges if not bridge._connection.closed}

    def open(self, database: str | None = None, timeout: float | None = None) -> None:
        """From now on end dead processes' transactions over several brokers: without database, or with `database`."""
        with self._connection.deadline(timeout).holding(self._opening, "another thread opened spans"):
            if self._records is None:
                self._records = HalfMessages(self._connection, self._group, self._execute, self._check)
        if database is not None:
            import sqlalchemy

            self.database(sqlalchemy.create_engine(database), self._connection.timeout)

    def _settle(self, row: str, until: int) -> Decision:
        return Decision.UNDECIDED if self._databases is None else self._databases.settle(row, until)

    def database(self, db: SessionOrEngine, timeout: float) -> SpanTransaction:
        """Return the database's part of a transaction over brokers and a database; its block sends their record."""
        from txnbridge.sql.span import SpanBarriers

        with self._guard:
            self._databases = self._databases or SpanBarriers(self._connection, self)
        return cast("SpanTransaction", self._databases.transaction(db, self._group, timeout))

    def decide(self, span: Span, deadline: Deadline) -> None:
        """Store the record that decides a span (a transaction over several brokers), and commit its parts."""
        assert self._records is not None
        with self._records.transaction(span, timeout=max(0.001, deadline.left())) as half:
            self.send_record(half, span.tokens, deadline)

    def send_record(self, half: HalfTransaction, tokens: Sequence[Token], deadline: Deadline) -> None:
        """Add the record of a span (a transaction over several brokers) to `half`, a transaction of half messages."""
        record = {"v": 1, "until": int((time.time() + deadline.left()) * 1000)}
        half.send(self._topic, json.dumps({**record, "tokens": [str(token) for token in tokens]}).encode())

    def end_parts(self, half: Half, decision: Decision) -> bool:
        """End the brokers' transactions that `half` names by a database's decision; return whether all ended so."""
        outcome = Outcome.COMMITTED if decision is Decision.COMMIT else Outcome.ABORTED
        tokens = _tokens_of(half.messages[0].value)
        return self._end_others(half.transaction, outcome, tokens, by_row=True) is Decision.ABORT

    def decision_of_parts(self, half: Half) -> Decision:
        """Return the decision about the transactions that `half` names: abort the first, unless it is committed."""
        first, *_ = _tokens_of(half.messages[0].value)
        return Decision.COMMIT if self._bridge(first).abort(first) is Outcome.COMMITTED else Decision.ABORT

    def _execute(self, half: HalfTransaction, span: Span) -> Decision:
        first, *others = span.tokens
        span._deadline.check("the span")  # behind it a resolver may have begun to abort what it saw as open
        span.outcome = Outcome.UNKNOWN
        try:
            span.outcome = self._bridge(first).commit(first, span._deadline.left())
        except errors.OutcomeUnknown:
            raise
        except errors.TxnBridgeError as error:  # the broker may have got the request
            raise errors.OutcomeUnknown(f"no answer to the decision about a span: {error}") from error
        decision = self._end_others(half.id, span.outcome, others, within=span._deadline)
        if decision is Decision.ABORT:
            for part in span._parts.values():
                part._found(span.outcome)
        return decision

    def _check(self, transaction: str, messages: Sequence[Message]) -> Decision:
        """End the brokers' transactions that a record names; return ABORT to drop it, UNDECIDED to be asked again."""
        first, *others = _tokens_of(messages[0].value)
        bridge = self._bridge(first)
        if time.time() * 1000 >= json.loads(messages[0].value)["until"]:
            outcome = bridge.abort(first)
        else:
            state = bridge.status(first).state
            if state in (TokenState.PREPARED, TokenState.UNKNOWN):
                return Decision.UNDECIDED
            outcome = Outcome(state.value)
        return self._end_others(transaction, outcome, others)

    def _end_others(
        self, span: str, outcome: Outcome, tokens: Sequence[Token], by_row: bool = False, within: Deadline | None = None
    ) -> Decision:
        """End the brokers' transactions `tokens` by `outcome`; return ABORT to drop their record, else UNDECIDED."""
        left, torn = False, list[tuple[Token, str]]()
        for token in tokens:
            try:
                found = self._end(token, outcome, None if within is None else max(END_SECONDS, within.left()))
            except errors.TxnBridgeError as error:
                _log.warning("span %s is %s, and its part %r is ended later: %s", span, outcome.value, token, error)
                left = True
                self._later[token.transaction] = token, outcome
                continue
            if found is not outcome:
                torn.append((token, found.value))
        if by_row and outcome is Outcome.ABORTED and len(torn) == len(tokens):
            return Decision.ABORT  # a paused resolver's row: the sender had ended all, and deleted its COMMIT row
        for part in torn:
            text = "span %s is torn: it is %s, but %r is %s: nobody ended it in time, or an administrator did"
            _log.error(text + ". Make good what is missing", span, outcome.value, *part)
        return Decision.UNDECIDED if left or torn else Decision.ABORT

    def _end(self, token: Token, outcome: Outcome, timeout: float | None = None) -> Outcome:
        bridge = self._bridge(token)
        return (bridge.commit if outcome is Outcome.COMMITTED else bridge.abort)(token, timeout)

    def _end_again(self) -> list[Token]:
        """End transactions that could not be ended before; return the tokens of those that still cannot be.

        The next check-back may come after they have expired.
        """
        for transaction, ended in list(self._later.items()):
            with suppress(errors.TxnBridgeError):
                with suppress(errors.EvidenceLost):
                    self._end(*ended)
                self._later.pop(transaction, None)
        return [token for token, _ in list(self._later.values())]

    def _bridge(self, token: Token) -> SpannedBridge:
        bridge = self._open_bridges().get(token.cluster)
        if bridge is None:
            raise errors.BrokerUnavailable(f"no bridge to the {token.broker} cluster {token.cluster} is open here")
        return bridge


def _tokens_of(record: bytes | None) -> list[Token]:
    return [Token.parse(token) for token in json.loads(record or b"{}")["tokens"]]


def spans_over(bridges: Sequence[SpannedBridge], least: int, timeout: float | None = None) -> Spans:
    """Return the `Spans` of these clusters: all processes choose the same broker for records of transactions."""
    known = [bridge for bridge in bridges if hasattr(bridge, "_connection")]
    for bridge in known:
        bridge._connection.check_open()
    clusters = frozenset(bridge.cluster for bridge in known)
    if len(clusters) < len(bridges) or len(bridges) < least:
        raise errors.InvalidOption("spanning() takes bridges to two or more clusters, one each, or one bridge and db=")
    for capability in (Capability.PREPARE, Capability.RESOLVE_ANYWHERE):
        for bridge in bridges:
            bridge.capabilities.require(capability)
    # A broker's own half messages cost fewer requests. By name Kafka, whose commits are quicker, comes before Pulsar.
    keepers = [bridge._connection for bridge in bridges if bridge.capabilities[Capability.HALF_MESSAGES]]
    lanes = lambda each: (each.broker.half_store() is None, each.backend, each.broker.cluster)  # noqa: E731
    keeper = min(keepers or [bridge._connection for bridge in bridges], key=lanes)
    with keeper.deadline(timeout).holding(keeper.opening_spans, "another thread opened spans"):
        opened = keeper.spans
        if clusters not in opened:
            opened[clusters] = Spans(keeper, bridges)
    found: Spans = opened[clusters]
    found.use(bridges)
    return found


class Span:
    """A transaction over several brokers, for a `with` block: at its end all parts are committed, or none.

    The parts become visible one after another. An exception in the block aborts all of them; `raise Abort` does so
    without an exception outside the block. Only one thread at a time may use the object.
    """

    def __init__(
        self,
        bridges: Sequence[SpannedBridge],
        db: SessionOrEngine | None,
        timeout: float | None,
        hold: float | None,
        in_order: bool = False,
    ) -> None:
        if timeout is not None:
            check_seconds("timeout", timeout, above_0=True)
        self._spans = spans_over(bridges, 2 if db is None else 1, timeout)
        timeout = max(bridge._connection.timeout for bridge in bridges) if timeout is None else timeout
        self._database: SpanTransaction | None = None
        if db is None:
            self._spans.open(timeout=timeout)
            self._key = f"{self._spans.clusters}-{digest(bridges[0]._connection.identity.application)}{random_name(8)}"
        else:
            self._database = self._spans.database(db, timeout)
            # A sweep that knew no rows would take no key with a dot for one of its own.
            self._key = f"{self._spans.clusters}.{self._database.row}"
        self._deadline = Deadline(timeout)
        self._holds = _holds(bridges, timeout, hold, in_order, db is not None)
        self._until = time.time() + timeout
        self._parts: dict[SpannedBridge, Transaction] = {}
        self._ending = threading.Lock()  # acquired by the thread that ends it, for ever
        self.tokens: list[Token] = []
        self.outcome: Outcome | None = None

    @property
    def token(self) -> Token | None:
        """The token of the first broker's transaction, whose outcome is that of all; None until it is prepared."""
        return self.tokens[0] if self.tokens else None

    @property
    def db(self) -> Any:
        """The `Session` of `db=`, or with an `Engine` its `Connection`."""
        if self._database is None:
            raise errors.InvalidState("this span has no db=")
        return self._database.db

    def on(self, bridge: SpannedBridge) -> Transaction:
        """Return the transaction on one of the span's brokers, for sends and acknowledgements; the span ends it."""
        if self._ending.locked():
            raise errors.InvalidState("on() needs an open span; its block has ended")
        if bridge not in self._holds:
            raise errors.InvalidOption("on() takes one of the bridges that spanning() was given")
        if bridge not in self._parts:
            marked = mark(self._key, list(self._holds).index(bridge), self._until)
            self._parts[bridge] = bridge._begin_part(marked, max(0.001, self._deadline.left()), self._holds[bridge])
        return self._parts[bridge]

    def __enter__(self) -> Span:
        if self._ending.locked():
            raise errors.InvalidState("the block of this span has ended")
        if self._database is not None:
            self._database.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        held: list[bool] = []
        try:
            if not Deadline(0).acquire(self._ending, held):  # `abort` has ended it
                if self.outcome is Outcome.ABORTED:
                    self._abort(prepared=False)  # it could not abort a part in the midst of a call
                return isinstance(error, errors.Abort)
            if error is None:
                self._finish()
        except BaseException as failure:
            error, kind, trace = failure, type(failure), failure.__traceback__
            if isinstance(failure, errors.TxnBridgeError):
                failure.token = str(self.token) if self.tokens and self.outcome is Outcome.UNKNOWN else None
            raise
        finally:
            if held or self._ending.acquire(blocking=False):  # a signal handler's exception may come before the first
                if self.outcome in (None, Outcome.ABORTED):
                    self.outcome = Outcome.ABORTED
                    self._abort()
                if self._database is not None and error is not None and self._database.outcome is None:
                    with suppress(errors.TxnBridgeError):
                        self._database.__exit__(kind, error, trace)
        return isinstance(error, errors.Abort)

    def _finish(self) -> None:
        # The part that expires first decides, if there is no database.
        for part in filter(None, map(self._parts.get, self._holds)):
            part.__exit__(None, None, None)
            if part.token is None or not part.token.prepared:
                raise errors.TransactionAborted("a part of the span was aborted in its block")
            self.tokens.append(part.token)
        if self._database is not None:
            self._finish_database(self._database)
        elif self.tokens:
            self._decide()
        else:
            self.outcome = Outcome.COMMITTED

    def _finish_database(self, database: SpanTransaction) -> None:
        if self.tokens:
            self._spans.send_record(database, self.tokens, self._deadline)
        try:
            database.__exit__(None, None, None)
        finally:
            self.outcome = database.outcome

    def _decide(self) -> None:
        try:
            self._spans.decide(self, self._deadline)
        except errors.TxnBridgeError as error:
            if self.outcome not in (Outcome.COMMITTED, Outcome.ABORTED):
                raise
            _log.info("the record of a span is dropped later: %s", error)
        if self.outcome is Outcome.ABORTED:
            raise errors.TransactionAborted("the span was aborted: its time was over, or an administrator aborted it")

    def abort(self) -> None:
        """Abort all parts now. A second abort has no effect, and one behind the block's end raises `InvalidState`."""
        if self._ending.locked() and self.outcome is not Outcome.ABORTED:
            raise errors.InvalidState("abort() needs an open span; its block has ended")
        self.__exit__(errors.Abort, errors.Abort(), None)

    def _abort(self, prepared: bool = True) -> None:
        """Abort open and prepared transactions on the brokers; repeat what fails now while this process lives."""
        # The part that decides comes last: while it is prepared, the sweep of any process can abort all of them.
        failed = False
        for part in filter(None, map(self._parts.get, reversed(self._holds))):
            try:
                if part.token is None:
                    part.abort()
                elif prepared and not failed:
                    self._spans._end(part.token, Outcome.ABORTED, max(END_SECONDS, self._deadline.left()))
            except errors.TxnBridgeError:
                failed = True
                if part.token is not None and part.token.prepared:
                    self._spans._later[part.token.transaction] = part.token, Outcome.ABORTED


def _holds(
    bridges: Sequence[SpannedBridge], timeout: float, hold: float | None, in_order: bool, by_database: bool
) -> dict[SpannedBridge, float]:
    """Return for how many seconds after `timeout` each bridge's transaction stays prepared before its broker aborts it.

    With `in_order` they expire in the order of the bridges, else first where the broker's limit is lowest. If a
    database decides, all of them stay a minute longer, as else those that do not decide.
    """

    def most(bridge: SpannedBridge) -> float:
        limit = bridge.limits.prepared_seconds
        return float("inf") if limit is None else limit - timeout

    if hold is not None:
        check_seconds("hold", hold)
    ordered = bridges if in_order else sorted(bridges, key=most)
    later = {bridge: _SECONDS_BETWEEN * place for place, bridge in enumerate(ordered, start=by_database)}
    allowed = min(most(bridge) - seconds for bridge, seconds in later.items())
    wanted = min(_HOLD_SECONDS, allowed) if hold is None else hold
    if not 0 <= wanted <= allowed:
        raise errors.InvalidOption(
            f"these brokers keep a span for at most {timeout + allowed:g} s, its timeout of {timeout:g} s included: set"
            " hold= or timeout= lower"
        )
    return {bridge: wanted + seconds for bridge, seconds in later.items()}


def spanning(
    *bridges: SpannedBridge, db: SessionOrEngine | None = None, timeout: float | None = None, hold: float | None = None
) -> Span:
    """Return a transaction over several brokers and a database, all or none, for a `with` block.

        with txnbridge.spanning(kafka, pulsar, db=engine) as span:
            span.on(kafka).send("orders", b"…")
            span.on(pulsar).send("letters", b"…")
            span.db.execute(…)

    `db` is what `bridge.transaction(db=…)` takes, but no session of asyncio; then the database decides, otherwise the
    part that can wait least.
    It is all or none, not simultaneous: a reader of one broker may see its part before another's. If this process dies,
    another one of the same application that has called `spanning` with bridges to the same clusters ends what is left.
    The first part stays prepared for `hold` seconds after `timeout`, each further one, with `db` also the first, a
    minute longer; if nobody ends them in that time, each broker aborts its.

    Raise `InvalidOption` if a broker cannot keep them so long, `OutcomeUnknown` at the end of the block if the answer
    to the decision was lost: the token is one for the `status` of the bridge whose part decides.
    """
    return Span(bridges, db, timeout, hold)
