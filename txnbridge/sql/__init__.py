"""What touches a database: decision logs in a table of any database that SQLAlchemy speaks to."""

from txnbridge.sql.log import SqlLogs

__all__ = ["SqlLogs"]
