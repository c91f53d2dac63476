"""What is published as one: a batch of a query at one of its sinks, and what each task reports of its part."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from txnbridge import TxnBridgeError


class BatchInDoubt(TxnBridgeError):
    """A batch was decided, and part of it can no longer be published: somebody has to look."""


@dataclass(frozen=True)
class Unit:
    """One batch of one query (or named job) at one sink, as one run of that query writes it.

    `attempt`: the number under which it is to be decided, where a run may try the same batch again (`foreachBatch`).
    `job`: it is one version of a job, and a version below one that is done is skipped; a query's batches only go up.
    """

    query: str
    sink: str
    batch: int
    run: str
    attempt: int | None = None
    job: bool = False

    @property
    def path(self) -> tuple[str, str]:
        """The id in the decision log that each run opens, and that batches are numbered under."""
        return self.query, self.sink

    @property
    def batch_path(self) -> tuple[str, str, int]:
        """Its claims are this and a number: the first attempt to decide, the second, …"""
        return self.query, self.sink, self.batch

    def __str__(self) -> str:
        return f"batch {self.batch} of {self.query} at {self.sink}"


@dataclass(frozen=True)
class Written:
    """What one attempt of a task wrote: a prepared transaction, or nothing.

    `attempt` is the number under which it may be decided: earlier ones were given up, and transactions written for
    them are being ended. `settled`: the batch was decided before the task began, so nothing was written. Times are
    milliseconds since 1970.
    """

    unit: Unit
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
        return cls(**fields | {"unit": Unit(**fields["unit"])})
