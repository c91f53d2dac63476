"""Ending what runs leave behind: first what they decided, then what nobody decided."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from pyspark_txnbridge._batch_identity import BatchInDoubt, Unit
from pyspark_txnbridge._options import NAMELESS, SinkOptions
from pyspark_txnbridge._session import Claim, Session, close_logging_errors, connect
from txnbridge import (
    AccessDenied,
    BrokerUnavailable,
    Decision,
    EvidenceLost,
    InvalidState,
    NotFound,
    Outcome,
    Token,
    TxnBridgeError,
)

_log = logging.getLogger("txnbridge.spark")

# Asking about a token is mostly waiting for the broker.
_AT_ONCE = 8
# In an error; a batch with a column of topics may have thousands.
_TOPICS_SHOWN = 5

_Answer = TypeVar("_Answer")


def writer_ids(options: SinkOptions, path: tuple[str, str]) -> str:
    """What the transactional ids of all runs begin with."""
    return ".".join((options.prefix, *path, ""))


def writer_id(options: SinkOptions, path: tuple[str, str], number: int, slot: str) -> str:
    """The transactional id of one slot of one run."""
    return f"{writer_ids(options, path)}{number}.{slot}"


def ask_all(ask: Callable[[str], _Answer], tokens: Iterable[str]) -> dict[str, _Answer]:
    """Each token's answer. Raises the first error after all were asked."""
    listed = list(tokens)
    if len(listed) == 1:
        return {listed[0]: ask(listed[0])}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(listed, pool.map(ask, listed), strict=True))


def decided(session: Session, path: tuple[str | int, ...]) -> list[Claim]:
    """The newest decision to publish of each batch that is not marked done, the oldest batch first."""
    found = {claim.id[2]: claim for claim in session.decisions.claims(path) if claim.decision is Decision.COMMIT}
    return [found[batch] for batch in sorted(found)]


def is_done(session: Session, unit: Unit) -> bool:
    """Whether all of a batch is published, and marked so."""
    return session.decisions.read((*unit.batch_path, 0)).done


def lost(session: Session, claim: Claim) -> list[Mapping[str, Any]]:
    """The parts of a decision that are known to have ended before they could be published."""
    known = session.decisions.read(("#lost", *claim.id)).claim
    return [] if known is None else [part for part in claim.data["parts"] if part["token"] in known.data["tokens"]]


def finish(session: Session, claim: Claim) -> None:
    """Commit every token of a decision. Raises `BatchInDoubt` if some are aborted, whatever the decision says."""
    dead = lost(session, claim)
    if not dead:
        parts = {part["token"]: part for part in claim.data["parts"]}
        outcomes = ask_all(session.bridge.commit, parts)
        dead = [parts[token] for token, outcome in outcomes.items() if outcome is not Outcome.COMMITTED]
        if dead:
            # From here on it is known of each part what became of it, so that the lost ones may be written again.
            tokens = [part["token"] for part in dead]
            session.decisions.claim(("#lost", *claim.id), Decision.COMMIT, {"tokens": tokens})
    if dead:
        raise in_doubt(session, claim, dead)


def in_doubt(session: Session, claim: Claim, dead: list[Mapping[str, Any]], more: str = "") -> BatchInDoubt:
    query, sink, batch, _ = claim.id
    rows = sum(part["rows"] for part in dead)
    partitions = ", ".join(str(part["partition"]) for part in dead)
    topics = sorted({topic for part in dead for topic in part.get("topics", ())})
    shown = ", ".join(topics[:_TOPICS_SHOWN]) + (", …" if len(topics) > _TOPICS_SHOWN else "")
    return BatchInDoubt(
        f"batch {batch} of {query} at {sink} was decided, and then {len(dead)} of its {len(claim.data['parts'])}"
        f" transactions ended before they were committed: {rows} rows of task partitions {partitions} are not"
        f" published (topics: {shown}), the others are. The broker ended them because nobody committed them in time,"
        f" or an administrator did. {more}"
        "Restart the query: task partitions that come again with the same rows are written again. If they do not,"
        f" publish those rows in another way, then: {_recover(session.options, query)} --skip {batch}"
    )


def other_rows(session: Session, unit: Unit, published: int, now: int) -> BatchInDoubt:
    return BatchInDoubt(
        f"{unit} is published with {published} rows, and comes again with {now} rows, or with other ones. Nothing of"
        " them was published. If the checkpoint has lost its plan of this batch (a backup was restored, the file"
        f" offsets/{unit.batch} is gone), Spark has planned the batch anew: compare its rows with the topic, and"
        " publish in another way those that are missing. Then:"
        f" {_recover(session.options, unit.query)} --skip {unit.batch}, and restart the query."
        " If the query makes other rows from the same input by itself (uuid(), rand()): with the"
        " option nondeterministic=true only the number of rows is compared"
    )


# --- is this the log of this query? -----------------------------------------------------------------------------------


def check_log(session: Session, options: SinkOptions, unit: Unit) -> None:
    """Raise `EvidenceLost` if the decision log knows nothing of a query that has written before.

    The log was deleted then, or options that are part of its name have changed: with an empty log, batches that are
    published would be published again.
    """
    if unit.query.startswith(NAMELESS) or knows(session, unit.path):
        return
    first = options.version or 0
    if unit.batch > first and not unit.job:
        raise EvidenceLost(
            f"{unit} comes, and its decision log ({options.application(unit.query)}) knows of no batch before it."
            " Nothing was published. If transactionalIdPrefix, decisionLog or the broker has changed, change it back."
            " If the log was deleted, look in the topic which batch is the last one there; if another sink has"
            f" published the batches before this one, it is batch {unit.batch - 1}. Then name that batch:"
            f" {_recover(options, unit.query)} --skip BATCH"
        )
    leased = {claim.id[-2:] for claim in session.decisions.claims(("#slots", *unit.path))}
    begins = writer_ids(options, unit.path)
    with suppress(AccessDenied):
        for found in session.bridge.admin.transactions(begins):
            run, _, slot = found.transactional_id.removeprefix(begins).partition(".")
            slot, _, _ = slot.partition(".")
            if run.isdigit() and slot.isdigit() and (int(run), int(slot)) not in leased:
                raise EvidenceLost(
                    f"{unit} has open transactions of an earlier run ({found.transaction}), which its decision log does"
                    " not know: the log was deleted. Nothing was published now. What those transactions hold may have"
                    " been decided, and a part of it published: look in the topic. If all of the batch is there, or"
                    f" you have published the rest: {_recover(options, unit.query)} --skip {unit.batch}. If nothing is"
                    f" there: {_recover(options, unit.query)} --clear, which aborts them. Then restart the query"
                )


def knows(session: Session, path: tuple[str, str]) -> bool:
    """Return whether the log has a decided batch of this query, at whichever of its sinks."""
    query, _ = path
    return (
        session.decisions.read(path).done_up_to is not None
        or bool(session.decisions.claims(("#results", query)))
        or bool(decided(session, (query,)))
    )


def _recover(options: SinkOptions, query: str) -> str:
    """The command that finishes a query, without what may be a secret."""
    url, has_more, _ = options.url.partition("?")
    words = ["txnbridge", "spark", "recover", "--url", f"{url}?…" if has_more else url, "--query", query]
    defaults = SinkOptions(options.url)
    if options.sink != defaults.sink:
        words += ["--sink", options.sink]
    if options.prefix != defaults.prefix:
        words += ["--prefix", options.prefix]
    if options.log or options.log_place:
        words += ["--decision-log", options.log or "…"]
    for backend, settings in options.settings:
        for name, _ in settings:
            words += ["--option", f"{backend}.{name}=…"]
    return shlex.join(words)


def finish_decided(session: Session, path: tuple[str, str]) -> None:
    """Finish every batch of a query's sink that is decided and not marked done; one in doubt waits for its driver."""
    for claim in decided(session, path):
        with suppress(BatchInDoubt):
            finish(session, claim)


def mark_done(session: Session, path: tuple[str, str], batch: int, data: Mapping[str, Any]) -> None:
    """All of a batch is published: say so, once and for all."""
    decisions = session.decisions
    if not path[0].startswith(NAMELESS):  # such a job never comes again
        summary = {name: data[name] for name in ("rows", "fingerprint", "run")}
        # What was in the last batch is kept behind its mark, so that a repetition with other rows is noticed.
        with suppress(InvalidState):  # a later batch is done, too
            decisions.claim(("#results", *path, batch), Decision.COMMIT, summary)
    decisions.done(path, batch)
    decisions.done(("#slots", *path), batch)
    if decisions.claims(("#lost", *path, batch)):
        decisions.done(("#lost", *path), batch)
    if batch:
        for kind in ("#results", "#skipped"):
            if decisions.claims((kind, *path)):
                decisions.done((kind, *path), batch - 1)


def shut_out(session: Session, options: SinkOptions, path: tuple[str, str], up_to: int) -> None:
    """Open the ids that tasks of this and older runs hold for a batch that is not done: those begin nothing any more.

    Call it when what these runs decided is finished. A task that opens its id later than this asks for its run then.
    What fails is logged: such a task ends what it has written by itself, or its time-out does.
    """
    held = {(int(claim.id[-2]), int(claim.id[-1])) for claim in session.decisions.claims(("#slots", *path))}
    application = options.application(path[0])

    def open_and_close(id: str) -> None:
        try:
            close_logging_errors(connect(options, application, id))
        except TxnBridgeError as error:
            _log.warning("a task of an older run may still write under %s: %s", id, error)

    ask_all(open_and_close, [writer_id(options, path, run, str(slot)) for run, slot in sorted(held) if run <= up_to])


def sweep(session: Session, options: SinkOptions, path: tuple[str, str], up_to: int) -> list[str]:
    """Abort what this and older runs left open and no decision names; readers would wait for it.

    Call it when no batch of these runs can be decided any more, and what was decided is finished. What fails is
    logged: it ends by its time-out.
    """
    named = {Token.parse(part["token"]).transaction for claim in decided(session, path) for part in claim.data["parts"]}
    begins = writer_ids(options, path)
    ended: list[str] = []
    try:
        for found in session.bridge.admin.transactions(begins):
            run, _, _ = found.transactional_id.removeprefix(begins).partition(".")
            ours = run.isdigit() and int(run) <= up_to
            if ours and found.transaction not in named and _end(session, found.transaction):
                ended.append(found.transaction)
    except TxnBridgeError as error:
        _log.warning("what tasks left open could not be ended, and ends by its time-out: %s", error)
    return ended


def _end(session: Session, transaction: str) -> bool:
    try:
        session.bridge.admin.abort(transaction, reason="left behind by a task")
    except NotFound:
        return False  # it has ended meanwhile
    except BrokerUnavailable:
        raise  # it would be waited for as long with each of the others
    except TxnBridgeError as error:
        _log.warning("%s, left open by a task, could not be ended, and ends by its time-out: %s", transaction, error)
        return False
    return True
