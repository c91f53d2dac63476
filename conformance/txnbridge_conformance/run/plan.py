"""`Plan`: what a run creates at the broker, and which processes take part."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from txnbridge import plugins

PARTITIONS = 3

# The number of processes by role. Two owners share one transactional id, so each takes it over from the other.
ROLES = {"write": 2, "own": 2, "feed": 1, "copy": 3, "finish": 2, "watch": 1, "sell": 2}

# Below this a run is too thin: the least number of each, which a minute on a slow broker reaches easily.
FLOOR = {"committed": 20, "aborted": 5, "faults": 3, "read": 100}


@dataclass(frozen=True)
class Plan:
    """One run against one broker. All names that it creates at the broker begin with `prefix`."""

    url: str
    name: str
    seed: int
    seconds: float
    folder: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    plugins: Sequence[str] = ()  # modules that add backends, for those without an entry point
    # The deadline of calls and transactions: short, so that paused processes resume after it.
    timeout: float = 8.0
    # The time for which prepared transactions wait for a process that finishes them.
    hold: float = 60.0

    @property
    def prefix(self) -> str:
        return f"txnbridge-run-{self.name}"

    def topic(self, what: str) -> str:
        return f"{self.prefix}-{what}"

    @property
    def topics(self) -> list[str]:
        """The run's topics: two for transactions, the copiers' source and target, and one for half messages."""
        return [self.topic(what) for what in ("left", "right", "source", "target", "sold")]

    @property
    def group(self) -> str:
        return f"{self.prefix}-copiers"

    @property
    def sellers(self) -> str:
        """The group of the half messages."""
        return f"{self.prefix}-sellers"

    @property
    def sales(self) -> Path:
        """The SQLite database whose commits decide over half messages."""
        return Path(self.folder) / "sales.db"

    @property
    def owner(self) -> str:
        return f"{self.prefix}-owner"

    @property
    def tokens(self) -> Path:
        """The file into which processes write the tokens of prepared transactions, for those that finish them."""
        return Path(self.folder) / "tokens.txt"

    def at(self, address: str) -> str:
        """Return the plan's URL with its options at another address of the broker."""
        _, mark, options = self.url.partition("?")
        return address + mark + options

    def through(self, url: str) -> Plan:
        """Return this plan for a process that reaches the broker at another URL, such as that of a proxy."""
        return replace(self, url=url)

    def register_plugins(self) -> None:
        """Register the plan's plug-ins in this process. Raise `ImportError` if one does not exist."""
        for name in self.plugins:
            plugins.register(importlib.import_module(name), name)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        return cls(**json.loads(text))
