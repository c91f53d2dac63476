"""SQL databases by SQLAlchemy: decision logs in a table, and outboxes, whose rows a relay publishes exactly once."""

try:
    from txnbridge.sql.outbox import Outbox
    from txnbridge.sql.relay import Relay
except ModuleNotFoundError as _error:
    _text = f"txnbridge.sql needs {_error.name}: in a clone of txnbridge, pip install -e '.[sql]'"
    raise ModuleNotFoundError(_text, name=_error.name) from _error

__all__ = ["Outbox", "Relay"]
