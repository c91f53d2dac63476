"""`BatchLogger`, which logs a line for each batch of the program's streaming queries."""

from __future__ import annotations

import logging

from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

_log = logging.getLogger("txnbridge.spark")


class BatchLogger(StreamingQueryListener):
    """A listener that logs each batch on the driver: `spark.streams.addListener(BatchLogger())`.

    The broker's share of a batch's time is in the log of the Python process in which Spark commits the batch.
    """

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 (Spark's name)
        _log.info("query %s (%s): run %s started", event.name or "without a name", event.id, event.runId)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        progress = event.progress
        _log.info(
            "query %s: batch %d published, %d rows; %d ms in all, %d of them to write and to commit",
            progress.name or progress.id,
            progress.batchId,
            progress.numInputRows,
            progress.durationMs.get("triggerExecution", 0),
            progress.durationMs.get("addBatch", 0),
        )

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        if event.exception is None:
            _log.info("query %s: run %s ended", event.id, event.runId)
        else:
            _log.error("query %s: run %s failed: %s", event.id, event.runId, event.exception.splitlines()[0])
