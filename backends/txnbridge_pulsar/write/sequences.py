"""What the decision log knows of the sequences of one publisher's name on one topic.

Brokers forget a name that nobody has used for some hours, and then answer as if it had never published: a publisher
that believes it stores everything again. So publishers note in the log up to which sequence they know that all is
stored, when they begin and when they end; a broker that answers less has forgotten the name.
"""

from __future__ import annotations

import logging

from txnbridge.errors import AccessDenied, EvidenceLost, TxnBridgeError
from txnbridge.spi import Deadline, Ledger, LedgerValue

_log = logging.getLogger("txnbridge")

# Messages are stored whether that is noted or not: no flush waits longer for a log whose broker is away.
_NOTE_SECONDS = 3.0


class SequenceRecord:
    """The highest sequence that the log knows to be stored; there may be more, where a publisher has died."""

    def __init__(self, name: str, topic: str, ledger: Ledger) -> None:
        self._name = name
        self._topic = topic
        self._value = LedgerValue(ledger)
        self._last = -1  # noted by this process, or read from the log
        self._blind = False

    def check(self, stored: int, deadline: Deadline) -> None:
        """Raises `EvidenceLost` if the broker knows of less than was stored. -1 stands for nothing."""
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

    def note(self, stored: int, deadline: Deadline) -> None:
        """Have the log know that all up to this sequence is stored, if it can be told soon: errors are not raised, and
        after one the next publisher of the name does it.
        """
        deadline = Deadline(min(_NOTE_SECONDS, deadline.left()))
        try:
            if not self._blind and self._last < stored:
                self._update(stored, deadline)
        except TxnBridgeError as error:
            self._blind = True
            _log.debug("what publisher %r has stored on %s is not noted: %s", self._name, self._topic, error)

    def note_first(self, stored: int, deadline: Deadline) -> None:
        """As `note`, if nothing was noted ever before: from then on it is noticed if a broker knows nothing."""
        if self._last < 0:
            self.note(stored, deadline)

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
