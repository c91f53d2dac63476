"""Shows the batches that a query has decided, and finishes them without Spark."""

from __future__ import annotations

import json
import sys
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark_txnbridge._kept_bridges import SinkSession
from pyspark_txnbridge._write.batch_identity import BatchInDoubt
from pyspark_txnbridge._write.transaction_cleanup import (
    abort_open,
    fence_older,
    finish,
    has_history,
    mark_done,
    unfinished,
    writer_ids,
)
from txnbridge import Capability, Decision, InvalidOption, InvalidState, TokenState
from txnbridge.spi import OpenTransaction


@dataclass(frozen=True)
class TaskTransaction:
    """The transaction of one task in a decided batch."""

    partition: int
    rows: int
    state: TokenState
    expires_at: int | None
    token: str


@dataclass(frozen=True)
class UnfinishedBatch:
    """A batch whose decision log says ABORT (its driver gave it up), or COMMIT and not yet that it is done."""

    batch: int
    attempt: int
    decision: Decision
    rows: int
    parts: tuple[TaskTransaction, ...]


@dataclass(frozen=True)
class QueryStatus:
    """The status of one sink of a query, as the decision log and the broker show it."""

    run: str | None
    host: str | None
    done_up_to: int | None
    undone: tuple[UnfinishedBatch, ...]
    open: tuple[OpenTransaction, ...] | None  # None on a broker that does not list them


def query_of(checkpoint: str) -> str:
    """Return the id of the query that wrote a checkpoint. Raise `InvalidOption` if the checkpoint cannot be read."""
    path = Path(checkpoint.removeprefix("file:")) / "metadata"
    try:
        query = json.loads(path.read_text().splitlines()[-1])["id"]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        text = f"{path} is not the metadata of a query ({type(error).__name__}); for a checkpoint that is not on this"
        raise InvalidOption(text + " machine give the query's id instead") from None
    return str(query)


def status(session: SinkSession, path: tuple[str, str]) -> QueryStatus:
    """Return the status of a query's sink. The only change is that a missing decision log is created, empty."""
    reading, can_list = session.decisions.read(path), session.bridge.capabilities[Capability.LIST_OPEN]
    return QueryStatus(
        run=reading.opening.name if reading.opening else None,
        host=reading.opening.host if reading.opening else None,
        done_up_to=reading.done_up_to,
        undone=tuple(_unfinished(session, claim) for claim in session.decisions.claims(path)),
        open=tuple(session.bridge.admin.transactions(writer_ids(session.options, path))) if can_list else None,
    )


def _unfinished(session: SinkSession, claim: Any) -> UnfinishedBatch:
    _, _, batch, attempt = claim.id
    parts = []
    for part in claim.data.get("parts", ()):
        status = session.bridge.status(part["token"])
        parts.append(TaskTransaction(part["partition"], part["rows"], status.state, status.expires_at, part["token"]))
    return UnfinishedBatch(batch, attempt, claim.decision, claim.data.get("rows", 0), tuple(parts))


@dataclass
class Recovered:
    """The result of a recovery: the numbers of the published batches, and of the batch that the operator skipped."""

    published: list[int]
    skipped: int | None = None


def recover(session: SinkSession, path: tuple[str, str], skip: int | None = None) -> Recovered:
    """Publish every decided batch, mark it done, and return the batches' numbers. Safe while the query runs.

    Raise `BatchInDoubt` if a transaction of a batch can no longer be published. The batch `skip` counts as published
    from now on, whatever was published of it. Raise `InvalidOption` if `skip` is not the query's current batch.
    """
    recovered = Recovered([])
    for claim in unfinished(session, path):
        batch = claim.id[2]
        try:
            finish(session, claim)
            recovered.published.append(batch)
        except BatchInDoubt:
            if skip != batch:
                raise
            recovered.skipped = batch
        mark_done(session, path, batch, claim.data)
    if skip is not None and skip not in (recovered.skipped, *recovered.published):
        _skip(session, path, skip)
        recovered.skipped = skip
    return recovered


def _skip(session: SinkSession, path: tuple[str, str], batch: int) -> None:
    done = session.decisions.read(path).done_up_to
    if done is not None and done != batch:
        raise InvalidOption(f"the query has published every batch up to {done}: batch {batch} cannot be skipped")
    with suppress(InvalidState):  # a later batch was marked done meanwhile
        session.decisions.claim(("#skipped", *path, batch), Decision.COMMIT)
    if done is None:
        session.decisions.done(path, batch)


def clear(session: SinkSession, path: tuple[str, str]) -> list[str]:
    """Abort the query's undecided transactions, and return their names. A driver that still runs is fenced."""
    opening = session.decisions.open(path, name=f"recovery-{uuid.uuid4()}")
    recover(session, path)
    fence_older(session, path, opening.number)
    # If the log was deleted, earlier runs may have had higher numbers than this opening.
    return abort_open(session, path, opening.number if has_history(session, path) else sys.maxsize)
