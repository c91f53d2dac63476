"""A connection to a transactional id's coordinator, which proves that control markers are written."""

from __future__ import annotations

import time
from collections.abc import Callable

from txnbridge.errors import TxnBridgeError
from txnbridge.spi import Deadline
from txnbridge_kafka.client import messages, wire
from txnbridge_kafka.client.connection import AttemptError, Connection
from txnbridge_kafka.client.connections import LONGEST_ATTEMPT, Connections
from txnbridge_kafka.client.protocol_types import (
    ENDING,
    TRANSACTIONAL_ID_NOT_FOUND,
    RetryLaterError,
    TransactionDescription,
    check,
)

# The pause between requests, which is doubled each time, while the coordinator writes control markers.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05


class CoordinatorSession:
    """A connection to a transactional id's coordinator that is never re-established. Only one thread at a time uses it.

    A broker that answers on this connection has run since the connection was made. So if a transaction ended since
    then, and the broker says that the transaction is complete, the transaction's control markers are written. A broker
    that was killed and restarted says the same, but may never write the markers (hazard H6).
    """

    def __init__(
        self, id: str, connections: Connections, connection: Connection, give_back: Callable[[Connections], None]
    ) -> None:
        self._id = id
        self._connections: Connections | None = connections  # None after the connection was lost or given back
        self._connection = connection
        self._give_back = give_back
        # The id's description when the connection was made; None if the coordinator did not know the id.
        self.first_description: TransactionDescription | None = None

    def last_transaction(self, deadline: Deadline) -> TransactionDescription | None:
        """Wait until the coordinator has written the last transaction's control markers, and return its description.

        Return None if the connection was lost, or if the coordinator does not know the id.
        """
        pause = _SHORTEST_PAUSE
        while self._connections is not None:
            try:
                self._connections.notice_closed()
                last = self._connections.run(self.describe, min(deadline.left(), LONGEST_ATTEMPT))
            except (AttemptError, TxnBridgeError, RetryLaterError):
                self._connections.close()
                self._connections = None
                break
            if last is None or last.state not in ENDING:
                return last
            deadline.check(f"waiting until the coordinator has ended the last transaction of {self._id!r}")
            time.sleep(min(pause, deadline.left()))
            pause = min(pause * 2, _LONGEST_PAUSE)
        return None

    def describe(self, connections: Connections) -> TransactionDescription | None:
        answer = self._connection.ask(wire.DESCRIBE_TRANSACTIONS(transactional_ids=[self._id]), connections.until)
        (each,) = answer.transaction_states
        if each.error_code == TRANSACTIONAL_ID_NOT_FOUND:
            return None
        check(each.error_code, f"describing the transactional id {self._id!r}")
        return messages.transaction_description(each)

    def close(self) -> None:
        """Give the connection back to the pool of the `RequestRunner`, for other requests. Safe to repeat."""
        connections, self._connections = self._connections, None
        if connections is not None:
            self._give_back(connections)
