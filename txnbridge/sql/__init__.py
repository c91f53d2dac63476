"""Decision logs in a table of any SQL database that SQLAlchemy supports."""

from txnbridge.sql.log import SqlLogs

__all__ = ["SqlLogs"]
