"""The inside of bridges, transactions and consumers: tests that need it know it by these functions alone."""

from typing import Any

from txnbridge import Bridge, Transaction
from txnbridge._base.connection import Connection
from txnbridge._decisions.logs import DecisionLogs
from txnbridge._read.open_consumers import Consumers
from txnbridge._write.group_commit import GroupCommit
from txnbridge._write.writers import Writers


def connection_of(bridge: Bridge) -> Connection:
    return bridge._connection


def broker_of(bridge: Bridge) -> Any:
    """Return the backend's broker behind a bridge."""
    return bridge._connection.broker


def consumers_of(bridge: Bridge) -> Consumers:
    return bridge._consumers


def writers_of(bridge: Bridge) -> Writers:
    return bridge._writers


def logs_of(bridge: Bridge) -> DecisionLogs:
    return bridge._logs


def group_commit_of(bridge: Bridge) -> GroupCommit:
    assert bridge._group_commit is not None
    return bridge._group_commit


def writer_of(txn: Transaction) -> Any:
    """Return the backend's writer that has a transaction."""
    return txn._writer


def reader_of(consumer: Any) -> Any:
    """Return the backend's reader behind a consumer."""
    return consumer._reader


def queued(semaphore: Any) -> int:
    """Return how many threads or tasks wait for a place of a fair semaphore."""
    return len(semaphore._waiting)
