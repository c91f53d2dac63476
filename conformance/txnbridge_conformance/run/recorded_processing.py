"""`ProcessorRecording`: records the transactions of a processor, which begins and ends them itself."""

from __future__ import annotations

import time

from txnbridge import Event, Message, errors, hookimpl
from txnbridge_conformance.history import RecordedCall, Result
from txnbridge_conformance.run.bodies import dead_value, sent_as, text_of
from txnbridge_conformance.run.client import Client, read_of


class ProcessorRecording:
    """Records the transactions of one processor as a plug-in, by txnbridge's events, and by the processor's handler.

    Register it before the bridge of the processor is opened. The handler calls `handle` for each of its messages. The
    processor reads in `group`, and sends poison messages to the topic `dead_letters`.
    """

    def __init__(self, client: Client, group: str, dead_letters: str) -> None:
        self._client = client
        self._group = group
        self._dead_letters = dead_letters
        self._call: RecordedCall | None = None  # the open transaction
        self._polled: dict[object, Message] = {}  # messages since the last poll that the handler was called with
        self._poison: list[Message] = []  # those of `_polled` that are poison, in the same order
        self._dead = 0  # the number of dead letters in the open transaction

    def handle(self, message: Message, poison: bool) -> RecordedCall:
        """Note that the handler was called with a message; return the record of the open transaction's call."""
        # After a poison message the batch is processed again without it: the handler gets the others a second time.
        self._polled.setdefault(message[:3], message)
        if poison:
            self._poison.append(message)
        assert self._call is not None
        return self._call

    @hookimpl
    def txnbridge_event(self, event: Event) -> None:
        match event.name, event.phase:
            case "reader.poll", "before":
                self._polled.clear()
                self._poison.clear()
            case "transaction.begin", "before":
                self._end("unknown")  # one whose end no event told
                self._call = self._client.start_transaction(transaction=event.transaction)
                self._dead = 0
            case ("transaction.begin", "after") | ("commit", "before") if self._call is not None:
                self._call.note(**{"ending" if event.name == "commit" else "begun": time.monotonic_ns()})
            case "message.send", "before" if event.data["topic"] == self._dead_letters:
                self._note_dead_letter(event)
            case "ack", "before":
                self._note_acknowledged(event)
            case "commit", "after":
                self._end("ok")
                del self._poison[: self._dead]
            case "commit", "failed":
                unknown = issubclass(getattr(errors, event.data["error"], errors.OutcomeUnknown), errors.OutcomeUnknown)
                self._end("unknown" if unknown else "fail", event.data["error"])
            case ("abort", "before") | ("transaction.begin", "failed"):
                self._end("fail")

    def _note_dead_letter(self, event: Event) -> None:
        assert self._call is not None and event.transaction is not None
        self._call.send(self._dead_letters, 0, [dead_value(sent_as(self._poison[self._dead]), event.transaction)])
        self._dead += 1

    def _note_acknowledged(self, event: Event) -> None:
        """Record that the open transaction acknowledges messages, and sends a dead letter for each that is poison."""
        assert self._call is not None
        messages = [self._polled.pop(key) for key in list(self._polled)[: event.data["messages"]]]
        while any(message in messages for message in self._poison[self._dead :]):
            self._note_dead_letter(event)
        self._call.poll([read_of(message) for message in messages], self._group)
        self._call.ack(self._group, [text_of(message) for message in messages])

    def _end(self, result: Result, error: str | None = None) -> None:
        if self._call is not None:
            self._call.end(result, error=error)
            self._call = None
