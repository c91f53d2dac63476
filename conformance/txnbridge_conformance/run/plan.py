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
ROLES = {"write": 2, "own": 2, "oversleep": 1, "decide": 2, "feed": 1, "copy": 3, "finish": 2, "watch": 1, "sell": 2}

# Below this a run is too thin: the least number of each, which a minute on a slow broker reaches easily.
FLOOR = {"committed": 20, "aborted": 5, "faults": 3, "read": 100}


@dataclass(frozen=True)
class Plan:
    """The parameters of one run against one broker. All topics and ids of the run begin with `prefix`."""

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
        """The names of the run's topics: two for transactions, the copiers' input and output, one for half messages."""
        return [self.topic(what) for what in ("left", "right", "source", "target", "sold")]

    @property
    def group(self) -> str:
        return f"{self.prefix}-copiers"

    @property
    def sellers(self) -> str:
        """The name of the half-message group to which all processes of the role "sell" belong."""
        return f"{self.prefix}-sellers"

    @property
    def sales(self) -> Path:
        """The path of the SQLite database in which the role "sell" stores the decision on each half message."""
        return Path(self.folder) / "sales.db"

    @property
    def owner(self) -> str:
        return f"{self.prefix}-owner"

    @property
    def tokens(self) -> Path:
        """The file of tokens. Each process appends its prepared transactions; the role "finish" reads and ends them."""
        return Path(self.folder) / "tokens.txt"

    def at(self, address: str) -> str:
        """Return `address`, a URL without options, with the options of the plan's URL."""
        _, mark, options = self.url.partition("?")
        return address + mark + options

    def through(self, url: str) -> Plan:
        """Return a copy of this plan with another broker URL, such as the URL of a proxy."""
        return replace(self, url=url)

    def register_plugins(self) -> None:
        """Register the plan's plug-ins in this process. Raise `ImportError` for a module that does not exist."""
        for name in self.plugins:
            plugins.register(importlib.import_module(name), name)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        return cls(**json.loads(text))
