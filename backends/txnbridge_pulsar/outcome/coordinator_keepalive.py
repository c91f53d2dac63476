"""Connects to the transaction coordinators regularly, so that they abort transactions whose timeouts have passed.

After a restart of the brokers no transaction times out until a client has connected to its coordinator. A transaction
that a dead process left open would hold readers back for ever. So each open bridge connects to all coordinators
regularly (hazard H53).
"""

from __future__ import annotations

import logging
import threading

from txnbridge_pulsar import client as wire

_log = logging.getLogger("txnbridge")

# After a restart readers wait up to these seconds longer. A connect is two small requests to each coordinator.
CONNECT_EVERY_SECONDS = 10.0
_CONNECT_SECONDS = 10.0


class CoordinatorKeepalive:
    """A thread that connects to all coordinators regularly: a restarted one aborts nothing before a client connects."""

    def __init__(self, client: wire.PulsarClient, every: float = CONNECT_EVERY_SECONDS) -> None:
        self._client = client
        self._every = every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="txnbridge-pulsar-coordinators", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self._client.transactions.connect(_CONNECT_SECONDS)
            except wire.PulsarError as error:
                _log.debug("the transaction coordinators do not answer: %s", error)

    def close(self) -> None:
        """Tell the thread to stop. A running request ends when the client is closed."""
        self._stop.set()
