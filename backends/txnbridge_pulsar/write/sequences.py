"""The decision log's record of the last sequence that a named publisher has stored on a topic.

Brokers forget a producer name that is unused for hours, and then answer as if it had never published. A publisher that
believed this answer would store all its messages again. So publishers record in the decision log, when they begin and
when they end, up to which sequence all messages are stored. A broker that answers with a lower sequence has forgotten
the name (hazard H58).
"""

from __future__ import annotations

import logging

from txnbridge.errors import AccessDenied, EvidenceLost, TxnBridgeError
from txnbridge.spi import Deadline, Ledger, LedgerValue

_log = logging.getLogger("txnbridge")

# Seconds that a flush waits for the decision log: the messages are stored whether the sequence is recorded or not.
_NOTE_SECONDS = 3.0


class SequenceRecord:
    """The highest stored sequence of a publisher's name on a topic, in the decision log. If a publisher has died, the
    broker may have stored higher sequences.
    """

    def __init__(self, name: str, topic: str, ledger: Ledger) -> None:
        self._name = name
        self._topic = topic
        self._value = LedgerValue(ledger)
        self._last = -1  # recorded by this process, or read from the log
        self._blind = False

    def check(self, stored: int, deadline: Deadline) -> None:
        """Raise `EvidenceLost` if `stored`, the last sequence that the broker knows, is lower than the recorded one; -1
        if the broker knows none.
        """
        try:
            value = self._value.read(deadline)
            self._last = -1 if value is None else int(value["stored"])
        except AccessDenied as error:
            self._go_on_without(error)
        if stored < self._last:
            raise EvidenceLost(
                f"publisher {self._name!r} has stored up to sequence {self._last} on topic {self._topic!r}, and the"
                f" broker knows {stored if stored >= 0 else 'nothing'} of it any more: it forgets a name that nobody"
                " uses for hours (brokerDeduplicationProducerInactivityTimeoutMinutes), or the topic was made anew."
                " What is sent again under this name would be there twice: go on under another name, behind what the"
                " topic holds"
            )

    def record_stored(self, stored: int, deadline: Deadline) -> None:
        """Record that all messages up to this sequence are stored. Errors are logged, not raised: the next publisher of
        this name records its sequence.
        """
        deadline = Deadline(min(_NOTE_SECONDS, deadline.left()))
        try:
            if not self._blind and self._last < stored:
                self._update(stored, deadline)
        except TxnBridgeError as error:
            self._blind = True
            _log.debug("what publisher %r has stored on %s is not noted: %s", self._name, self._topic, error)

    def record_first(self, stored: int, deadline: Deadline) -> None:
        """Record the stored sequence if the decision log has none yet. From then on `check` notices a broker that has
        forgotten the name.
        """
        if self._last < 0:
            self.record_stored(stored, deadline)

    def _update(self, stored: int, deadline: Deadline) -> None:
        try:
            value = self._value.update(
                lambda value: None if value and int(value["stored"]) >= stored else {"stored": stored}, deadline
            )
            self._last = stored if value is None else int(value["stored"])
        except AccessDenied as error:
            self._go_on_without(error)

    def _go_on_without(self, error: AccessDenied) -> None:
        self._blind = True
        _log.warning(
            "publisher %r: nobody will notice if the broker forgets its sequences on %s: %s",
            *(self._name, self._topic, error),
        )
