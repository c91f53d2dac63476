"""A consumer: one subscription to one topic or partition, on one connection at a time.

Received entries wait in the consumer's inbox, and permits limit how many the broker sends. The consumer never
reconnects by itself: when the connection ends or the topic moves, `lost` returns the reason, and `reopen` subscribes
again. The broker then redelivers all unacknowledged messages. Each `reopen` raises `generation`, by which older
deliveries are recognized.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple

from txnbridge_pulsar.client.connecting.connection import BrokerConnection, ConsumerCallbacks, Response
from txnbridge_pulsar.client.connecting.lookup import Lookup
from txnbridge_pulsar.client.format.codec import Fields
from txnbridge_pulsar.client.format.frames import command
from txnbridge_pulsar.client.format.ids import (
    EARLIEST,
    MessageId,
    TxnId,
    cumulative_ack_fields,
    extra_index_ack_fields,
    individual_ack_fields,
    message_id,
    position_fields,
)
from txnbridge_pulsar.client.format.received_entries import Chunks, ReceivedEntry

from .deadline import ClientDeadline, retry
from .errors import BrokerConnectionLost, Closed, PulsarError
from .inbox import Inbox

_log = logging.getLogger(__name__)

# Permits before the size of messages is known: so few that even the largest messages fit into memory.
FIRST_PERMITS = 16
# The estimated message size shrinks slowly after a large message, which would else slow the consumer down for ever.
_SIZE_DECAY = 0.99
# With this limit a command stays far below the size of a frame, even with the bits of large batches.
MAX_IDS_PER_COMMAND = 5000
MAX_GRANT = (1 << 31) - 1
# Seconds, at least, between two looks for messages in chunks that do not continue.
_ROUND_SECONDS = 30.0
_INDIVIDUAL, _CUMULATIVE = 0, 1


def _commands(ids: Sequence[Fields], in_transaction: bool) -> list[Sequence[Fields]]:
    """Divide message ids into ACK commands of up to 5000 ids. In a transaction, an entry gets a command of its own if
    only some of its messages are acknowledged.

    A broker that loads a topic reads the transactions' ACK commands from the pending-ack log, and skips a whole command
    if the subscription's cursor already has one of the command's positions. The cursor only has entries that are
    acknowledged whole; the partial acknowledgement of an entry may exist in the log alone. If one command had entries
    of both kinds, the broker would also skip the partial acknowledgement, and redeliver its messages (hazard H55).
    """
    together = [id for id in ids if not (in_transaction and id.get("ack_set"))]
    commands: list[Sequence[Fields]] = [
        together[at : at + MAX_IDS_PER_COMMAND] for at in range(0, len(together), MAX_IDS_PER_COMMAND)
    ]
    return [*commands, *([id] for id in ids if in_transaction and id.get("ack_set"))]


class SubscriptionType(IntEnum):
    """The way in which a subscription's consumers share its messages."""

    EXCLUSIVE = 0
    SHARED = 1
    FAILOVER = 2
    KEY_SHARED = 3


class ConsumerOptions(NamedTuple):
    """The options of a consumer, which were given to `PulsarClient.subscribe`."""

    subscription: str
    type: SubscriptionType
    start: MessageId
    durable: bool
    name: str | None
    permits: int
    connection_key: str
    create: bool

    @property
    def ordered(self) -> bool:
        """Return whether the subscription delivers in order, so that its progress is one position."""
        return self.type in (SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER)


class PulsarConsumer:
    """A subscribed consumer. Only one thread receives; any thread may acknowledge."""

    def __init__(
        self, lookup: Lookup, next_id: Callable[[], int], topic: str, options: ConsumerOptions, inbox: Inbox | None
    ) -> None:
        self.topic = topic
        self.by_key = options.type is SubscriptionType.KEY_SHARED
        self.inbox = Inbox() if inbox is None else inbox
        self.generation = 0
        self.active: bool | None = None
        # How often the failover subscription has activated this consumer, each time with a redelivery.
        self.activations = 0
        # The number of entries that have arrived in this generation; `_taken` of them were taken or dropped.
        self.arrived = 0
        self._taken = 0
        self._lookup = lookup
        self._next_id = next_id
        self._options = options
        self._id = -1
        self._connection: BrokerConnection | None = None
        # The error after which the consumer has to be reopened; None while it is subscribed.
        self.lost: PulsarError | None = Closed("the consumer was never opened")
        self._subscribed = False
        self._was_subscribed = False
        self._state = threading.Lock()
        self._start = options.start._replace(first_chunk=())  # after the last chunk of a message in chunks
        self.heard = EARLIEST  # the last entry that was taken, also if it is a chunk of an incomplete message
        self.joins_chunks = True  # else chunks are received like other entries
        # Where reading began, and how far `go_back` has gone back for a chunk, the entry `_wanted`.
        self._read_from, self._distance, self._wanted = self._start, 0, tuple[int, ...]()
        self._epoch = 0
        self._outstanding = 0
        self._largest = 0.0
        self._held = False
        self._answers: weakref.WeakSet[Response] = weakref.WeakSet()  # of acknowledgements
        self._chunks = Chunks()
        self._round_ends = 0.0  # the time of the next look for chunks to give back

    # ------------------------------------------------------------------------------------------ opening

    @property
    def all_taken(self) -> bool:
        """Return whether the caller has taken all entries of this consumer that have arrived in the inbox."""
        return self._taken == self.arrived

    def reopen(self, timeout: float) -> None:
        """Subscribe again. A durable subscription continues after its acknowledgements. Any other subscription
        continues after the last entry that was taken from the inbox; if a message in chunks is incomplete, it continues
        before that message. Raise the errors of `PulsarClient.subscribe`.
        """
        if isinstance(self.lost, Closed) and self._connection is not None:
            raise Closed("the consumer is closed")
        deadline = ClientDeadline(timeout)
        self._leave(deadline)
        self._epoch += 1
        retry(deadline, lambda: self._open(self._lookup.opening_attempt(deadline)))

    @property
    def stray(self) -> tuple[MessageId, int] | None:
        """Return a reader's chunk of a message that began before the reader did, and the message's number of chunks.

        Entries after the chunk `comes_again`: after `go_back` and `reopen`, and the whole message with them.
        """
        return self._chunks.stray if self._chunks.goes_back else None

    def go_back(self) -> None:
        """Let `reopen` continue before a `stray` chunk, each time twice as far, in the end at the topic's beginning."""
        if self.stray is None:
            return
        (ledger, entry, *_), chunks = self.stray
        is_same, self._wanted = self._wanted == (ledger, entry), (ledger, entry)
        self._distance = 2 * self._distance if is_same else 2 * chunks
        start = self._read_from if is_same else self._start
        if start.entry >= 0:
            start = MessageId(start.ledger, max(start.entry - self._distance, -1))
        else:
            start = MessageId(max(start.ledger - max(ledger - start.ledger, 1), -1), -1)
        self._read_from = self._start = start

    def _open(self, deadline: ClientDeadline) -> None:
        connection = self._lookup.connection(self.topic, self._options.connection_key, deadline)
        try:
            with self._state:
                self._connection, self._id = connection, self._next_id()
                self.generation += 1
                self._outstanding = self.arrived = self._taken = 0
                self._chunks = Chunks(self._wanted, None if self._options.durable else self._read_from != EARLIEST)
                self.active = self.lost = None
                self._subscribed = False
            connection.add("consumer", self._id, self._callbacks(self.generation))
            connection.ask("subscribe", deadline, **self._subscribe_fields())
            self.inbox.join(self)
            self._subscribed = self._was_subscribed = True
            self._grant()
        except BaseException as error:
            connection.remove("consumer", self._id)
            self.lost = BrokerConnectionLost("the subscription was not made", may_have_had_effect=False)
            if getattr(error, "may_have_had_effect", True):
                connection.post(command("close_consumer", consumer_id=self._id, request_id=0))
            raise

    def _subscribe_fields(self) -> Fields:
        options = self._options
        return {
            "topic": self.topic,
            "subscription": options.subscription,
            "sub_type": options.type,
            "consumer_id": self._id,
            "consumer_name": options.name,
            "durable": options.durable,
            "start_message_id": None if options.durable else position_fields(self._start),
            # If the subscription was deleted, create it again at the topic's beginning, so that it skips nothing.
            "initial_position": 1 if options.start == EARLIEST or self._was_subscribed else 0,
            "force_topic_creation": None if options.create else False,
            "key_shared_meta": {"key_shared_mode": 0} if options.type is SubscriptionType.KEY_SHARED else None,
            "consumer_epoch": self._epoch if options.ordered else None,
        }

    # ------------------------------------------------------------------------------------------ receiving

    def receive(self, timeout: float, most: int = 100) -> list[ReceivedEntry]:
        """Return up to `most` entries of all consumers that share this consumer's inbox; an empty list at the timeout.

        If this consumer is lost, raise the error in `lost`, but only when all entries that arrived before the loss are
        taken.
        """
        entries = self.inbox.take(timeout, most)
        if not entries and self.lost is not None:
            self._open_connection()
        return entries

    def accept(self, generation: int, fields: Fields, tail: bytes) -> ReceivedEntry | None:
        """Parse an entry that is taken from the inbox, and grant new permits. Return None if it is to be left out.

        `generation` is the consumer's when the entry arrived, `fields` and `tail` are those of the entry's frame. Left
        out are entries of earlier generations, control markers, and chunks of a message that is still incomplete.
        """
        entry = ReceivedEntry(self, generation, fields, tail)
        with self._state:
            if generation != self.generation:
                return None
            self._outstanding -= entry.permits
            self._taken += 1
            entry.arrival, chunks = self._taken, self._chunks
            self._largest = max(entry.size / entry.permits, self._largest * _SIZE_DECAY)
        self._grant()
        if entry.is_marker or fields.get("consumer_epoch", self._epoch) < self._epoch:
            return None
        if not self._options.durable and not self._is_after_start(entry):
            return None
        if entry.is_acknowledged and self._options.durable and self._options.ordered:
            with suppress(PulsarError):
                self._acknowledge_extra_index(entry.id, entry.count)
        id, chunk = entry.id, entry.chunk if self.joins_chunks else None
        # The limit for a message in chunks does not depend on the number of consumers that share the inbox.
        whole = entry if chunk is None else chunks.add(entry, chunk, self.inbox.max_bytes)
        if chunks.stray is not None and not chunks.goes_back:
            _log.warning("%s: a message in chunks is lost at %d:%d: its first one is gone", self.topic, *id[:2])
            chunks.stray = None
        entry.comes_again = chunks.stray is not None
        if not entry.comes_again:
            self.heard = id
            if not chunks.incomplete:  # else a reopened consumer would not receive the first chunks again
                self._start = id
        return whole

    def _is_after_start(self, entry: ReceivedEntry) -> bool:
        """Return whether the entry has messages after the position `start`. Brokers send the whole batch in which
        `start` is, so its messages up to `start` are skipped.
        """
        start = self._start
        if (start.ledger, start.entry) != (entry.id.ledger, entry.id.entry):
            return True
        if start.batch_index < 0 or start.batch_index + 1 >= entry.count:
            return False
        entry.skip(start.batch_index + 1)
        return True

    def hold(self, held: bool) -> None:
        """Stop granting permits to the broker if `held`, else grant them again.

        The broker still sends as many messages as it already has permits for.
        """
        self._held = held
        self._grant()

    def request_messages(self, messages: int, again: bool = False) -> None:
        """Grant permits until the broker has permits for this many messages, if it has used at least half of them. If
        the consumer was opened with 0 `permits`, it gets permits only by this call.

        If `again`, have a shared subscription's broker go on that has stopped (hazard H159): give back the chunks of
        messages that did not arrive whole, and grant a permit more. A key-shared one also gets back the chunks of
        messages that do not continue: it holds their key back if the key has moved to another consumer.
        """
        if again:
            messages = min(self._outstanding, 2 * messages) + 1
        if again or (self.by_key and time.monotonic() >= self._round_ends):
            self._round_ends = time.monotonic() + _ROUND_SECONDS
            with suppress(BrokerConnectionLost):
                self.redeliver(self._chunks.take(self._taken, every=again))
        self._grant_up_to(messages, 1 if again else messages / 2)

    def _grant(self) -> None:
        """Grant permits for the free space in the inbox, if the broker has used at least half of its permits."""
        room = self._permits_that_fit()
        self._grant_up_to(room, room / 2)

    def _permits_that_fit(self) -> int:
        if self._held:
            return 0
        if not self._largest:
            return min(self._options.permits, FIRST_PERMITS)
        return min(self._options.permits, max(1, int(self.inbox.bytes_each / self._largest)))

    def _grant_up_to(self, wanted: int, least: float) -> None:
        with self._state:
            # A broker closes the connection at more than an int32. An invalid entry may claim to use up as many.
            grant = min(wanted - self._outstanding, MAX_GRANT)
            # A broker drops flow permits that arrive before it has created the consumer.
            if self._connection is None or self.lost is not None or not self._subscribed or grant < max(1, least):
                return
            self._outstanding += grant
            flow = command("flow", consumer_id=self._id, message_permits=grant)
            connection = self._connection
        connection.post(flow)

    # ------------------------------------------------------------------------------------------ acknowledging

    def start_acknowledge(
        self, ids: Iterable[MessageId], txn: TxnId | None = None, *, timeout: float
    ) -> list[Response]:
        """Acknowledge messages by id, in a transaction if `txn` is given, and do not wait: return the responses. Of a
        batch only the given messages are acknowledged.

        For a message that came in chunks give the ids of all `parts` of its entry. A response raises
        `TransactionConflict` if the broker refuses its ACK command: then no id of that command is acknowledged (see
        `_commands`); and `BrokerConnectionLost` if the result is not known.
        """
        deadline = ClientDeadline(timeout)
        ids = list(ids)
        extra_index = txn is not None
        if extra_index and self._options.ordered:
            for id in {id[:2]: id for id in ids if id.batch_index >= 0}.values():
                self._acknowledge_extra_index(id, id.batch_size)
        commands = _commands(individual_ack_fields(ids, extra_index), in_transaction=txn is not None)
        return [self._acknowledge(_INDIVIDUAL, command, txn, deadline) for command in commands]

    def _acknowledge_extra_index(self, id: MessageId, size: int) -> None:
        """Acknowledge the extra index of an entry, outside of transactions and without an answer.

        A broker compares the acknowledgements of transactions with the pending acks of an entry, except if all indexes
        of the entry are pending or acknowledged (hazard H89). Transactions therefore name an extra index in each batch
        of which they acknowledge a part, and do not acknowledge it. On exclusive and failover subscriptions it is
        acknowledged outside of transactions, in the subscription's cursor only; without it the broker would keep the
        entry as unacknowledged. A cursor without indexes ignores this ACK, and needs `acknowledge_entries` once the
        entry's transactions are committed. The command may be repeated. If it gets lost, the broker redelivers the
        entry, from which all messages are left out. On shared subscriptions such an ACK would also remove the index
        from what the broker compares, so there `acknowledge_entries` alone ends an entry.
        """
        self._post_ack([extra_index_ack_fields(id, size)])

    def acknowledge_entries(self, ids: Iterable[MessageId]) -> None:
        """Acknowledge whole entries outside of transactions, without an answer.

        Raise `BrokerConnectionLost` if the consumer is lost.
        """
        entries = [MessageId(ledger, entry) for ledger, entry in dict.fromkeys(id[:2] for id in ids)]
        for fields in _commands(individual_ack_fields(entries), in_transaction=False):
            self._post_ack(fields)

    def _post_ack(self, ids: Sequence[Fields]) -> None:
        self._open_connection().post(command("ack", consumer_id=self._id, ack_type=_INDIVIDUAL, message_id=ids))

    def acknowledge_strays(self, acknowledged: MessageId) -> None:
        """Acknowledge the chunks directly after a mark-delete position that arrived without those before them.

        Their first chunks are before that position, and so acknowledged: their messages never become whole. Copies of
        chunks whose whole message is before that position are acknowledged, too.
        """
        ids = [acknowledged]
        for id in sorted(self._chunks.later):
            ids += [id] if id[:2] == (ids[-1].ledger, ids[-1].entry + 1) else []
        self.acknowledge_entries(ids[1:])

    def acknowledge_up_to(self, id: MessageId, *, timeout: float) -> None:
        """Acknowledge all messages up to and including this one, on an exclusive or failover subscription.

        Raise `ValueError` on other subscriptions, on which the broker would do nothing, and the errors of a response of
        `start_acknowledge`.
        """
        if not self._options.ordered:
            raise ValueError("only exclusive and failover subscriptions can be acknowledged up to a message")
        deadline = ClientDeadline(timeout)
        self._acknowledge(_CUMULATIVE, [cumulative_ack_fields(id)], None, deadline).result(deadline.left)

    def _acknowledge(self, kind: int, ids: Sequence[Fields], txn: TxnId | None, deadline: ClientDeadline) -> Response:
        txn_fields: Fields = {} if txn is None else txn.fields
        generation = self.generation
        answer = self._open_connection().request(
            "ack", deadline, consumer_id=self._id, ack_type=kind, message_id=ids, **txn_fields
        )
        with self._state:
            reason = self.lost
            if reason is None and generation == self.generation:
                self._answers.add(answer)
                return answer
        answer.resolve(_unanswered(reason or "it was reopened"))
        return answer

    def redeliver(self, ids: Iterable[MessageId] | None = None) -> list[MessageId]:
        """Have the broker redeliver unacknowledged messages. On a shared subscription these are the messages of the
        entries `ids`; without `ids`, and on other subscriptions, they are all messages.

        On exclusive and failover subscriptions, this consumer's entries in the inbox are dropped first, so that each
        message arrives once and in order. New permits are granted only after the request: with permits a broker starts
        to read on, and if it is then asked to go back, that read may make it skip entries (hazard H94). Return the
        ids of the dropped entries, without chunks of messages. Raise `BrokerConnectionLost` if the consumer is lost.
        """
        connection = self._open_connection()
        dropped, fields = list[MessageId](), list[Fields]()
        if self._options.ordered:
            with self._state:
                self._epoch += 1
            dropped = self._drop_waiting()
        else:
            fields = [position_fields(MessageId(*entry)) for entry in sorted({id[:2] for id in ids or ()})]
            if ids is not None and not fields:
                return dropped
        epoch = self._epoch if self._options.ordered else None
        for at in range(0, len(fields) or 1, MAX_IDS_PER_COMMAND):
            part = fields[at : at + MAX_IDS_PER_COMMAND]
            connection.post(command("redeliver", consumer_id=self._id, message_ids=part, consumer_epoch=epoch))
        self._grant()
        return dropped

    def _drop_waiting(self) -> list[MessageId]:
        dropped, ids = self.inbox.drop(self), list[MessageId]()
        ends, self._chunks = self._chunks.ends, Chunks()
        self._chunks.ends = ends
        with self._state:
            for generation, fields, tail in dropped:
                if generation == self.generation:
                    entry = ReceivedEntry(self, generation, fields, tail)
                    self._outstanding -= entry.permits
                    self._taken += 1
                    if not entry.is_marker and entry.chunk is None:
                        ids.append(entry.id)
        return ids

    # ------------------------------------------------------------------------------------------ positions

    def seek(self, to: MessageId, timeout: float) -> None:
        """Move a durable subscription to a message, or to `EARLIEST` or `LATEST`.

        The consumer subscribes again and drops its entries in the inbox. Raise `ValueError` if the subscription is not
        durable.
        """
        deadline = ClientDeadline(timeout)
        if not self._options.durable:
            raise ValueError("a subscription that is not durable cannot seek: begin another one")
        self._ask("seek", deadline, message_id=position_fields(to))
        self.reopen(deadline.left)

    def last_message_id(self, timeout: float) -> MessageId:
        """Return the id of the last message that can be read now. If none can be read, the id has entry -1. Messages
        after the first one of an open transaction cannot be read.
        """
        return self.progress(timeout)[0]

    def progress(self, timeout: float) -> tuple[MessageId, MessageId | None]:
        """Return the id of the last message to be read now, and, if known, the subscription's mark-delete position."""
        answer = self._ask("get_last_message_id", ClientDeadline(timeout))
        acknowledged = answer.get("consumer_mark_delete_position")
        return message_id(answer["last_message_id"]), acknowledged and message_id(acknowledged)

    def unsubscribe(self, timeout: float) -> None:
        """Delete the subscription, and close this consumer. The broker refuses if it has other consumers."""
        self._ask("unsubscribe", ClientDeadline(timeout))
        self._mark_closed()

    def _ask(self, name: str, deadline: ClientDeadline, **fields: object) -> Fields:
        return self._open_connection().ask(name, deadline, consumer_id=self._id, **fields)

    def _open_connection(self) -> BrokerConnection:
        connection, lost = self._connection, self.lost
        if lost is not None or connection is None:
            if isinstance(lost, Closed):
                raise Closed(str(lost))
            raise BrokerConnectionLost(f"the consumer has to be reopened: {lost}", False) from lost
        return connection

    # ------------------------------------------------------------------------------------------ callbacks

    def _callbacks(self, generation: int) -> ConsumerCallbacks:
        """Return the callbacks until the next `reopen`. It raises `generation`, by which late calls are recognised."""
        return ConsumerCallbacks(
            lambda fields, tail: self.entry_arrived(generation, fields, tail),
            lambda active: self.activity_changed(generation, active),
            lambda reason: self.connection_lost(generation, reason),
        )

    def entry_arrived(self, generation: int, fields: Fields, tail: bytes) -> None:
        self.arrived += generation == self.generation
        self.inbox.put(self, generation, fields, tail)

    def activity_changed(self, generation: int, active: bool) -> None:
        with self._state:
            if generation != self.generation:
                return
            self.activations += active and not self.active
            self.active = active
        if not active:
            self._drop_waiting()  # another consumer receives these entries, or this one again
            self._grant()
        self.inbox.wake()

    def connection_lost(self, generation: int, reason: PulsarError) -> None:
        with self._state:
            if generation != self.generation or self.lost is not None:
                return
            self.lost = reason
            unanswered, self._answers = self._answers, weakref.WeakSet()
        for answer in unanswered:
            answer.resolve(_unanswered(reason))
        self.inbox.wake()

    # ------------------------------------------------------------------------------------------ ending

    def close(self, timeout: float) -> None:
        """Close the consumer; a durable subscription is kept. Calls may be repeated."""
        self._leave(ClientDeadline(timeout))
        self._mark_closed()

    def _mark_closed(self) -> None:
        if self._connection is not None:
            self._connection.remove("consumer", self._id)
        with self._state:
            lost, self.lost = self.lost, Closed("the consumer is closed")
            self.lost.__cause__ = lost
        self.inbox.leave(self)
        self.inbox.wake()

    def _leave(self, deadline: ClientDeadline) -> None:
        connection = self._connection
        if connection is not None and self.lost is None and not connection.closed:
            with suppress(PulsarError):
                connection.ask("close_consumer", deadline, consumer_id=self._id)
            connection.remove("consumer", self._id)
        self.inbox.leave(self)


def _unanswered(reason: object) -> BrokerConnectionLost:
    """Return the error for an acknowledgement that got no answer because the broker has closed the consumer."""
    return BrokerConnectionLost(f"the consumer was closed before it was answered: {reason}")
