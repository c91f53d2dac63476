"""A lasting connection to the coordinator of one transactional id."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from txnbridge.errors import TxnBridgeError
from txnbridge.spi import Deadline
from txnbridge_kafka.client import kafka_python, messages
from txnbridge_kafka.client.connections import PATIENCE, Line
from txnbridge_kafka.client.responses import ENDING, TRANSACTIONAL_ID_NOT_FOUND, Described, NotYetError, check

# Markers are written within milliseconds, where nothing is in their way.
_FIRST_LOOK, _LAST_LOOK = 0.001, 0.05


class Witness:
    """A connection to the coordinator of a transactional id that is never made anew. One thread at a time.

    Who answers on it has lived since it was made. So when it says that a transaction which ended meanwhile is complete,
    its markers are written. One that was killed and has come back says the same, and may have forgotten them.
    """

    def __init__(self, id: str, line: Line, connection: Any, give_back: Callable[[Line], None]) -> None:
        self._id = id
        self._line: Line | None = line  # None once the connection is lost, or given back
        self._connection = connection
        self._give_back = give_back
        self.first: Described | None = None  # what the coordinator said to begin with; None if it does not know the id

    def last(self, deadline: Deadline) -> Described | None:
        """The id's last transaction, once its markers are written; None if nobody is left who could tell."""
        pause = _FIRST_LOOK
        while self._line is not None:
            try:
                self._line.catch_up()
                found = self._line.run(self.ask, min(deadline.left(), PATIENCE))
            except (kafka_python.errors.KafkaError, OSError, TxnBridgeError, NotYetError):
                self._line.close()
                self._line = None
                break
            if found is None or found.state not in ENDING:
                return found
            deadline.check(f"waiting until the coordinator has ended the last transaction of {self._id!r}")
            time.sleep(min(pause, deadline.left()))
            pause = min(pause * 2, _LAST_LOOK)
        return None

    async def ask(self, _: Line) -> Described | None:
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
        line, self._line = self._line, None
        if line is not None:
            self._give_back(line)
