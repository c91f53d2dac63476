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
    NotYetError,
    TransactionDescription,
    check,
)

# Markers are written within milliseconds, where nothing is in their way.
_FIRST_LOOK, _LAST_LOOK = 0.001, 0.05


class CoordinatorSession:
    """A connection to the coordinator of a transactional id that is never made anew. One thread at a time.

    Who answers on it has lived since it was made. So when it says that a transaction which ended meanwhile is complete,
    its markers are written. One that was killed and has come back says the same, and may have forgotten them.
    """

    def __init__(
        self, id: str, connections: Connections, connection: Any, give_back: Callable[[Connections], None]
    ) -> None:
        self._id = id
        self._connections: Connections | None = connections  # None once the connection is lost, or given back
        self._connection = connection
        self._give_back = give_back
        self.first_description: TransactionDescription | None = (
            None  # what the coordinator said to begin with; None if it does not know the id
        )

    def last_transaction(self, deadline: Deadline) -> TransactionDescription | None:
        """The id's last transaction, once its markers are written; None if nobody is left who could tell."""
        pause = _FIRST_LOOK
        while self._connections is not None:
            try:
                self._connections.notice_closed()
                found = self._connections.run(self.describe, min(deadline.left(), PATIENCE))
            except (kafka_python.errors.KafkaError, OSError, TxnBridgeError, NotYetError):
                self._connections.close()
                self._connections = None
                break
            if found is None or found.state not in ENDING:
                return found
            deadline.check(f"waiting until the coordinator has ended the last transaction of {self._id!r}")
            time.sleep(min(pause, deadline.left()))
            pause = min(pause * 2, _LAST_LOOK)
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
        """Ask no more. Safe to repeat."""
        connections, self._connections = self._connections, None
        if connections is not None:
            self._give_back(connections)
