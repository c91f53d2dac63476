"""Ends transactions that a query's runs leave open: commits the decided ones first, then aborts the undecided ones."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from typing import Any, TypeVar

from pyspark_txnbridge._kept_bridges import Claim, Opening, SinkSession, close_logging_errors, connect
from pyspark_txnbridge._write.batch_identity import BatchId, BatchInDoubt, place
from pyspark_txnbridge._write.sink_options import NAMELESS, SinkOptions
from txnbridge import (
    AccessDenied,
    BrokerUnavailable,
    Decision,
    EvidenceLost,
    InvalidOption,
    InvalidState,
    NotFound,
    NotSupported,
    Outcome,
    Token,
    TxnBridgeError,
)

_log = logging.getLogger("txnbridge.spark")

# The number of tokens that are committed or asked about at once; most of the time is waiting for the broker.
_PARALLEL_REQUESTS = 8
# The most topics that an error names; a batch with a column of topics may have thousands.
_MAX_TOPICS_SHOWN = 5

_Asked = TypeVar("_Asked")
_Result = TypeVar("_Result")


def writer_ids(options: SinkOptions, path: tuple[str, str]) -> str:
    """Return the common prefix of the transactional ids of all runs of a query at a sink."""
    return ".".join((options.prefix, *path, ""))


def writer_id(options: SinkOptions, path: tuple[str, str], number: int, slot: str) -> str:
    return f"{writer_ids(options, path)}{number}.{slot}"


def ask_all(ask: Callable[[_Asked], _Result], tokens: Iterable[_Asked]) -> dict[_Asked, _Result]:
    """Call `ask` for each token in parallel, and return the results by token. An error leaves out calls not begun."""
    listed = list(tokens)
    if len(listed) == 1:
        return {listed[0]: ask(listed[0])}
    with ThreadPoolExecutor(_PARALLEL_REQUESTS) as pool:
        return dict(zip(listed, pool.map(ask, listed), strict=True))


def unfinished(session: SinkSession, path: tuple[str | int, ...]) -> list[Claim]:
    """Return the newest decision to commit (a claim) of each batch that is not marked done, in the order of batches."""
    newest = {claim.id[2]: claim for claim in session.decisions.claims(path) if claim.decision is Decision.COMMIT}
    return [newest[batch] for batch in sorted(newest)]


def is_done(session: SinkSession, identity: BatchId) -> bool:
    """Return whether a batch is published and marked done."""
    return session.decisions.read((*identity.batch_path, 0)).done


def lost_parts(session: SinkSession, claim: Claim) -> list[Mapping[str, Any]]:
    """Return a decided batch's transactions that the log records as lost: aborted before their commit."""
    known = session.decisions.read(("#lost", *claim.id)).claim
    return [] if known is None else [part for part in claim.data["parts"] if part["token"] in known.data["tokens"]]


def finish(session: SinkSession, claim: Claim) -> None:
    """Commit every transaction of a decided batch. Raise `BatchInDoubt` if some of them were aborted before.

    Raise it also if the broker no longer knows the outcome of some, which it may have committed long ago.
    """
    dead = lost_parts(session, claim)
    if not dead:
        parts = {part["token"]: part for part in claim.data["parts"]}

        def commit(tokens: tuple[str, ...]) -> dict[str, Outcome]:
            return {token: _commit(session, token) for token in tokens}

        # RocketMQ publishes a transaction's messages when it is committed: those of one task are committed in order.
        by_task = groupby(parts, lambda token: parts[token]["partition"])
        answers = ask_all(commit, [tuple(tokens) for _, tokens in by_task]).values()
        dead = [parts[token] for each in answers for token, found in each.items() if found is not Outcome.COMMITTED]
        if any(Outcome.UNKNOWN in each.values() for each in answers):
            raise in_doubt(session, claim, dead, is_known=False)
        if dead:
            # All outcomes are known now. The log stores the tokens of aborted parts, which may be written again.
            tokens = [part["token"] for part in dead]
            session.decisions.claim(("#lost", *claim.id), Decision.COMMIT, {"tokens": tokens})
    if dead:
        raise in_doubt(session, claim, dead)


def _commit(session: SinkSession, token: str) -> Outcome:
    try:
        return session.bridge.commit(token)
    except EvidenceLost as error:
        _log.warning("the outcome of a transaction of a decided batch cannot be known any more: %s", error)
        return Outcome.UNKNOWN


def in_doubt(
    session: SinkSession, claim: Claim, dead: list[Mapping[str, Any]], more: str = "", is_known: bool = True
) -> BatchInDoubt:
    query, sink, batch, _ = claim.id
    rows = sum(part["rows"] for part in dead)
    places = ", ".join(place(part["partition"]) for part in dead)
    topics = sorted({topic for part in dead for topic in part.get("topics", ())})
    shown = ", ".join(topics[:_MAX_TOPICS_SHOWN]) + (", …" if len(topics) > _MAX_TOPICS_SHOWN else "")
    what = (
        f"ended before they were committed: {rows} rows of {places} are not published (topics: {shown}), the others"
        f" are. The broker ended them because nobody committed them in time, or an administrator did. {more}"
        "Restart the query: task partitions that come again with the same rows are written again. If they do not,"
        " publish those rows in another way, then:"
        if is_known
        else f"were aborted, or have an outcome that the broker no longer knows: {rows} rows of {places} are published"
        f" or not (topics: {shown}). Compare them with the topics, publish in another way those that are missing, then:"
    )
    return BatchInDoubt(
        f"batch {batch} of {query} at {sink} was decided, and then {len(dead)} of its {len(claim.data['parts'])}"
        f" transactions {what} {recover_command(session.options, query)} --skip {batch}"
    )


def other_rows(session: SinkSession, identity: BatchId, published: int, now: int) -> BatchInDoubt:
    of_checkpoint = identity.batch - (session.options.version or 0)
    return BatchInDoubt(
        f"{identity} is published with {published} rows, and comes again with {now} rows, or with others. Nothing of"
        " them was published. If the checkpoint has lost its plan of this batch (a backup was restored, the file"
        f" offsets/{of_checkpoint} is gone), Spark has planned the batch again: compare its rows with the topic, and"
        " publish in another way those that are missing. Then:"
        f" {recover_command(session.options, identity.query)} --skip {identity.batch}, and restart the query."
        " If the query makes other rows from the same input by itself (uuid(), rand()): with the"
        " option nondeterministic=true only the number of rows is compared"
    )


# --- is this the log of this query? -----------------------------------------------------------------------------------


def check_log(session: SinkSession, identity: BatchId) -> None:
    """Raise `EvidenceLost` if the decision log has no records of a query that has written before.

    Either the log was deleted, or options that are part of the log's name have changed. With an empty log, published
    batches would be published again.
    """
    if identity.query.startswith(NAMELESS) or has_history(session, identity.path):
        return
    options = session.options
    first = options.version or 0
    if identity.attempt is not None and identity.batch > first:
        # A function of foreachBatch often leaves out batches without rows, also the first ones.
        _log.warning(
            "%s is the first one that its decision log (%s) knows. If an earlier batch was published, the log was"
            " deleted, or an option that is part of its name has changed: this batch may then be published twice",
            *(identity, options.application(identity.query)),
        )
    elif identity.batch > first and not identity.job:
        raise EvidenceLost(
            f"{identity} comes, and its decision log ({options.application(identity.query)}) knows of no batch before."
            " Nothing was published. If transactionalIdPrefix, decisionLog or the broker has changed, change it back."
            " If the log was deleted, look in the topic which batch is the last one there; if another sink has"
            f" published the batches before this one, it is batch {identity.batch - 1}. Then name that batch:"
            f" {recover_command(options, identity.query)} --skip BATCH"
        )
    begins = writer_ids(options, identity.path)
    with suppress(AccessDenied, NotSupported):
        listed = session.bridge.admin.transactions(begins)
        # The log is read after the list, because each task leases its slot before it begins a transaction.
        leased = {claim.id[-2:] for claim in session.decisions.claims(("#slots", *identity.path))}
        for left in listed:
            run, slot, *_ = f"{left.transactional_id.removeprefix(begins)}.".split(".")
            if run.isdigit() and slot.isdigit() and (int(run), int(slot)) not in leased:
                raise EvidenceLost(
                    f"{identity} has open transactions of an earlier run ({left.transaction}), which its decision log"
                    " does not know: the log was deleted. Nothing was published now. The batch may be decided and"
                    " partly published: check the topic. If all of it is there, or you have published the rest, run:"
                    f" {recover_command(options, identity.query)} --skip {identity.batch}. If nothing is there, abort"
                    f" them: {recover_command(options, identity.query)} --clear. Then restart the query"
                )


def check_number(session: SinkSession, identity: BatchId) -> None:
    """Raise `InvalidOption` if a stream with txnAppId numbers its batches in another way than before.

    Spark repeats a checkpoint's last batch. Under another number it would be published twice (hazard H127).
    """
    options = session.options
    if options.app_id is None or identity.job:
        return
    first, known = options.version or 0, first_number(session, identity)
    if known is not None and known != first:
        raise InvalidOption(
            f"{identity}: this checkpoint numbers its batches from txnVersion={known}, and now from {first}. Spark may"
            " repeat its last batch, which would be published again under another number. Nothing was published. Set"
            f" txnVersion={known} again; only a new checkpoint needs another number"
        )
    decided = [claim.id[2] for claim in unfinished(session, identity.path)]
    done = session.decisions.read(identity.path).done_up_to
    last = max(decided if done is None else [done, *decided], default=None)
    # A function of foreachBatch may leave out batches, such as those without rows.
    if identity.attempt is None and last is not None and identity.batch > last + 1:
        raise InvalidOption(
            f"{identity} is not the next one after batch {last}. Nothing was published. A new checkpoint under the same"
            f" txnAppId needs txnVersion={last + 1}. If another sink has published the batches between, give this one"
            " another txnAppId"
        )


def first_number(session: SinkSession, identity: BatchId) -> int | None:
    """Return the number of the first batch of a stream's checkpoint; None if the checkpoint has decided none yet."""
    if not identity.checkpoint:
        return None
    claim = session.decisions.read(("#numbers", *identity.path, identity.checkpoint)).claim
    return None if claim is None else int(claim.data["first"])


def record_first_number(session: SinkSession, identity: BatchId, opening: Opening) -> None:
    """Record the option txnVersion as the number of a checkpoint's first batch, before its first decision.

    By `opening` this run of the query owns its id in the decision log. A repetition records nothing.
    """
    if session.options.app_id is not None and identity.checkpoint and first_number(session, identity) is None:
        first = {"first": session.options.version or 0}
        id = ("#numbers", *identity.path, identity.checkpoint)
        session.decisions.claim(id, Decision.COMMIT, first, opening=opening)


def has_history(session: SinkSession, path: tuple[str, str]) -> bool:
    """Return whether the log has a decided batch of this query at any of its sinks."""
    query, _ = path
    return (
        session.decisions.read(path).done_up_to is not None
        or bool(session.decisions.claims(("#results", query)))
        or bool(unfinished(session, (query,)))
    )


def recover_command(options: SinkOptions, query: str) -> str:
    """Return the command line of `txnbridge spark recover` for a query, without values that may be secret."""
    url, has_more, _ = options.url.partition("?")
    words = ["txnbridge", "spark", "recover", "--url", f"{url}?…" if has_more else url, "--query", query]
    defaults = SinkOptions(options.url)
    if options.sink != defaults.sink:
        words += ["--sink", options.sink]
    if options.prefix != defaults.prefix:
        words += ["--prefix", options.prefix]
    if options.log or options.log_url:
        words += ["--decision-log", options.log or "…"]
    given = [f"--option={backend}.{name}=…" for backend, settings in options.settings for name, _ in settings]
    return shlex.join(words + given)


def finish_decided(session: SinkSession, path: tuple[str, str]) -> None:
    """Commit each batch of a query's sink that was decided to be committed and is not marked done.

    `path` is the name of the query and of its sink. A batch in doubt is left to its driver.
    """
    for claim in unfinished(session, path):
        with suppress(BatchInDoubt):
            finish(session, claim)


def mark_done(session: SinkSession, path: tuple[str, str], batch: int, data: Mapping[str, Any]) -> None:
    """Record that every transaction of a batch is published. `data` is that of the decision (claim) to commit it."""
    decisions = session.decisions
    if not path[0].startswith(NAMELESS):  # a nameless job is never repeated
        summary = {name: value for name, value in data.items() if name != "parts"}
        # The totals of the last batch stay in the log, so that a repetition with other rows is noticed.
        with suppress(InvalidState):  # a later batch is marked done already
            decisions.claim(("#results", *path, batch), Decision.COMMIT, summary)
    decisions.done(path, batch)
    decisions.done(("#slots", *path), batch)
    if decisions.claims(("#lost", *path, batch)):
        decisions.done(("#lost", *path), batch)
    if batch:
        for kind in ("#results", "#skipped"):
            if decisions.claims((kind, *path)):
                decisions.done((kind, *path), batch - 1)


def fence_older(session: SinkSession, path: tuple[str, str], up_to: int) -> None:
    """Fence the tasks of all runs up to number `up_to`: open the transactional ids of their unfinished batches.

    Call this when the decided batches of these runs are committed. A task that opens its id later finds that its run
    was replaced. Errors are logged: a task that was not fenced aborts its transaction itself, or the time-out ends the
    transaction.
    """
    held = {(int(claim.id[-2]), int(claim.id[-1])) for claim in session.decisions.claims(("#slots", *path))}
    options, application = session.options, session.options.application(path[0])

    def open_and_close(id: str) -> None:
        try:
            close_logging_errors(connect(options, application, id))
        except BrokerUnavailable:
            raise  # each further id would wait for the broker until its deadline, too
        except TxnBridgeError as error:
            _log.warning("a task of an older run may still write under %s: %s", id, error)

    try:
        ask_all(open_and_close, [writer_id(options, path, run, str(slot)) for run, slot in held if run <= up_to])
    except BrokerUnavailable as error:
        _log.warning("tasks of older runs may still write: %s", error)


def abort_open(session: SinkSession, path: tuple[str, str], up_to: int) -> list[str]:
    """Abort the open transactions of all runs up to number `up_to`, but not of decided batches; return their ids.

    Readers would wait for these transactions. Call this when no batch of these runs can be decided any more, and the
    decided ones are committed. Errors are logged: the time-out ends a transaction that could not be aborted.
    """
    tokens = (part["token"] for claim in unfinished(session, path) for part in claim.data["parts"])
    decided = {Token.parse(token).transaction for token in tokens}
    begins = writer_ids(session.options, path)
    ended: list[str] = []
    try:
        for left in session.bridge.admin.transactions(begins):
            run, _, _ = left.transactional_id.removeprefix(begins).partition(".")
            is_ours = run.isdigit() and int(run) <= up_to and left.transaction not in decided
            if is_ours and _end(session, left.transaction):
                ended.append(left.transaction)
    except TxnBridgeError as error:
        _log.warning("open transactions of tasks could not be aborted, and end by their time-out: %s", error)
    return ended


def _end(session: SinkSession, transaction: str) -> bool:
    try:
        session.bridge.admin.abort(transaction, reason="left behind by a task")
    except NotFound:
        return False  # the transaction has ended meanwhile
    except BrokerUnavailable:
        raise  # each further transaction would wait for the broker until its deadline, too
    except TxnBridgeError as error:
        _log.warning("%s, left open by a task, could not be ended, and ends by its time-out: %s", transaction, error)
        return False
    return True
