"""Looking at what a query has decided, and finishing it without Spark."""

from __future__ import annotations

import json
import sys
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark_txnbridge._batch_identity import BatchInDoubt
from pyspark_txnbridge._cleanup import decided, finish, knows, mark_done, shut_out, sweep, writer_ids
from pyspark_txnbridge._options import SinkOptions
from pyspark_txnbridge._session import Session
from txnbridge import Decision, InvalidOption, InvalidState, TokenState
from txnbridge.spi import OpenTransaction


@dataclass(frozen=True)
class Part:
    """One task's transaction of a decided batch."""

    partition: int
    rows: int
    token: str
    state: TokenState
    expires_at: int | None


@dataclass(frozen=True)
class Undone:
    """A batch that is decided and not marked done, or was given up."""

    batch: int
    attempt: int
    decision: Decision
    rows: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class QueryStatus:
    """What the decision log and the broker say of one sink of a query."""

    run: str | None
    host: str | None
    done_up_to: int | None
    undone: tuple[Undone, ...]
    open: tuple[OpenTransaction, ...]


def query_of(checkpoint: str) -> str:
    """The id of the query that a checkpoint belongs to. Raises `InvalidOption`."""
    path = Path(checkpoint.removeprefix("file:")) / "metadata"
    try:
        found = json.loads(path.read_text().splitlines()[-1])["id"]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise InvalidOption(
            f"{path} is not the metadata of a query ({type(error).__name__}); for a checkpoint that is not on this"
            " machine give the query's id instead"
        ) from None
    return str(found)


def status(session: Session, options: SinkOptions, path: tuple[str, str]) -> QueryStatus:
    """What there is now. Only the log may be made by it, empty, where there is none."""
    reading = session.decisions.read(path)
    begins = writer_ids(options, path)
    return QueryStatus(
        run=reading.opening.name if reading.opening else None,
        host=reading.opening.host if reading.opening else None,
        done_up_to=reading.done_up_to,
        undone=tuple(_undone(session, claim) for claim in session.decisions.claims(path)),
        open=tuple(session.bridge.admin.transactions(begins)),
    )


def _undone(session: Session, claim: Any) -> Undone:
    _, _, batch, attempt = claim.id
    parts = []
    for part in claim.data.get("parts", ()):
        found = session.bridge.status(part["token"])
        parts.append(Part(part["partition"], part["rows"], part["token"], found.state, found.expires_at))
    return Undone(batch, attempt, claim.decision, claim.data.get("rows", 0), tuple(parts))


def recover(session: Session, path: tuple[str, str], skip: int | None = None) -> list[int]:
    """Publish every batch that is decided, and mark it done; the batches. Safe while the query runs.

    A batch part of which can no longer be published raises `BatchInDoubt`, unless it is the one to `skip`: that one
    counts as published from now on, whatever the decision log knows of it. Raises `InvalidOption` if a batch to skip
    is not the one that the query stands at.
    """
    finished = []
    for claim in decided(session, path):
        batch = claim.id[2]
        try:
            finish(session, claim)
        except BatchInDoubt:
            if skip != batch:
                raise
        mark_done(session, path, batch, claim.data)
        finished.append(batch)
    if skip is not None and skip not in finished:
        _skip(session, path, skip)
    return finished


def _skip(session: Session, path: tuple[str, str], batch: int) -> None:
    done = session.decisions.read(path).done_up_to
    if done is not None and done != batch:
        raise InvalidOption(f"the query has published every batch up to {done}: batch {batch} is not one to skip")
    with suppress(InvalidState):  # a later batch is done meanwhile
        session.decisions.claim(("#skipped", *path, batch), Decision.COMMIT)
    if done is None:
        session.decisions.done(path, batch)


def clear(session: Session, options: SinkOptions, path: tuple[str, str]) -> list[str]:
    """Abort what the query left open and nobody decided; the transactions. A driver that still runs is shut out."""
    opening = session.decisions.open(path, name=f"recovery-{uuid.uuid4()}")
    recover(session, path)
    shut_out(session, options, path, opening.number)
    # Where a log was deleted, runs that it knew had higher numbers.
    return sweep(session, options, path, opening.number if knows(session, path) else sys.maxsize)
