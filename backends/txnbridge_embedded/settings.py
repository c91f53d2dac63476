"""The settings of one embedded broker, with their defaults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from txnbridge.spi import RawHeaders

DAY = 24 * 3600.0


@dataclass(frozen=True)
class Settings:
    """The settings of one broker; durations are seconds. `backend.OPTIONS` describes each."""

    spill_bytes: int = 8 << 20
    max_message_bytes: int = 16 << 20
    hold_seconds: float = 7 * DAY
    keep_seconds: float = 30 * DAY
    lease_seconds: float = 10.0
    redeliver_seconds: float = 30.0
    half_check_seconds: float = 30.0
    half_checks: int = 15
    # By the profile of another broker: raise an error for a message (value, headers, number of messages before it in
    # the transaction) or for a topic's name that the other broker would refuse.
    refuse: Callable[[bytes | None, RawHeaders, int], None] | None = None
    refuse_name: Callable[[str], None] | None = None
