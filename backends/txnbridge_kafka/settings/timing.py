"""The backend's internal durations and sizes, which tests override."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """The backend's internal durations and sizes, which tests override. Durations are in seconds."""

    # The interval of the monitor's checks. One request to each leader is cheap at this interval. Coordinators are asked
    # only about transactions that are open in two checks, which are few: most transactions end within milliseconds.
    monitor_interval: float = 10.0
    # If leaders list very many producers, the interval grows up to this: checks take one per cent of the time.
    monitor_longest_interval: float = 30.0
    # The longest poll for space in the client's buffer. After each poll the writer checks its deadline.
    buffer_poll: float = 0.05
    # How many messages a reader converts at a time. Many more would not fit into the processor's cache.
    converted_at_once: int = 1000
    # One poll takes buffered messages of the client until their values have so many bytes, a quarter of the client's
    # buffer: a poll for 10,000 large messages must not need gigabytes of memory.
    poll_bytes: int = 16 * 2**20
