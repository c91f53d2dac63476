"""`Timing`: durations, limits and sizes of a bridge, with the reasons for their values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Durations in seconds, limits and sizes. Users cannot set them by options; tests change some of them."""

    # --- writing
    # A presence record serves the transactions that begin within this time. The record states until when any of them
    # can be open, and the cleanup drops the record long after that. Writing a record takes ten milliseconds.
    presence_seconds: float = 300.0
    # A writer writes a new presence record after this many transactions. To find an outcome, a proof topic is read from
    # the last presence record on, so the distance must stay short.
    transactions_per_presence: int = 1000
    # Half of a broker's default entry size: the next owner's first record repeats this one, and adds transactions at
    # risk.
    max_fence_record_bytes: int = 2_500_000
    # A writer that closes right after a commit waits this long until brokers have closed producers on unloaded topics.
    unload_notice_seconds: float = 0.02

    # --- reading
    # Bytes that the inbox may hold; entries that were taken from the inbox may have as much again.
    reader_bytes: int = 32 * 1024 * 1024
    # The most delivery counts that are kept for one partition.
    max_delivery_counts: int = 1000
    # Seconds by which brokers time transactions out late.
    timeout_delay_seconds: float = 5.0
    # Seconds to wait for a REST answer, on which reading does not depend.
    rest_seconds: float = 3.0
    # After a REST timeout a reader sends no request for this long: there would be one for each partition.
    no_rest_seconds: float = 30.0
    # Seconds between two checks why nothing comes from partitions. A check takes two requests for each partition, and a
    # dozen more if an open transaction is found.
    idle_check_seconds: float = 30.0

    # --- cleanup of proof topics
    # Seconds until the first cleanup, so that a short-lived bridge does none, and between two cleanups.
    first_cleanup_seconds: float = 5.0
    cleanup_every_seconds: float = 600.0
    # A token shows its transaction's outcome for this long after the deadline; clocks may differ by much less.
    token_valid_seconds: float = 3600.0

    # --- administration
    # A transaction that is open for longer is reported: no message after it can be read.
    long_open_seconds: float = 60.0
    # A prepared transaction is reported when less than this share of its time is left, while it can still be committed.
    expiry_warning_share: float = 0.25
    # Seconds after which a pending-ack store that is still opening counts as stuck: it reads some thousand records.
    store_opening_seconds: float = 10.0
    # Seconds for the first attempt to list open transactions; then all topics are loaded.
    listing_seconds: float = 3.0
    # Seconds to wait for a coordinator: one that knows a transaction answers in milliseconds.
    coordinator_seconds: float = 3.0
