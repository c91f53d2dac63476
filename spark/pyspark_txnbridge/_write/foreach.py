"""`write_exactly_once`, which writes from `foreachBatch` to several sinks in one query."""

from __future__ import annotations

import os
import pickle
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from pyspark_txnbridge._write import driver
from pyspark_txnbridge._write.batch_identity import BatchId, Written
from pyspark_txnbridge._write.rows import Columns
from pyspark_txnbridge._write.sink_options import SinkOptions, id_part
from txnbridge import InvalidOption

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame


def write_exactly_once(
    df: DataFrame, *, batch_id: int, sink: str, query: str | None = None, run: str | None = None, **options: object
) -> None:
    """Publish a frame exactly once, however often Spark repeats its batch. Call this in a `foreachBatch` function:

        def publish(df, batch_id):
            df.persist()
            write_exactly_once(df.filter(...), batch_id=batch_id, sink="orders", url=URL, topic="orders")
            write_exactly_once(df.filter(...), batch_id=batch_id, sink="audit", url=URL, topic="audit")
            df.unpersist()

    `sink` names this sink of the query. Each sink has a name of its own and keeps it. The other options are those of
    `format("txnbridge")`; pass an option with a dot in its name as `**{"kafka.linger.ms": 20}`. `query` is the query's
    id and `run` the id of this start of the query. Spark knows both, but not over Spark Connect: give `query` there.

    A function that retries after an error gives each sink the same frame and options. A sink that has already published
    the batch then publishes nothing.
    """
    given = {name: str(value) for name, value in options.items() if value is not None}
    parsed = SinkOptions.parse(given | {"sink": sink})
    query_id = id_part({} if query is None else {"query": str(query)}, "query") or _property(df, _QUERY)
    query = parsed.app_id or query_id
    if not query:
        raise InvalidOption(
            "write_exactly_once() does not know which query this is: call it in foreachBatch, or give query= (its id)"
            " or txnAppId= (a name of yours)"
        )
    columns = Columns.of(df.schema, parsed.topic, parsed.timestamps)
    driver.check_broker(parsed, query)
    number = (parsed.version or 0) + batch_id
    checkpoint = _property(df, _QUERY) or ""
    identity = BatchId(query, parsed.sink, number, run or _run_of(df, query_id), checkpoint=checkpoint)
    call = _Call(identity, parsed, df.select(*sorted(columns.names)))
    if not _is_first(call):
        return
    try:
        _publish(call, columns)
    except BaseException:
        _calls.pop(identity.path, None)
        raise
    call.has_returned = True


def _publish(call: _Call, columns: Columns) -> None:
    # Each call gets a new attempt number, so that late tasks of an earlier, failed call do not count.
    identity = replace(call.identity, attempt=driver.next_attempt(call.options, call.identity))
    written: list[Written | None] = []
    try:
        for row in call.frame.mapInArrow(_writing(identity, call.options, columns), "written binary").collect():
            written.append(pickle.loads(row["written"]))  # of our own task; Spark pickles its reports, too
        driver.commit(call.options, written, identity)
    except BaseException:
        driver.abort(call.options, written, identity)
        raise


@dataclass
class _Call:
    identity: BatchId
    options: SinkOptions
    frame: DataFrame
    has_returned: bool = False


# This process's newest call for each sink of each query; a failed call is removed.
_calls: dict[tuple[str, str], _Call] = {}
_calls_lock = threading.Lock()


def _is_first(call: _Call) -> bool:
    """Return whether a call is the first one for its batch, and has to publish the batch.

    Return False if the call repeats an earlier one that has returned. Raise `InvalidOption` if an earlier call
    published another frame for the batch: then two sinks share a name.
    """
    with _calls_lock:
        earlier = _calls.get(call.identity.path)
        if earlier is None or earlier.identity != call.identity:
            _calls[call.identity.path] = call
            return True
    if earlier.has_returned and call.options == earlier.options and call.frame.sameSemantics(earlier.frame):
        return False
    raise InvalidOption(
        f"{call.identity} was written by another call of this run, with another frame or other options: give each of a"
        " query's sinks a name of its own (sink). A function that retries after an error has to give the same frame and"
        " options. Or let the error end the query: the restarted query writes what is missing"
    )


_QUERY, _GROUP = "sql.streaming.queryId", "spark.jobGroup.id"


def _property(df: DataFrame, name: str) -> str | None:
    try:
        value: str | None = df.sparkSession.sparkContext.getLocalProperty(name)
    except Exception:  # Spark Connect has no SparkContext, and each version raises another error
        return None
    return value


def _run_of(df: DataFrame, query_id: str | None) -> str:
    """Return the id of this start of a query. Raise `InvalidOption` where Spark does not reveal the id.

    Spark Connect reveals no id, but runs each start of a query in a process of its own. So an id of that process is
    returned. Outside a query each call counts as a start.
    """
    if not hasattr(df.sparkSession, "_jsparkSession"):
        return _id_of_process(os.getpid())
    if query_id is not None and (run := _active_run(df, query_id)):
        return run
    if _property(df, _QUERY) is None:
        return str(uuid.uuid4())
    group = _property(df, _GROUP) or ""
    if _RUN.fullmatch(group):  # probably Spark's own group: programs give their groups other names
        return group
    raise InvalidOption(
        "write_exactly_once() does not know which start of the query this is: this Spark does not reveal it, and the"
        " job group was changed. Give run=, a text that differs at each start of the query"
    )


def _active_run(df: DataFrame, query_id: str) -> str | None:
    """Return a query's run id from the list of all sessions' queries: that of foreachBatch's session is empty."""
    try:
        active = df.sparkSession._jsparkSession.sharedState().activeStreamingQueries().values()
        return next((str(each.runId()) for each in active if str(each.id()) == query_id), None)
    except Exception:  # these methods are internal to Spark, so another version may lack them
        return None


_RUN = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@cache
def _id_of_process(pid: int) -> str:
    return str(uuid.uuid4())


# --- in a task -------------------------------------------------------------------------------------------------------


def _writing(
    identity: BatchId, options: SinkOptions, columns: Columns
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def write(batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow as pa

        from pyspark_txnbridge._source import write_in_task

        written = write_in_task(identity, options, columns, batches)
        yield pa.RecordBatch.from_pydict({"written": [pickle.dumps(written)]})

    return write
