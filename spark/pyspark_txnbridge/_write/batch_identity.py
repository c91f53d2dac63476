"""The identity of a batch of a query at one of its sinks, and the report of each of the batch's tasks to the driver."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from txnbridge import TxnBridgeError


class BatchInDoubt(TxnBridgeError):
    """Raised if a batch was decided and some of its transactions can no longer be published. An operator has to act."""


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
        """Return the id that each run of the query opens in the decision log. Batches are numbered under this id."""
        return self.query, self.sink

    @property
    def batch_path(self) -> tuple[str, str, int]:
        """Return the common beginning of the ids of this batch's claims; an attempt's number (0, 1, …) follows."""
        return self.query, self.sink, self.batch

    def __str__(self) -> str:
        return f"batch {self.batch} of {self.query} at {self.sink}"


@dataclass(frozen=True)
class Written:
    """A task's report of one attempt. `token` names the prepared transaction; None if the task has written nothing.

    `attempt` is the number under which the driver may decide the batch. Earlier attempts were given up, and their
    transactions are being ended. `settled` is True if the batch was decided before the task began: the task has then
    written nothing. Times are milliseconds since 1970.
    """

    identity: BatchId
    partition: int
    attempt: int = 0
    token: str | None = None
    topics: list[str] = field(default_factory=list)
    rows: int = 0
    bytes: int = 0
    fingerprint: int = 0
    settled: bool = False
    began_at: int = 0
    prepared_at: int = 0
    expires_at: int | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Written:
        fields = json.loads(text)
        return cls(**fields | {"identity": BatchId(**fields["identity"])})
