"""SQL databases by SQLAlchemy: decision logs in a table, and outboxes, whose rows a relay publishes exactly once."""

from txnbridge.sql.barrier import BarrierResolver, BarrierTransaction
from txnbridge.sql.log import SqlLogs
from txnbridge.sql.outbox import Outbox
from txnbridge.sql.relay import Relay

__all__ = ["BarrierResolver", "BarrierTransaction", "Outbox", "Relay", "SqlLogs"]
