"""The interface of txnbridge for programs on asyncio or Trio: the same names, with `await` and `async with`.

    async with aio.connect("embedded:orders.db", transactional_id="billing") as bridge:
        async with bridge.transaction() as txn:    # commits at the end of the block, aborts on an exception
            await txn.send("orders", b"...", key="42")
            await txn.send("audit", b"...")

All rules are those of the synchronous classes, whose methods run in worker threads. This needs the package anyio.
"""

try:
    import anyio as _anyio  # noqa: F401
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(
        "txnbridge.aio needs anyio: in a clone of txnbridge, pip install -e '.[aio]'", name="anyio"
    ) from _error

from txnbridge.aio._bridge import Admin, Bridge, Publisher, connect
from txnbridge.aio._consumer import Consumer
from txnbridge.aio._half_messages import HalfMessages, HalfTransaction
from txnbridge.aio._processor import Processor
from txnbridge.aio._services import Relay, Resolver
from txnbridge.aio._span import Span, spanning
from txnbridge.aio._transaction import Transaction

__all__ = [
    "Admin",
    "Bridge",
    "Consumer",
    "HalfMessages",
    "HalfTransaction",
    "Processor",
    "Publisher",
    "Relay",
    "Resolver",
    "Span",
    "Transaction",
    "connect",
    "spanning",
]
