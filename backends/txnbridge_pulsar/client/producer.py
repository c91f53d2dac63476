"""A producer: sends entries without waiting, and reports the result of each.

The producer never sends an entry twice by itself. When the connection ends, or the broker moves the topic, every send
without a receipt fails with `BrokerConnectionLost`: the entry may or may not be stored. Then the caller reopens the
producer, and calls `resend` or `forget` for these unconfirmed sends. `resend` sends the same bytes again, which makes
duplicates unless the broker removes them. Sequence ids are never reused, whether or not their messages were stored.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import NamedTuple

from txnbridge_pulsar.client.connecting.connection import BrokerConnection
from txnbridge_pulsar.client.connecting.lookup import Lookup
from txnbridge_pulsar.client.format.codec import Fields, encode
from txnbridge_pulsar.client.format.compression import Compression, compress
from txnbridge_pulsar.client.format.frames import command, send_command
from txnbridge_pulsar.client.format.ids import MessageId, TxnId, message_id
from txnbridge_pulsar.client.format.outgoing_entry import Content

from .deadline import ClientDeadline, retry
from .errors import (
    BrokerConnectionLost,
    Closed,
    MessageTooLarge,
    PerhapsDropped,
    ProducerFenced,
    PulsarError,
    RequestTimedOut,
    server_error,
)
from .pending_sends import Budget, Receipt, Send


class AccessMode(IntEnum):
    """A producer's access to its topic: shared with other producers, or exclusive."""

    SHARED = 0
    EXCLUSIVE = 1  # no other; refused with `ProducerFenced` if the topic has another
    EXCLUSIVE_WITH_FENCING = 3  # no other; the others are fenced, and lose their whole connections at the next send


class ProducerOptions(NamedTuple):
    """The options of a producer, which were given to `PulsarClient.create_producer`."""

    name: str | None
    access: AccessMode
    compression: Compression
    transactions: bool
    connection_key: str


class PulsarProducer:
    """A producer on one topic or partition. Any thread may send; entries are sent in the order of the calls."""

    def __init__(self, lookup: Lookup, budget: Budget, id: int, topic: str, options: ProducerOptions) -> None:
        compress(options.compression, b"")  # raises `MissingLibrary` now, and not at the first message
        self.id = id
        self.topic = topic
        self.name = options.name or ""
        self.last_sequence_id = -1
        self.topic_epoch: int | None = None
        self._lookup = lookup
        self._budget = budget
        self._options = options
        self._connection: BrokerConnection | None = None
        self.generation = -1  # how many times the producer was reopened
        self._next = 0
        self._numbers = itertools.count()
        self._sending = threading.Lock()
        self._state = threading.Condition()
        self._pending: dict[int, Send] = {}
        self._unconfirmed: dict[int, Send] = {}  # by number, in order
        # The error after which the producer has to be reopened; None while it is open.
        self.lost: PulsarError | None = Closed("the producer was never opened")

    # ------------------------------------------------------------------------------------------ opening

    @property
    def unconfirmed(self) -> list[Send]:
        """Return the sends that had no receipt when the connection was lost, in order: each may be stored or not."""
        with self._state:
            return list(self._unconfirmed.values())

    def reopen(self, timeout: float) -> None:
        """Open the producer again with the same name. If the producer holds the topic exclusively, it keeps its epoch.

        Unconfirmed sends stay unconfirmed. Afterwards `last_sequence_id` is the last sequence id that the broker knows
        for the name, -1 for none. Raise `ProducerFenced` if another producer has taken over the topic, and the errors
        of `PulsarClient.create_producer`.
        """
        if self.generation >= 0 and isinstance(self.lost, Closed):
            raise Closed(str(self.lost))
        if self._connection is not None:
            self._leave(self._connection)
        self.generation += 1
        deadline = ClientDeadline(timeout)
        retry(deadline, lambda: self._open(self._lookup.opening_attempt(deadline)))

    def _open(self, deadline: ClientDeadline) -> None:
        connection = self._lookup.connection(self.topic, self._options.connection_key, deadline)
        try:
            with self._state:
                # From now on the connection may be lost again, even before the producer is known to be open.
                self._connection, self.lost = None, None
            connection.add("producer", self.id, self)
            answer = self._open_on_broker(connection, deadline)
            with self._state:
                self.name = answer["producer_name"]
                self.last_sequence_id = answer.get("last_sequence_id", -1)
                self.topic_epoch = answer.get("topic_epoch")
                self._next = max(self._next, self.last_sequence_id + 1)
                self._connection = connection
        except BaseException as error:
            connection.remove("producer", self.id)
            self.lost = BrokerConnectionLost("the producer was not opened", may_have_had_effect=False)
            if getattr(error, "may_have_had_effect", True):
                connection.post(command("close_producer", producer_id=self.id, request_id=0))
            raise

    def _open_on_broker(self, connection: BrokerConnection, deadline: ClientDeadline) -> Fields:
        """Request the producer from the broker. If the producer has held the topic exclusively, it first asks for that
        again with the epoch that it had: such a request fences no other producer.

        A broker refuses to fence with an epoch that is not the newest, but closes the newest owner's connection anyway.
        So fencing is requested only if the existing producer is our own, on an older connection whose end the broker
        has not noticed.
        """
        if self.topic_epoch is None:
            return self._request_producer(connection, self._options.access, deadline)
        try:
            return self._request_producer(connection, AccessMode.EXCLUSIVE, deadline)
        except ProducerFenced as error:
            if not error.text.endswith(f" existing exclusive producer: {self.name}"):
                raise
        return self._request_producer(connection, AccessMode.EXCLUSIVE_WITH_FENCING, deadline)

    def _request_producer(self, connection: BrokerConnection, access: AccessMode, deadline: ClientDeadline) -> Fields:
        options = self._options
        return connection.ask(
            "producer",
            deadline,
            topic=self.topic,
            producer_id=self.id,
            producer_name=self.name or None,
            epoch=self.generation,
            user_provided_producer_name=options.name is not None,
            producer_access_mode=access,
            topic_epoch=self.topic_epoch,
            txn_enabled=options.transactions,
        )

    # ------------------------------------------------------------------------------------------ sending

    def send(
        self,
        content: Content,
        txn: TxnId | None = None,
        *,
        sequence_id: int | None = None,
        timeout: float,
        when_done: Callable[[Send], None] = lambda _: None,
    ) -> Send:
        """Send an entry. `sequence_id` is that of its first message; by default the next free one. `when_done` is
        called as in `Send.when_done`, even if this call raises after the entry was sent.

        Wait only while the limit of unconfirmed bytes is reached. Raise `MessageTooLarge`, `BrokerConnectionLost` or
        `RequestTimedOut`. If `may_have_had_effect` of the error is True, the entry may have been sent and is
        unconfirmed.
        """
        deadline = ClientDeadline(timeout)
        with self._send_order(deadline):
            connection = self._open_connection()
            first = self._next if sequence_id is None else sequence_id
            frame = self._frame(content, txn, first, connection.max_message_size)
            send = Send(next(self._numbers), first, content.count, txn, frame)
            self._budget.take(send, deadline, not self._pending, lambda: self.lost is not None)
            self._next = max(self._next, send.highest_sequence_id + 1)
            send.when_done(when_done)
            try:
                self._write(connection, send, deadline)
            except BrokerConnectionLost as error:
                if not error.may_have_had_effect:
                    with self._state:
                        self._pending.pop(send.sequence_id, None)
                        self._unconfirmed.pop(send.number, None)
                        self._state.notify_all()
                    self._budget.give_back([send])
                raise
            return send

    @contextmanager
    def _send_order(self, deadline: ClientDeadline) -> Iterator[None]:
        """Hold the lock in the block, so that entries are written in the order of their sequence ids."""
        with deadline.locking(self._sending) as is_held:
            if not is_held:
                why = f"other threads were sending for {deadline.seconds:g} s"
                raise RequestTimedOut(why, may_have_had_effect=False)
            yield

    def resend(self, timeout: float, when_done: Callable[[Send], None] = lambda _: None) -> list[Send]:
        """Send the unconfirmed entries again, with the same bytes in the same order. Return their sends; `when_done` is
        called for each.

        Raise `BrokerConnectionLost` or `RequestTimedOut`. Entries that were not sent then stay unconfirmed.
        """
        deadline = ClientDeadline(timeout)
        with self._send_order(deadline):
            connection = self._open_connection()
            sends = self.unconfirmed
            for send in sends:
                send.begin_again()
                send.when_done(when_done)
                try:
                    self._budget.count(send)
                    self._write(connection, send, deadline)
                except BaseException:  # also an interrupt, after which the entry may be under way or not
                    self._keep_unconfirmed([send])
                    raise
        return sends

    def forget(self) -> None:
        """Drop the list of unconfirmed sends. Their entries may still be stored."""
        with self._state:
            self._unconfirmed = {}

    def flush(self, timeout: float) -> None:
        """Wait until each sent entry has a receipt, or a failure, which its `Send` has. Raise `RequestTimedOut`."""
        with self._state:
            if not self._state.wait_for(lambda: not self._pending, timeout):
                raise RequestTimedOut(f"{len(self._pending)} sends have no receipt after {timeout:g} s")

    def _open_connection(self) -> BrokerConnection:
        connection = self._connection
        if self.lost is not None or connection is None:
            if isinstance(self.lost, Closed):
                raise Closed(str(self.lost))
            raise BrokerConnectionLost(f"the producer has to be reopened: {self.lost}", False) from self.lost
        return connection

    def _frame(self, content: Content, txn: TxnId | None, first: int, limit: int) -> bytes:
        body = content.body()
        payload = compress(self._options.compression, body)
        ids: Fields = {} if txn is None else txn.fields
        metadata: Fields = {"producer_name": self.name, "sequence_id": first, "publish_time": int(time.time() * 1000)}
        metadata |= content.metadata()
        fields = {"producer_id": self.id, "sequence_id": first, "num_messages": content.count, **ids}
        if self._options.compression is not Compression.NONE:
            metadata |= {"compression": int(self._options.compression), "uncompressed_size": len(body)}
        if "num_messages_in_batch" in metadata:
            metadata["highest_sequence_id"] = fields["highest_sequence_id"] = first + content.count - 1
        encoded = encode("MessageMetadata", {**metadata, **ids})
        if len(encoded) + len(payload) > limit:
            raise MessageTooLarge(f"an entry has {len(encoded) + len(payload)} bytes; the broker takes {limit}")
        return send_command(fields, encoded, payload)

    def _write(self, connection: BrokerConnection, send: Send, deadline: ClientDeadline) -> None:
        with self._state:
            if self.lost is not None:
                raise BrokerConnectionLost(f"the producer has to be reopened: {self.lost}", False) from self.lost
            self._pending[send.sequence_id] = send
            self._unconfirmed.pop(send.number, None)
        connection.write(send.frame, deadline)

    def _keep_unconfirmed(self, sends: Iterable[Send]) -> None:
        """Add sends to the unconfirmed ones, sorted by first sending: losses may be reported in another order."""
        with self._state:
            kept = sorted({*self._unconfirmed.values(), *sends}, key=lambda send: send.number)
            self._unconfirmed = {send.number: send for send in kept}
            for send in kept:
                self._pending.pop(send.sequence_id, None)
            self._state.notify_all()
            self._budget.give_back(kept)

    # ------------------------------------------------------------------------------------------ callbacks

    def on_receipt(self, fields: Fields) -> None:
        with self._state:
            send = self._pending.pop(fields["sequence_id"], None)
            self._state.notify_all()
        if send is not None:
            self._budget.give_back([send])
            stored = message_id(fields["message_id"]) if "message_id" in fields else MessageId(-1, -1)
            receipt = Receipt(send.sequence_id, stored)
            send.resolve(PerhapsDropped() if receipt.duplicate and send.refused else receipt)

    def on_send_error(self, fields: Fields) -> None:
        id = fields["sequence_id"]
        error = server_error(fields["error"], fields["message"])
        with self._state:
            # For a batch the broker names the highest sequence id. It may refuse each of very many entries, in order.
            by_last = (each for each in self._pending.values() if each.highest_sequence_id == id)
            send = self._pending.get(id) or next(by_last, None)
            if send is None:
                return
            if error.retriable:
                # Perhaps the broker is storing it already, and does not know yet whether that succeeds.
                send.refused |= "whether the message is a duplicate" not in error.text
            else:
                del self._pending[send.sequence_id]
            self._state.notify_all()
        if error.retriable:
            # The topic moves, or its store fails for a moment: the caller resends this and later entries in order.
            self.on_lost(error)
        else:
            self._budget.give_back([send])
            send.resolve(error)

    def on_lost(self, reason: PulsarError) -> None:
        with self._state:
            if self.lost is not None:
                return
            self.lost = reason
            lost = list(self._pending.values())
            self._keep_unconfirmed(lost)
            for send in lost:  # under the lock: else this could be taken for the result of sending again
                error = BrokerConnectionLost(f"no receipt for sequence id {send.sequence_id}: {reason}")
                error.__cause__ = reason
                send.resolve(error)

    # ------------------------------------------------------------------------------------------ ending

    def close(self, timeout: float) -> None:
        """Close the producer. Sends without a receipt fail with `BrokerConnectionLost`. Calls may be repeated."""
        connection = self._connection
        closed = Closed("the producer is closed")
        self.on_lost(closed)
        with self._state:
            self.lost = closed
        self.forget()
        if connection is not None and not connection.closed:
            with suppress(PulsarError):
                connection.ask("close_producer", ClientDeadline(timeout), producer_id=self.id)
            connection.remove("producer", self.id)

    def _leave(self, connection: BrokerConnection) -> None:
        self.on_lost(BrokerConnectionLost("the producer is being reopened"))
        connection.remove("producer", self.id)
        if not connection.closed:
            connection.post(command("close_producer", producer_id=self.id, request_id=0))
