"""The settings of brokers on which transactions depend, such as the timing of check-backs."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from txnbridge.errors import AccessDenied
from txnbridge.spi import Deadline
from txnbridge_rocketmq.client import administration
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.protocol.codes import HALF_TOPIC, ROCKSDB_HALF_TOPIC
from txnbridge_rocketmq.client.protocol.frames import LARGEST_FRAME
from txnbridge_rocketmq.client.retry import retry, retry_call
from txnbridge_rocketmq.settings import RocketMQTiming

# How long settings are cached. An administrator may change them at any time, but no timing here depends on seconds.
_SETTINGS_CACHE_SECONDS = 60.0


@dataclass(frozen=True)
class BrokerConfig:
    """The settings of one broker, with the default for a setting that the broker did not return. Times in seconds."""

    name: str
    values: Mapping[str, str] = field(repr=False)

    def number(self, name: str, default: int) -> int:
        try:
            return int(self.values[name])
        except (KeyError, ValueError):
            return default

    def is_on(self, name: str, default: bool = False) -> bool:
        return self.values.get(name, str(default)).lower() == "true"

    @property
    def transaction_timeout(self) -> float:
        """The age of a half message before which the broker sends no check-back about it."""
        return self.number("transactionTimeOut", 6_000) / 1000

    @property
    def check_interval(self) -> float:
        """The time between two rounds of check-backs."""
        return self.number("transactionCheckInterval", 30_000) / 1000

    @property
    def check_max(self) -> int:
        """The number of check-backs after which the broker discards a half message."""
        return self.number("transactionCheckMax", 15)

    @property
    def op_message_interval(self) -> float:
        """The time until the broker writes the op message of an ended half. Before, it may send more check-backs."""
        if self.number("transactionOpMsgMaxSize", 4_096) <= 1:
            return 0.0  # the op message of one half exceeds this size, so the broker writes each at once
        return self.number("transactionOpBatchInterval", 3_000) / 1000

    @property
    def discarded_after(self) -> float:
        """The time after which the broker discards an open half message."""
        return self.check_max * self.check_interval

    @property
    def longest_transaction(self) -> float:
        """The longest transaction for which the broker still sends a check-back after the transaction's deadline.

        The broker would discard the halves of a longer transaction. It discards a half after `check_max` rounds, and
        also counts rounds in which the half is too young for a check-back (hazard H69).
        """
        last_asked = self.discarded_after - self.check_interval
        return max(0.0, last_asked - RocketMQTiming.clocks_differ) if last_asked > self.transaction_timeout else 0.0

    @property
    def retention(self) -> float:
        """The time for which the broker keeps stored messages."""
        return self.number("fileReservedTime", 72) * 3600.0

    @property
    def message_bytes(self) -> int:
        """The largest message body that the broker takes: with its properties it has to fit into one request."""
        return min(self.number("maxMessageSize", 4 << 20), LARGEST_FRAME - (256 << 10))

    @property
    def half_topic(self) -> str:
        """The broker's topic for half messages; a broker that keeps them in RocksDB has another one."""
        in_rocksdb = self.is_on("transRocksDBEnable") and not self.is_on("transWriteOriginTransHalfEnable", True)
        return ROCKSDB_HALF_TOPIC if in_rocksdb else HALF_TOPIC


class BrokerConfigs:
    """The brokers of a cluster and a cache of their settings. Safe for use by several threads."""

    def __init__(self, client: RemotingClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, BrokerConfig]] = {}

    def names(self, deadline: Deadline) -> list[str]:
        """Return the names of the brokers whose master is up, in order."""
        return sorted(retry(lambda: self._client.brokers(deadline.left()), "looking for brokers", deadline))

    def require_config(self, broker: str, deadline: Deadline, fresh: bool = False) -> BrokerConfig:
        """Return a broker's settings, up to a minute old unless `fresh`. Raise `AccessDenied` for lack of rights."""
        with self._lock:
            at, known = self._known.get(broker, (0.0, None))
        if known is not None and not fresh and time.monotonic() - at < _SETTINGS_CACHE_SECONDS:
            return known
        action = f"asking broker {broker} for its settings"
        values = retry_call(self._client, broker, administration.broker_settings(), action, deadline)
        config = BrokerConfig(broker, values)
        with self._lock:
            self._known[broker] = time.monotonic(), config
        return config

    def config(self, broker: str, deadline: Deadline, fresh: bool = False) -> BrokerConfig:
        """Return a broker's settings, or RocketMQ's defaults if this user may not read settings."""
        try:
            return self.require_config(broker, deadline, fresh)
        except AccessDenied:
            defaults = BrokerConfig(broker, {})
            with self._lock:
                self._known[broker] = time.monotonic(), defaults
            return defaults
