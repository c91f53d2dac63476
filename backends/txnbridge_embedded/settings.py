"""The settings of one embedded broker, with their defaults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from txnbridge.spi import Option, RawHeaders

DAY = 24 * 3600.0


@dataclass(frozen=True)
class Timing:
    """The broker's internal durations and sizes, which tests override. Durations are in seconds."""

    # The age up to which a cached topic is used: topics grow rarely, and reading one costs a query.
    topic_age: float = 1.0
    # The interval at which a writer removes messages beyond retention, which costs a query for each partition.
    trim_interval: float = 10.0
    # The most messages that are removed at once, which takes some ten milliseconds.
    removed_rows: int = 10_000
    # The records of a decision log that are deleted at once, in some milliseconds: other writers wait for the lock.
    log_trim_rows: int = 10_000
    # The records of a decision log in memory at once, so that a log of millions needs little memory.
    log_read_rows: int = 500
    # A write-ahead log of this size, far above the size at which it is copied, means that a reader keeps a snapshot.
    long_wal_bytes: int = 256 << 20
    # SQLite's instructions between two checks of the doctor's deadline: some milliseconds.
    check_instructions: int = 100_000


@dataclass(frozen=True)
class Settings:
    """The settings of one broker; durations are seconds."""

    max_message_bytes: int = Option.setting(16 << 20, "the largest message with its key and headers")
    spill_bytes: int = Option.setting(
        8 << 20, "a larger transaction is stored in the file before its end, to save memory"
    )
    hold_seconds: float = Option.setting(
        7 * DAY, "how long a transaction may stay prepared without the argument `hold`"
    )
    keep_seconds: float = Option.setting(30 * DAY, "how long the outcome of a transaction is kept, for `status`")
    lease_seconds: float = Option.setting(
        10.0, "a group member that does not renew its lease in this time loses its partitions"
    )
    redeliver_seconds: float = Option.setting(
        30.0, "with sharing='message': a message whose acknowledgement is not committed by then goes to another member"
    )
    half_check_seconds: float = Option.setting(
        30.0, "how long a resolver may take to answer the check-back of a half message"
    )
    half_checks: int = Option.setting(15, "unanswered check-backs after which a half message is parked")
    timing: Timing = field(default_factory=Timing)
    # From the profile of another broker: raise an error for a message that it would refuse (headers, number of
    # earlier messages in the transaction), and for a topic's name.
    refuse: Callable[[RawHeaders, int], None] | None = None
    refuse_name: Callable[[str], None] | None = None
