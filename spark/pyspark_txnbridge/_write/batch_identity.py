"""The identity of a batch of a query at one of its sinks, and the report of each of the batch's tasks to the driver."""

from __future__ import annotations

import builtins
from dataclasses import dataclass, field

from txnbridge import TxnBridgeError


class BatchInDoubt(TxnBridgeError):
    """Raised if some transactions of a decided batch cannot be published any more. An operator has to act."""


@dataclass(frozen=True)
class BatchId:
    """The identity of one batch at one sink: a batch of a streaming query in one of its runs, or that of a batch job.

    `attempt` is set in `foreachBatch`, where one run may write a batch several times: it is the number of the attempt
    that the driver decides. `job` is True for a batch job: `query` is then its name (txnAppId, or a generated one) and
    `batch` its version (txnVersion, or 0). Such a batch is skipped if a later version is published. `checkpoint` is the
    id that Spark keeps in a stream's checkpoint, also if the option txnAppId names the query; empty if Spark hides it.
    """

    query: str
    sink: str
    batch: int
    run: str
    attempt: int | None = None
    job: bool = False
    checkpoint: str = ""

    @property
    def path(self) -> tuple[str, str]:
        """Return the id that each run of the query opens in the decision log; batches are numbered under this id."""
        return self.query, self.sink

    @property
    def batch_path(self) -> tuple[str, str, int]:
        """Return the common beginning of the batch's ids in the decision log; an attempt's number (0, 1, …) follows."""
        return self.query, self.sink, self.batch

    def __str__(self) -> str:
        return f"batch {self.batch} of {self.query} at {self.sink}"


# The task partition that the decision log names for rows of small tasks, which the driver writes together.
SMALL_TASKS = -1


def place(partition: int) -> str:
    """Return the words by which errors and commands name a task's partition, or the partitions of all small tasks."""
    return "small task partitions" if partition == SMALL_TASKS else f"task partition {partition}"


@dataclass(frozen=True)
class Part:
    """A prepared transaction with rows of a task, or of all small tasks. Times are milliseconds since 1970."""

    partition: int
    token: str
    topics: list[str]
    rows: int
    bytes: int
    fingerprint: int
    began_at: int
    prepared_at: int
    expires_at: int | None


@dataclass(frozen=True)
class Written:
    """A task's report of one attempt: the totals of its rows, and the transactions that it has prepared.

    `attempt` is the number under which the driver may decide the batch. Earlier attempts were given up, and their
    transactions are being ended. It is None for a task that did not read the decision log, and so has written nothing.
    `settled` is True if the batch was decided before the task began: the task has then written nothing.
    `travels` holds the rows of a small task, as a stream of Arrow's IPC format, which the driver writes.
    """

    identity: BatchId
    partition: int
    attempt: int | None = None
    rows: int = 0
    bytes: int = 0
    fingerprint: int = 0
    settled: bool = False
    parts: list[Part] = field(default_factory=list)
    travels: builtins.bytes = b""
