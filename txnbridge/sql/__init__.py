"""Databases: decision logs in a table of any database that SQLAlchemy supports."""

from txnbridge.sql.log import SqlLogs

__all__ = ["SqlLogs"]
