"""`Timing`: the core's durations and limits that tests change; programs always have the defaults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Internal durations (in seconds) and limits of the core, which only tests change. `Connection.timing` has them."""

    # The time for which a closing bridge waits for polls of other threads: twice a poll's default timeout, so most
    # polls end by themselves. Interrupting a poll that waits for messages loses nothing.
    closing_polls: float = 2.0
    # The interval at which a thread that waits for a writer checks for dropped transactions and a closed bridge.
    writer_checks: float = 0.1
    # Each fetched and unacknowledged message takes about 150 bytes of memory. A program with this many of them reads in
    # a group and never acknowledges, by mistake.
    unacked_messages: int = 1_000_000
    # A processor's pass may take this much longer than its transaction's timeout: it also polls and commits.
    pass_slack: float = 5.0
    # After this time without a partition, `until_idle` ends on a broker that does not report the group's lag. It is
    # longer than brokers wait by default for a dead member (Kafka: 45 s), whose partitions may then be assigned to this
    # member.
    without_partition: float = 60.0
    # The interval at which a processor with a pattern of topics looks for topics that have come or gone. Each look may
    # end its membership in the group, and begin another one.
    pattern_look: float = 30.0
    # The time from a half-message transaction's begin to its first check-back. Most local work has ended by then, and
    # messages of a dead process need not wait until the transaction's deadline.
    first_check: float = 6.0
    # The time for which one request for check-backs waits; a stop of a resolver takes effect after it at the latest.
    check_wait: float = 1.0
    # The interval of polls of a consumer whose turn does not come: far shorter than brokers wait for a member's poll.
    idle_poll: float = 1.0
    # The shortest interval between acknowledgements of a processor with a database: each is a broker's transaction.
    database_acks: float = 0.25
    # A writer that has taken a message for a topic within this time takes another one unasked, by a backend's cache.
    topic_taken: float = 1.0
    # The thread for group commit ends after this time without a batch.
    group_idle: float = 5.0
    # The interval of looks for parts of spans whose process died, and the time behind a part's own that is left to its
    # process: the clocks of two machines differ by less, and a decision under way at the end of its time is over.
    sweep_every: float = 5.0
    sweep_margin: float = 5.0

    # --- lanes of half messages ---------------------------------------------------------------------------------------

    # The interval of the signs of life of a lane's holder that has undone halves, and the time without one after which
    # another process opens the lane. A mistaken takeover costs the holder its lane, which it opens again.
    lane_beat: float = 2.0
    lane_takeover: float = 8.0
    # The interval at which a resolver looks at the ends of the other lanes.
    lane_look: float = 2.0
    # The time after which a lane without undone halves is given back: the process that it belonged to may be paused,
    # and learns within this time how its halves have ended.
    lane_free: float = 3600.0
    # The interval at which records of done halves are removed. Undone halves that hold back so many, and four times
    # their own number, are stored again behind newer records: so each is stored again only after many others.
    lane_trim: float = 30.0
    lane_kept: int = 50_000
    # The time after which a process is one without a resolver.
    lane_untended: float = 60.0
    # After so many check-backs a half is parked if its messages could not be stored in their topics.
    half_refusals: int = 3

    # --- the decision log ---------------------------------------------------------------------------------------------

    # The first pause before a failed append is repeated. The pauses grow, so that a failing broker is not overloaded.
    append_pause: float = 0.01
    # After this many records, unneeded ones are dropped from memory. Dropping scans all of them, so it must be rare.
    forget_after: int = 10_000
    # A log that numbers its records is first read from this many records before its end, which takes a second. Mostly
    # one of these records is a snapshot with which the reading can begin.
    near_end: int = 20_000
    # The largest body in bytes that fits into one record beside its other fields; larger ones are divided.
    inline_bytes: int = 880_000
    # A body part is smaller than the largest record by its line of JSON and a margin.
    part_bytes: int = 899_000


TIMING = Timing()
