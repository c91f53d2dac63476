"""Records in the decision log which sequences a named publisher has stored, because brokers forget that.

Brokers forget a producer name that is unused for hours, and then answer as if nobody had published under it. A
publisher that believed this answer would store all its messages again. So each publisher records in the decision log,
when it begins and when it ends, up to which sequence all messages are stored. A broker that answers with a lower
sequence has forgotten the name (hazard H58).
"""

from __future__ import annotations

import logging

from txnbridge.errors import AccessDenied, EvidenceLost, TxnBridgeError
from txnbridge.spi import Deadline, Ledger, LedgerValue

_log = logging.getLogger("txnbridge")

# Seconds that a flush waits for the decision log: the messages are stored whether the sequence is recorded or not.
_RECORD_SECONDS = 3.0


class SequenceRecord:
    """The highest sequence in the decision log for one publisher's name and one topic.

    The broker may have stored higher ones, if the publisher died before it recorded them.
    """

    def __init__(self, name: str, topic: str, ledger: Ledger) -> None:
        self._name = name
        self._topic = topic
        self._value = LedgerValue(ledger)
        self._last = -1  # recorded by this process, or read from the log
        self._is_disabled = False

    def check(self, stored: int, deadline: Deadline) -> None:
        """Raise `EvidenceLost` if the broker's last sequence `stored` (-1 for none) is below the recorded one."""
        try:
            value = self._value.read(deadline)
            self._last = -1 if value is None else int(value["stored"])
        except AccessDenied as error:
            self._disable_check(error)
        if stored < self._last:
            raise EvidenceLost(
                f"publisher {self._name!r} has stored up to sequence {self._last} on topic {self._topic!r}, and the"
                f" broker only knows of {stored if stored >= 0 else 'none'}: it forgets a name that is unused for hours"
                " (brokerDeduplicationProducerInactivityTimeoutMinutes), or the topic was recreated. Messages that"
                " are sent again under this name would be stored twice: continue under another name, after the topic's"
                " last message"
            )

    def record_stored(self, stored: int, deadline: Deadline) -> None:
        """Record that all messages up to sequence `stored` are stored; log errors.

        The next publisher with this name records its sequence as well.
        """
        deadline = Deadline(min(_RECORD_SECONDS, deadline.left()))
        try:
            if not self._is_disabled and self._last < stored:
                self._update(stored, deadline)
        except TxnBridgeError as error:
            self._is_disabled = True
            _log.debug("the last sequence of publisher %r on %s is not recorded: %s", self._name, self._topic, error)

    def record_first(self, stored: int, deadline: Deadline) -> None:
        """Record sequence `stored` if none is recorded, so that `check` notices if the broker forgets the name."""
        if self._last < 0:
            self.record_stored(stored, deadline)

    def _update(self, stored: int, deadline: Deadline) -> None:
        try:
            value = self._value.update(
                lambda value: None if value and int(value["stored"]) >= stored else {"stored": stored}, deadline
            )
            self._last = stored if value is None else int(value["stored"])
        except AccessDenied as error:
            self._disable_check(error)

    def _disable_check(self, error: AccessDenied) -> None:
        self._is_disabled = True
        _log.warning(
            "publisher %r: it will not be noticed if the broker forgets its sequences on %s: %s",
            *(self._name, self._topic, error),
        )
