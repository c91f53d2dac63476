"""`SpanSweep`: ends parts of spans whose process died before it had stored the span's record.

Only the ids of such parts tell what they are: each has a mark with the span's key, its place among the parts, and the
time until which the process may decide. The part that decides, at place 0, is prepared first. It can be aborted at any
time after that, because a later decision then finds it aborted; if it was still undecided, the others are aborted too.
(A span that leaves out the broker of place 0 waits for its hold.) With a database the key names its row, which decides.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, cast

from txnbridge._base.connection import Connection
from txnbridge._base.service import Service
from txnbridge._base.token import Decision, Outcome, Status, Token
from txnbridge._write.transaction import Transaction
from txnbridge.capabilities import Capabilities, Capability, Limits
from txnbridge.errors import AccessDenied, BrokerUnavailable, TxnBridgeError
from txnbridge.spi import OpenTransaction

_log = logging.getLogger("txnbridge")

# The `sweep_margin` of an open part without the one that decides, which is not protected by the abort of that one.
_LONG_MARGIN_SECONDS = 60.0


class SpannedBridge(Protocol):
    """The part of `Bridge` that spans use."""

    @property
    def _connection(self) -> Connection: ...

    @property
    def url(self) -> str: ...

    @property
    def cluster(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def limits(self) -> Limits: ...

    @property
    def admin(self) -> Any: ...

    def _begin_part(self, mark: str, timeout: float, hold: float) -> Transaction: ...

    def commit(self, token: str | Token, timeout: float | None = None) -> Outcome: ...

    def abort(self, token: str | Token, timeout: float | None = None) -> Outcome: ...

    def status(self, token: str | Token) -> Status: ...


def mark(key: str, place: int, until: float) -> str:
    """Return a suffix for an id, that of one broker's transaction in a span over several: key, number and time."""
    return f".span.{key}.{place}.{int(until)}"


_ANY_MARK = re.compile(r"\.span\.\S+\.\d+\.\d+$")
PART_OF_SPAN = "part of a span: leave it to a resolver (txnbridge spans run)"


def is_part(transaction: OpenTransaction | Token) -> bool:
    """Return whether a transaction is one broker's part of a span over several: nobody should end it alone."""
    named = transaction if isinstance(transaction, Token) else transaction.token or transaction
    return _ANY_MARK.search(named.transaction) is not None


def digest(text: str) -> str:
    """Return a short name for a text that is too long for the ids of transactions."""
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


OpenBridges = Callable[[], Mapping[str, SpannedBridge]]  # by their clusters
# Settles the row of a span by its name and time: ABORT or COMMIT stands for ever, UNDECIDED means to ask again.
Settle = Callable[[str, int], Decision]


class Part(NamedTuple):
    """One broker's part of a transaction over several, open or prepared. Its process decides by `until` (seconds)."""

    bridge: SpannedBridge
    transaction: str
    token: Token | None  # None for an open part
    expires_at: int | None
    key: str
    row: str | None  # the name of the row that decides, of a span with a database
    place: int  # -1 if the broker does not know it
    until: int


class SpanSweep(Service):
    """Looks every few seconds, on all clusters, for parts of spans whose process cannot end them any more; ends them.

    A span is a transaction over several brokers, a part its transaction on one of them. The service runs until the
    bridge is closed on whose broker the records of spans are stored.
    """

    def __init__(
        self,
        connection: Connection,
        clusters: str,
        bridges: OpenBridges,
        end_again: Callable[[], Iterable[Token]] = lambda: (),
        settle: Settle = lambda *_: Decision.UNDECIDED,
    ) -> None:
        super().__init__(connection, "sweep of spans", stop_timeout=1.0)
        # Spans over other clusters have parts that this sweep does not see.
        self._mark = re.compile(
            rf"\.span\.(?P<key>{clusters}(?:-[^.]+|\.(?P<row>[^.]+)))\.(?P<place>\d+)\.(?P<until>\d+)$"
        )
        self._bridges = bridges
        self._brokers = len(bridges())
        self._settle = settle
        self._end_again = end_again
        self._aborted: set[str] = set()  # the keys of the spans of which a part was aborted here
        self._denied = False
        self._late: set[str] = set()  # the ids of prepared parts in the second half of their hold

    @property
    def healthy(self) -> bool:
        """False while a prepared part is in the second half of its hold, at whose end its broker aborts it."""
        return self._runs and not self._late

    def _loop(self) -> None:
        while not self._stop.asked and not self._connection.closed:
            self._stop.sleep(self._connection.timing.sweep_every)
            left = list(self._end_again())
            self._warn([*left, *(part.token for part in self.sweep() if part.token is not None)])

    def _warn(self, prepared: Iterable[Token]) -> None:
        late, now = set[str](), time.time()
        for token in prepared:
            *_, place, until = token.transaction.split(".")
            expires = (token.expires_at or 0) / 1000
            if now < expires < 2 * now - int(until):
                if token.transaction not in self._late | late:
                    text = "part %s of a span is still prepared, and its broker aborts it in %.0f s: %r"
                    _log.warning(text, place, expires - now, token)
                late.add(token.transaction)
        self._late = late

    def sweep(self) -> list[Part]:
        """End spans' parts whose processes cannot decide about them any more; return the parts that it found."""
        if len(self._bridges()) < self._brokers:  # one was closed: of a span it would end a part, and forget the others
            return []
        now = time.time()  # before the look, which may take long: what it shows as open is open after this time
        left = self.parts(quiet=True)
        firsts = {part.key for part in left if part.place == 0}
        settled: dict[str, Decision] = {}  # by the names of rows
        # A database that is away delays only the spans that wait for it.
        for part in sorted(left, key=lambda part: (part.row is not None, part.place)):
            late = now >= part.until + self._connection.timing.sweep_margin
            with suppress(TxnBridgeError):  # the next look repeats what failed
                if part.row is None:
                    due = late if part.place == 0 else part.key in self._aborted
                    if part.token is None and part.key not in firsts:  # not decided, and it can no longer be
                        due = now >= part.until + _LONG_MARGIN_SECONDS
                    if due and self._end(part, Decision.ABORT) is Outcome.ABORTED:
                        self._aborted.add(part.key)
                elif late:
                    if part.row not in settled:
                        settled[part.row] = Decision.UNDECIDED  # if the database does not answer
                        settled[part.row] = self._settle(part.row, part.until)
                    if (decision := settled[part.row]) is not Decision.UNDECIDED:
                        self._end(part, decision)
        return left

    def _end(self, part: Part, decision: Decision) -> Outcome | None:
        """End one broker's transaction; return its true outcome, None if it was listed as open and is prepared now."""
        if part.token is not None:
            return (part.bridge.commit if decision is Decision.COMMIT else part.bridge.abort)(part.token)
        # A span is decided only when all its parts are prepared. The ends of other parts may have taken minutes.
        if decision is Decision.COMMIT or part not in self._listed(part.bridge):
            return None
        return cast("Outcome", part.bridge.admin.abort(part.transaction, reason=PART_OF_SPAN))

    def parts(self, quiet: bool = False) -> list[Part]:
        """Return the open and prepared parts of spans over these clusters, `quiet` without those of a broker away."""
        return [part for bridge in self._bridges().values() for part in self._listed(bridge, quiet)]

    def _listed(self, bridge: SpannedBridge, quiet: bool = False) -> list[Part]:
        if not bridge.capabilities[Capability.LIST_OPEN]:
            return []
        try:
            listed = bridge.admin.transactions()
        except TxnBridgeError as error:
            if isinstance(error, BrokerUnavailable) and not quiet:
                raise
            if isinstance(error, AccessDenied) and not self._denied:
                self._denied = True
                _log.warning("parts of spans whose process died stay prepared until their hold is over: %s", error)
            return []
        found = []
        for each in listed:
            name, expires_at = (each.token or each).transaction, each.expires_at
            if each.token is None and each.state != "open":
                continue
            if marked := self._mark.search(name):
                place, until = int(marked["place"]), int(marked["until"])
                found.append(Part(bridge, name, each.token, expires_at, marked["key"], marked["row"], place, until))
            elif each.prepares_until is not None:
                until = each.prepares_until // 1000
                found.append(Part(bridge, name, None, expires_at, name, None, -1, until))
        return found
