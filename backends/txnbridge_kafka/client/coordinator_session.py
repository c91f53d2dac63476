"""A lasting connection to the coordinator of one transactional id."""

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

# Markers are written within milliseconds, where nothing is in their way.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05


class CoordinatorSession:
    """A connection to the coordinator of a transactional id that is never made anew. One thread at a time.

    The broker that answers on it has lived since it was made. So when it describes a transaction that ended meanwhile
    as complete, the markers are written. A broker that was killed and has come back describes the same state, and may
    have forgotten the markers (hazard H6).
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
        """Describe the id's last transaction once its markers are written; None if nobody is left who knows."""
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
        """Give the connection back. Safe to repeat."""
        connections, self._connections = self._connections, None
        if connections is not None:
            self._give_back(connections)
