"""SQL databases by SQLAlchemy: decision logs in a table, and outboxes, whose rows a relay publishes exactly once."""

from txnbridge.sql.outbox import Outbox
from txnbridge.sql.relay import Relay

__all__ = ["Outbox", "Relay"]
