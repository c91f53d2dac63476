"""A connection to the coordinator of one transactional id that is never re-established."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from txnbridge.errors import TxnBridgeError
from txnbridge.spi import Deadline
from txnbridge_kafka.client import kafka_python, messages
from txnbridge_kafka.client.connections import PATIENCE, Connections
from txnbridge_kafka.client.responses import (
    ENDING,
    TRANSACTIONAL_ID_NOT_FOUND,
    RetryLaterError,
    TransactionDescription,
    check,
)

# The pauses between requests while the coordinator writes control markers, which mostly takes milliseconds.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05


class CoordinatorSession:
    """A connection to the coordinator of a transactional id that is never re-established. One thread at a time.

    A broker that answers on this connection has run since the connection was made. So if it describes a transaction
    that ended meanwhile as complete, the control markers are written. A broker that was killed and restarted describes
    the same state, and may have forgotten the markers (hazard H6).
    """

    def __init__(
        self, id: str, connections: Connections, connection: Any, give_back: Callable[[Connections], None]
    ) -> None:
        self._id = id
        self._connections: Connections | None = connections  # None once the connection is lost, or given back
        self._connection = connection
        self._give_back = give_back
        # The id's state when the session began; None if the coordinator does not know the id.
        self.first_description: TransactionDescription | None = None

    def last_transaction(self, deadline: Deadline) -> TransactionDescription | None:
        """Wait until the last transaction's control markers are written, and describe the transaction.

        Return None if the connection was lost, or if the coordinator does not know the id.
        """
        pause = _SHORTEST_PAUSE
        while self._connections is not None:
            try:
                self._connections.notice_closed()
                last = self._connections.run(self.describe, min(deadline.left(), PATIENCE))
            except (kafka_python.errors.KafkaError, OSError, TxnBridgeError, RetryLaterError):
                self._connections.close()
                self._connections = None
                break
            if last is None or last.state not in ENDING:
                return last
            deadline.check(f"waiting until the coordinator has ended the last transaction of {self._id!r}")
            time.sleep(min(pause, deadline.left()))
            pause = min(pause * 2, _LONGEST_PAUSE)
        return None

    async def describe(self, _: Connections) -> TransactionDescription | None:
        answer = await self._connection.send_request(
            kafka_python.DescribeTransactionsRequest(transactional_ids=[self._id])
        )
        (each,) = answer.transaction_states
        if each.error_code == TRANSACTIONAL_ID_NOT_FOUND:
            return None
        check(each.error_code, f"describing the transactional id {self._id!r}")
        return messages.described(each)

    def close(self) -> None:
        """Return the connection to its `RequestRunner`. Safe to repeat."""
        connections, self._connections = self._connections, None
        if connections is not None:
            self._give_back(connections)
