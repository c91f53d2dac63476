"""`Plan`: what a run creates at the broker, and which processes take part."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from txnbridge import Capabilities, Capability, plugins

PARTITIONS = 3

# The number of processes by role. Two owners share one transactional id, so each takes it over from the other.
_ONCE = ("oversleep", "feed", "publish", "watch", "witness")
_TWICE = ("write", "own", "decide", "process", "finish", "sell", "span", "serve")
ROLES = {**dict.fromkeys(_TWICE, 2), **dict.fromkeys(_ONCE, 1), "copy": 3, "share": 3}

# The roles of each workload, which a run may be restricted to. The floor counts the work of the first role.
WORKLOADS = {
    "transactions": ("write", "oversleep", "finish", "watch"),
    "owners": ("own", "finish", "watch"),
    "groups": ("feed", "publish", "copy", "process"),
    "sharing": ("share", "feed", "publish", "finish"),
    "decisions": ("decide",),
    "half-messages": ("sell",),
    "spanning": ("span", "watch", "witness"),
    "services": ("serve", "feed", "publish"),
}
# The promises of spans and services are those of txnbridge, not of the broker, and need a second one, or SQLAlchemy.
BY_DEFAULT = tuple(name for name in WORKLOADS if name not in ("spanning", "services"))

# Settings of `txnbridge.connect` for a broker that a run starts, and for the embedded one. By default Kafka waits 45
# seconds for a member that was killed. The group processes nothing meanwhile, and a run kills the next member sooner.
# Pauses of a run are longer than an embedded lease, and its largest transactions go to the file before their end.
# Check-backs come more often than by default, so that a run need not wait minutes for the outcomes of half messages.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "embedded": {
        "embedded": {"lease_seconds": 3, "redeliver_seconds": 3, "half_check_seconds": 2, "spill_bytes": 1000}
    },
    "kafka": {"kafka": {"session.timeout.ms": "6000", "heartbeat.interval.ms": "300", "half_check_seconds": 2}},
    "pulsar": {"pulsar": {"half_check_seconds": 2}},
}

# The floors: the least numbers of what was tried. A run below a floor is too thin; a minute on a slow broker suffices
# easily. Every run has the first floor, and another one for each of its workloads.
_FLOOR = {"faults": 3}
# Without a full read, as at the end of a run, what was lost is not seen. The killed ones count if the run kills.
_KILLED = {"killed and committed": 3, "killed and aborted": 3}
_TRANSACTIONS = {"committed": 20, "aborted": 5, "read": 100, "full reads": 1, **_KILLED}
_FLOORS: Mapping[str, Mapping[str, int]] = {
    "transactions": {**_TRANSACTIONS, "over topics": 20},
    "owners": {**_TRANSACTIONS, "over topics": 20, "takeovers": 3},
    "groups": {**_TRANSACTIONS, "acks with outputs": 20, "taken again": 5},
    "sharing": {**_TRANSACTIONS, "acks with outputs": 20, "taken again": 5},
    "decisions": {"claims": 20},
    "half-messages": {"published": 5, "dropped": 2, "read": 100, "full reads": 1, "killed undecided": 2},
    "spanning": {**_TRANSACTIONS, "over topics": 20, "spans": 20},
    "services": {"acks with outputs": 20, "taken again": 5, "read": 100, "full reads": 1},
}

# The capability without which a broker cannot have the processes of a role.
NEEDS = {
    "own": Capability.FENCING,
    "oversleep": Capability.DEADLINE,
    "decide": Capability.DECISION_LOG,
    "publish": Capability.IDEMPOTENT_SEND,
    **dict.fromkeys(("copy", "process"), Capability.ATOMIC_ACK),
    "share": Capability.SHARE_MESSAGE,
    "finish": Capability.PREPARE,
    "sell": Capability.HALF_MESSAGES,
    **dict.fromkeys(("span", "witness"), Capability.RESOLVE_ANYWHERE),
    "serve": Capability.PREPARE,
}

# By scheme of the broker's URL: the roles that can use the broker's plain client instead of txnbridge.
RAW_ROLES = {
    "kafka": frozenset({"write", "own", "feed", "copy", "watch"}),
    "pulsar": frozenset({"write"}),
    "rocketmq": frozenset({"sell"}),
}


_SECRET = re.compile("password|secret|token|credential|jaas|pem", re.IGNORECASE)


def without_secrets(url: str) -> str:
    """Return a URL without the values of secret options, except those that only name a variable or a file."""
    declared = {name for each in plugins.backends() for name, option in each.options.items() if option.secret}
    address, mark, options = url.partition("?")

    def shown(option: str) -> str:
        name, value = (unquote(part) for part in option.partition("=")[::2])
        secret = name in declared or _SECRET.search(name)
        return f"{name}=…" if secret and not value.startswith(("env:", "file:")) else option

    return address + mark + "&".join(map(shown, options.split("&")))


def floor_of(workloads: Collection[str] = BY_DEFAULT, kills: bool = True) -> dict[str, int]:
    """Return the least counts that a run with these workloads must reach, by name, such as 20 for "committed".

    A run that reaches less has proven too little. Without `kills`, counts of killed processes are left out.
    """
    floors = (*map(_FLOORS.__getitem__, workloads), _FLOOR)
    every = {name: least for floor in floors for name, least in floor.items()}
    return {name: least for name, least in every.items() if kills or not name.startswith("killed")}


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
    workloads: Sequence[str] = BY_DEFAULT
    raw: bool = False  # whether processes use the broker's plain client instead of txnbridge
    second: str = ""  # the URL of the other broker of spans, if it is none of the run's own
    # The address of the gRPC proxy through which RocketMQ's official client reads, if there is one.
    grpc: str = ""
    version: str = ""  # the broker's version and number of nodes, if they are known
    # The deadline of calls and transactions: short, so that paused processes resume after it.
    timeout: float = 8.0
    # The time for which prepared transactions wait for a process that finishes them.
    hold: float = 60.0
    # The number of the process that runs the plan. Its child processes end with it.
    run: int = field(default_factory=os.getpid)

    @property
    def stop_timeout(self) -> float:
        """The longest time from SIGTERM to the end of a process: a call and the closing, each with its deadline."""
        return self.timeout * 2 + 10

    @property
    def prefix(self) -> str:
        return f"txnbridge-run-{self.name}"

    def named(self, what: str) -> str:
        """Return the name of a topic, a group or an id of the run: the run's prefix and `what`."""
        return f"{self.prefix}-{what}"

    @property
    def topics(self) -> list[str]:
        """The names of the run's topics except `dead_letters`: for transactions, groups and half messages."""
        return [*(self.named(what) for what in ("left", "right", "source", "target", "processed")), *self.sold]

    @property
    def sold(self) -> list[str]:
        """The topics to which processes of the role "sell" send half messages."""
        return [self.named("sold"), self.named("shipped")]

    @property
    def dead_letters(self) -> str:
        """The topic, with one partition, to which the role "process" sends poison messages."""
        return self.named("dead")

    @property
    def all_topics(self) -> list[str]:
        """The names of the run's topics on its broker."""
        return [*self.topics, self.dead_letters, self.spanned[0]]

    @property
    def spanned(self) -> tuple[str, str]:
        """The topics to which the role "span" sends: the one on the run's broker, and the one on the second broker."""
        return self.named("here"), self.named("there")

    def partitions(self, topic: str) -> int:
        """Return the number of partitions that the run gives a topic."""
        # RocketMQ's official client does not let the sender of a half message choose the queue.
        chosen = topic != self.dead_letters and not (self.raw and topic in self.sold)
        return PARTITIONS if chosen else 1

    def roles(self, capabilities: Capabilities) -> dict[str, int]:
        """Return the number of processes by role, for the workloads' roles that the broker's capabilities allow."""
        wanted = {role for workload in self.workloads for role in WORKLOADS[workload]}
        wanted = {role for role in wanted if role not in NEEDS or capabilities[NEEDS[role]]}
        if self.raw:
            wanted &= RAW_ROLES[urlsplit(self.url).scheme]
        return {role: count for role, count in ROLES.items() if role in wanted}

    def groups(self, roles: Collection[str]) -> list[str]:
        """Return the names of the groups that read the topic "source" in a run with processes of these roles."""
        named = {"copiers": "copy", "processors": "process", "sharers": "share", "servers": "serve", "keepers": "serve"}
        return [self.named(group) for group, role in named.items() if role in roles]

    def sharing(self, group: str, capabilities: Capabilities) -> str:
        """Return how the members of a group share partitions; the role "share" does it by key if the seed is odd."""
        if group != self.named("sharers"):
            return "partition"
        return "key" if self.seed % 2 and capabilities[Capability.SHARE_KEY] else "message"

    @property
    def sales(self) -> Path:
        """The path of the SQLite database in which the role "sell" stores the decision on each half message."""
        return Path(self.folder) / "sales.db"

    @property
    def tokens(self) -> Path:
        """The file of tokens. Each process appends its prepared transactions; the role "finish" reads and ends them."""
        return Path(self.folder) / "tokens.txt"

    def at(self, address: str) -> str:
        """Return `address`, a URL without options, with the options of the plan's URL."""
        _, mark, options = self.url.partition("?")
        return address + mark + options

    @property
    def closing(self) -> Path:
        """The path of a file that tells processes, once it exists, that the run ends.

        Sellers without txnbridge store no more half messages then, and members of groups abort nothing they prepared.
        """
        return Path(self.folder) / "closing"

    def at_second(self) -> Plan:
        """Return a copy of this plan for the second broker, by default a file in the run's folder."""
        url = self.second or f"embedded:{self.folder}/second.db"
        return replace(self, url=url, settings=SETTINGS.get(urlsplit(url).scheme, {}), raw=False)

    def register_plugins(self) -> None:
        """Register the plan's plug-ins in this process. Modules are searched for in the current folder, too."""
        if self.plugins and "" not in sys.path:
            sys.path.insert(0, "")
        for name in self.plugins:
            plugins.register(importlib.import_module(name), name)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        return cls(**json.loads(text))
