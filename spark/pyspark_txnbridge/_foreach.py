"""Writing from `foreachBatch`: several sinks in one query."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark_txnbridge import _driver
from pyspark_txnbridge._options import SinkOptions
from pyspark_txnbridge._rows import Columns
from pyspark_txnbridge._unit import Unit, Written
from txnbridge import InvalidOption

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame


def write_exactly_once(
    df: DataFrame, *, batch_id: int, sink: str, query: str | None = None, run: str | None = None, **options: object
) -> None:
    """Publish a frame once, however often Spark runs this batch again. For the function given to `foreachBatch`:

        def publish(df, batch_id):
            df.persist()
            write_exactly_once(df.filter(...), batch_id=batch_id, sink="orders", url=URL, topic="orders")
            write_exactly_once(df.filter(...), batch_id=batch_id, sink="audit", url=URL, topic="audit")
            df.unpersist()

    `sink` names this place in the query; each has a name of its own, and keeps it. The other options are those of
    `format("txnbridge")`; one with a dot in its name goes in as `**{"kafka.linger.ms": 20}`. `query` and `run` are the
    query's id and run id; Spark tells them, but not over Spark Connect.
    """
    given = {name: str(value) for name, value in options.items() if value is not None}
    found = SinkOptions.parse(given | {"sink": sink})
    query = found.app_id or query or _property(df, "sql.streaming.queryId")
    if not query:
        raise InvalidOption(
            "write_exactly_once() does not know which query this is: call it in foreachBatch, or give query= (its id)"
            " or txnAppId= (a name of yours)"
        )
    run = run or _property(df, "spark.jobGroup.id") or str(uuid.uuid4())
    columns = Columns.of(df.schema, found.topic)
    _driver.check_broker(found)
    unit = Unit(query, found.sink, (found.version or 0) + batch_id, run)
    # If a call fails and the function calls again, the first one's late tasks count for nothing.
    unit = replace(unit, attempt=_driver.next_attempt(found, unit))
    frame = df.select(*sorted(columns.names))
    written: list[Written | None] = []
    try:
        for row in frame.mapInArrow(_writing(unit, found, columns), "written string").collect():
            written.append(Written.from_json(row["written"]))
        _driver.commit(found, written, unit)
    except BaseException:
        _driver.abort(found, written, unit)
        raise


def _property(df: DataFrame, name: str) -> str | None:
    try:
        found: str | None = df.sparkSession.sparkContext.getLocalProperty(name)
    except Exception:  # Spark Connect has no SparkContext, and each version says so in another way
        return None
    return found


def _writing(
    unit: Unit, options: SinkOptions, columns: Columns
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def write(batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow as pa
        from pyspark import TaskContext

        from pyspark_txnbridge._task import write_partition

        context = TaskContext.get()
        assert context is not None
        holder = f"task {context.taskAttemptId()} of stage {context.stageId()}"
        written = write_partition(unit, options, columns, batches, context.partitionId(), holder)
        yield pa.RecordBatch.from_pydict({"written": [written.to_json()]})

    return write
