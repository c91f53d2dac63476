"""txnbridge: one transactional interface over message brokers.

    with txnbridge.connect("embedded:orders.db", transactional_id="billing") as bridge:
        with bridge.transaction() as txn:          # commits at the end of the block, aborts on an exception
            txn.send("orders", b"...", key="42")
            txn.send("audit", b"...")

A bridge is one open connection to one broker. A transaction may be prepared instead of committed: it is then durable
and invisible, and any process that has its token ends it, or asks for its outcome. Every public name is listed here.
"""

import typing as _typing

from txnbridge import codecs
from txnbridge._admin import Admin
from txnbridge._base.events import Event, EventLogger, JsonLinesRecorder
from txnbridge._base.messages import Batch, Headers, Message, MessageColumns, Position
from txnbridge._base.plugins import hookimpl, plugins
from txnbridge._base.token import Decision, Outcome, State, Status, Token, TokenState
from txnbridge._base.topic import Topic
from txnbridge._bridge import Bridge, connect
from txnbridge._half.half_messages import HalfMessages, HalfTransaction
from txnbridge._half.resolver import Resolver
from txnbridge._half.span import Span, spanning
from txnbridge._process.processor import Processor
from txnbridge._read.consumer import Consumer
from txnbridge._write.publisher import Publisher
from txnbridge._write.transaction import Transaction
from txnbridge.capabilities import Capabilities, Capability, Level, Limits, Support
from txnbridge.errors import (
    Abort,
    AccessDenied,
    BackendMissing,
    BrokerUnavailable,
    Conflict,
    DeadlineExceeded,
    DeliveryFailed,
    EvidenceLost,
    Fenced,
    InvalidOption,
    InvalidState,
    InvalidToken,
    NotFound,
    NotSupported,
    OutcomeUnknown,
    Poison,
    PositionLost,
    StorageFailed,
    TransactionAborted,
    TransactionTimedOut,
    TxnBridgeError,
    UsageError,
)
from txnbridge.spi import GroupInfo, Half, OpenTransaction, TopicInfo

if _typing.TYPE_CHECKING:
    from txnbridge._app import App, Outgoing, Router
    from txnbridge._decisions.decisions import Claim, Decisions

__version__ = "0.1.0"

__all__ = [
    "Abort",
    "AccessDenied",
    "Admin",
    "App",
    "BackendMissing",
    "Batch",
    "Bridge",
    "BrokerUnavailable",
    "Capabilities",
    "Capability",
    "Claim",
    "Conflict",
    "Consumer",
    "DeadlineExceeded",
    "Decision",
    "Decisions",
    "DeliveryFailed",
    "Event",
    "EventLogger",
    "EvidenceLost",
    "Fenced",
    "GroupInfo",
    "Half",
    "HalfMessages",
    "HalfTransaction",
    "Headers",
    "InvalidOption",
    "InvalidState",
    "InvalidToken",
    "JsonLinesRecorder",
    "Level",
    "Limits",
    "Message",
    "MessageColumns",
    "NotFound",
    "NotSupported",
    "OpenTransaction",
    "Outcome",
    "OutcomeUnknown",
    "Outgoing",
    "Poison",
    "Position",
    "PositionLost",
    "Processor",
    "Publisher",
    "Resolver",
    "Router",
    "Span",
    "State",
    "Status",
    "StorageFailed",
    "Support",
    "Token",
    "TokenState",
    "Topic",
    "TopicInfo",
    "Transaction",
    "TransactionAborted",
    "TransactionTimedOut",
    "TxnBridgeError",
    "UsageError",
    "codecs",
    "connect",
    "hookimpl",
    "plugins",
    "spanning",
]


def __getattr__(name: str) -> _typing.Any:
    """Import the names that few programs need at their first use, so that `import txnbridge` stays fast."""
    if name in ("App", "Outgoing", "Router"):
        from txnbridge import _app

        return getattr(_app, name)
    if name in ("Claim", "Decisions"):
        from txnbridge._decisions import decisions

        return getattr(decisions, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
