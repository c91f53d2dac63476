"""What brokers are set to, as far as transactions depend on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from txnbridge.errors import AccessDenied
from txnbridge.spi import Deadline
from txnbridge_rocketmq import client as remoting
from txnbridge_rocketmq.client import administration
from txnbridge_rocketmq.client.retry import again, ask
from txnbridge_rocketmq.write.transaction_properties import CLOCKS_DIFFER_SECONDS

# An administrator may change settings at any time; what depends on them is planned for minutes.
_FRESH_SECONDS = 60.0


@dataclass(frozen=True)
class BrokerSettings:
    """The settings of one broker. Times are in seconds; where the broker does not say, its own default."""

    name: str
    told: Mapping[str, str] = field(repr=False)

    def number(self, name: str, default: int) -> int:
        try:
            return int(self.told[name])
        except (KeyError, ValueError):
            return default

    def is_on(self, name: str, default: bool = False) -> bool:
        return self.told.get(name, str(default)).lower() == "true"

    @property
    def transaction_timeout(self) -> float:
        """How old a half is, at least, when the broker first asks about it."""
        return self.number("transactionTimeOut", 6_000) / 1000

    @property
    def check_interval(self) -> float:
        """How often it looks for halves to ask about."""
        return self.number("transactionCheckInterval", 30_000) / 1000

    @property
    def check_most(self) -> int:
        """How often it asks before it discards a half."""
        return self.number("transactionCheckMax", 15)

    @property
    def note_interval(self) -> float:
        """How long it may take to note that a half has ended; one looked at before that is asked about once more."""
        if self.number("transactionOpMsgMaxSize", 4_096) <= 1:
            return 0.0  # the note of a single half is longer than that, and so is written at once
        return self.number("transactionOpBatchInterval", 3_000) / 1000

    @property
    def patience(self) -> float:
        """How long a half may wait for its end before the broker discards it."""
        return self.check_most * self.check_interval

    @property
    def longest(self) -> float:
        """How long a transaction may take, so that its halves are asked about behind it before they are discarded.

        Looks at halves that are too young to be asked about count as well.
        """
        last_asked = self.patience - self.check_interval
        return max(0.0, last_asked - CLOCKS_DIFFER_SECONDS) if last_asked > self.transaction_timeout else 0.0

    @property
    def kept(self) -> float:
        """How long what is stored is kept."""
        return self.number("fileReservedTime", 72) * 3600.0

    @property
    def message_bytes(self) -> int:
        """The largest body."""
        return self.number("maxMessageSize", 4 << 20)

    @property
    def half_topic(self) -> str:
        """Where halves wait: in this store they are never copied, in the other one at each look."""
        in_rocksdb = self.is_on("transRocksDBEnable") and not self.is_on("transWriteOriginTransHalfEnable", True)
        return remoting.ROCKSDB_HALF_TOPIC if in_rocksdb else remoting.HALF_TOPIC


class Brokers:
    """The brokers of a cluster. Any thread may call."""

    def __init__(self, client: remoting.Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, BrokerSettings]] = {}

    def names(self, deadline: Deadline) -> list[str]:
        """Those that have a master now, in order."""
        return sorted(again(lambda: self._client.brokers(deadline.left()), "looking for brokers", deadline))

    def settings(self, broker: str, deadline: Deadline, fresh: bool = False) -> BrokerSettings:
        """What a broker is set to; known for a minute unless asked anew. Raises `AccessDenied`."""
        with self._lock:
            at, known = self._known.get(broker, (0.0, None))
        if known is not None and not fresh and time.monotonic() - at < _FRESH_SECONDS:
            return known
        what = f"asking broker {broker} for its settings"
        told = ask(self._client, broker, administration.broker_settings(), what, deadline)
        found = BrokerSettings(broker, told)
        with self._lock:
            self._known[broker] = time.monotonic(), found
        return found

    def known(self, broker: str, deadline: Deadline) -> BrokerSettings:
        """As `settings`; where this user may not ask, what brokers are set to as they come."""
        try:
            return self.settings(broker, deadline)
        except AccessDenied:
            found = BrokerSettings(broker, {})
            with self._lock:
                self._known[broker] = time.monotonic(), found
            return found
