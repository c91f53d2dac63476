"""Requests to transaction coordinators: begin a transaction, register topics and subscriptions, end the transaction.

Coordinator i owns partition i of an internal topic, and a transaction's id contains its coordinator's number. Requests
that are harmless to repeat are repeated until the deadline, at the broker that runs the coordinator by then. The end is
not repeated: a lost answer is `BrokerConnectionLost` or `RequestTimedOut`. If a caller repeats the end, the second
request may get `TransactionNotFound` because the first one has ended the transaction.
"""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from txnbridge_pulsar.client.connecting.address import full_topic_name
from txnbridge_pulsar.client.connecting.connection import TRANSACTIONS_SINCE, BrokerConnection
from txnbridge_pulsar.client.connecting.lookup import Lookup
from txnbridge_pulsar.client.format.codec import Fields
from txnbridge_pulsar.client.format.ids import TxnId

from .deadline import ClientDeadline, backoff_pauses, retry
from .errors import BrokerConnectionLost, NotAllowed, ProtocolError, PulsarError, RequestTimedOut, TopicNotFound

ASSIGN_TOPIC = "persistent://pulsar/system/transaction_coordinator_assign"
_COMMIT, _ABORT = 0, 1
_CONNECTION_KEY = ""


class Transactions:
    """Requests to the coordinators of a cluster. Thread-safe. A client may end any transaction whose id it knows."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._lock = threading.Lock()
        self._connections: dict[int, BrokerConnection] = {}
        self._next_coordinator = itertools.count(random.randrange(1000))  # not all clients begin with the first one
        self._count = 0  # of the coordinators, once it is known

    def _count_coordinators(self, deadline: ClientDeadline) -> int:
        # A broker that has just started creates their topic a moment after it serves its first client.
        for pause in backoff_pauses():
            with suppress(TopicNotFound):
                if count := self._lookup.partitions(ASSIGN_TOPIC, deadline):
                    return count
            if deadline.left <= pause:
                raise NotAllowed(22, "the cluster has no transaction coordinators; are transactions enabled?")
            time.sleep(pause)
        raise AssertionError("pauses never end")

    def connect(self, timeout: float, all_within: float = math.inf) -> int:
        """Connect to every coordinator, and return their number. After a restart of the brokers, transactions time out
        only once a client has connected to their coordinator. An absent coordinator stops no connection to the others.
        After the seconds `all_within`, one connection is enough.
        """
        deadline, all_by = ClientDeadline(timeout), ClientDeadline(all_within)
        self._count = self._count_coordinators(deadline)
        absent = list(range(self._count))

        def attempt() -> int:
            failed: list[PulsarError] = []
            if all_by.expired and len(absent) < self._count:
                return self._count
            for coordinator in absent[:]:
                try:
                    left = min(all_by.left or math.inf, deadline.left)
                    self._connect(coordinator, ClientDeadline(left / len(absent)))
                    absent.remove(coordinator)
                except PulsarError as error:
                    failed.append(error)
            if failed:
                raise min(failed, key=lambda error: error.retriable)
            return self._count

        return retry(deadline, attempt)

    def connect_to(self, coordinator: int, timeout: float) -> None:
        """Connect to one coordinator by one attempt, which makes a broker load the coordinator."""
        self._connect(coordinator, ClientDeadline(timeout))

    def begin(self, ttl_ms: int, timeout: float, coordinator: int | None = None) -> TxnId:
        """Begin a transaction at the given coordinator, by default at the next one in round-robin order, each
        time it is asked. The coordinator aborts the transaction after `ttl_ms`.

        If the answer is lost, another transaction is begun; the first one stays empty and times out.
        """
        deadline = ClientDeadline(timeout)
        if coordinator is None:
            self._count = self._count or self._count_coordinators(deadline)

        def attempt() -> Fields:
            at = next(self._next_coordinator) % self._count if coordinator is None else coordinator
            # The field is named seconds and holds milliseconds.
            return self._ask(at, [("new_txn", {"txn_ttl_seconds": ttl_ms, "tc_id": at})], deadline)[0]

        answer = retry(deadline, attempt)
        try:
            return TxnId(answer["txnid_most_bits"], answer["txnid_least_bits"])
        except KeyError:
            raise ProtocolError("the coordinator began a transaction without an id") from None

    def register(
        self, txn: TxnId, timeout: float, topics: Sequence[str] = (), subscriptions: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Register the topics (or partitions) to which a transaction sends, and the (topic, subscription) pairs on
        which it acknowledges. Call this before the first message or acknowledgement there: the broker does not check
        the order, and the transaction's end never reaches an unregistered topic or subscription. Calls may be repeated.

        Raise `InvalidTransactionStatus` or `TransactionNotFound` if the transaction has ended.
        """
        deadline = ClientDeadline(timeout)
        asked: list[tuple[str, Fields]] = []
        if topics:
            names = [full_topic_name(topic) for topic in topics]
            asked.append(("add_partition_to_txn", {**txn.fields, "partitions": names}))
        if subscriptions:
            named = [{"topic": full_topic_name(topic), "subscription": name} for topic, name in subscriptions]
            asked.append(("add_subscription_to_txn", {**txn.fields, "subscription": named}))
        if asked:
            retry(deadline, lambda: self._ask(txn.most, asked, deadline))

    def end(self, txn: TxnId, commit: bool, timeout: float) -> None:
        """Commit or abort a transaction. When this returns, all markers are written and all acknowledgements applied.

        The request is sent once. Raise `TransactionNotFound` if the transaction had already ended, by commit or abort,
        and `InvalidTransactionStatus` if it is being ended, with the transaction's state in `state`. Raise
        `CoordinatorNotFound` also if the coordinator lost its store while it ended the transaction: then the next
        coordinator carries out what was stored. Raise `BrokerConnectionLost` or `RequestTimedOut` without an answer;
        their `may_have_had_effect` is True unless nothing was sent.
        """
        deadline, action = ClientDeadline(timeout), _COMMIT if commit else _ABORT
        for pause in backoff_pauses():
            connection = retry(deadline, lambda: self._coordinator(txn.most, deadline))
            try:
                with self._forgetting_lost_coordinator(txn.most):
                    connection.ask("end_txn", deadline, **txn.fields, txn_action=action)
                return
            except BrokerConnectionLost as error:
                if error.may_have_had_effect or isinstance(error, RequestTimedOut) or deadline.left <= pause:
                    raise
            time.sleep(pause)

    def send_abort(self, txn: TxnId, timeout: float) -> None:
        """Request an abort, and wait for no answer. Raise `PulsarError` if the request cannot be sent."""
        deadline = ClientDeadline(timeout)
        self._coordinator(txn.most, deadline).request("end_txn", deadline, **txn.fields, txn_action=_ABORT)

    def end_on_partition(self, txn: TxnId, topic: str, commit: bool, timeout: float) -> None:
        """End a transaction on one topic, for repair if no coordinator knows it. Only a superuser may do this."""
        self._end_on(txn, topic, "end_txn_on_partition", {"topic": full_topic_name(topic)}, commit, timeout)

    def end_on_subscription(self, txn: TxnId, topic: str, subscription: str, commit: bool, timeout: float) -> None:
        """End a transaction on one subscription, like `end_on_partition`."""
        named = {"subscription": {"topic": full_topic_name(topic), "subscription": subscription}}
        self._end_on(txn, topic, "end_txn_on_subscription", named, commit, timeout)

    def _end_on(self, txn: TxnId, topic: str, name: str, named: Fields, commit: bool, timeout: float) -> None:
        deadline = ClientDeadline(timeout)
        action = _COMMIT if commit else _ABORT
        # A broker hangs up without a low water mark; 0 says that no older transaction is known to have ended.
        fields = {**txn.fields, **named, "txn_action": action, "txnid_least_bits_of_low_watermark": 0}
        retry(deadline, lambda: self._lookup.connection(topic, _CONNECTION_KEY, deadline).ask(name, deadline, **fields))

    def _ask(self, coordinator: int, asked: Sequence[tuple[str, Fields]], deadline: ClientDeadline) -> list[Fields]:
        """Send requests, given by their names and fields, without waiting in between; return the answers' fields."""
        connection = self._coordinator(coordinator, deadline)
        with self._forgetting_lost_coordinator(coordinator):
            answers = [connection.request(name, deadline, **fields) for name, fields in asked]
            return [answer.result(deadline.left) for answer in answers]

    def _coordinator(self, coordinator: int, deadline: ClientDeadline) -> BrokerConnection:
        with self._lock:
            connection = self._connections.get(coordinator)
        return connection if connection is not None and not connection.closed else self._connect(coordinator, deadline)

    def _connect(self, coordinator: int, deadline: ClientDeadline) -> BrokerConnection:
        connection = self._lookup.connection(f"{ASSIGN_TOPIC}-partition-{coordinator}", _CONNECTION_KEY, deadline)
        if connection.protocol_version < TRANSACTIONS_SINCE:
            raise NotAllowed(22, f"broker {connection.server_version} is too old for transactions")
        connection.ask("tc_client_connect_request", deadline, tc_id=coordinator)
        with self._lock:
            self._connections[coordinator] = connection
        return connection

    @contextmanager
    def _forgetting_lost_coordinator(self, coordinator: int) -> Iterator[None]:
        """If the block fails because the coordinator is down or may have moved, forget the connection to it."""
        try:
            yield
        except PulsarError as error:
            if error.retriable or isinstance(error, RequestTimedOut):
                self._connections.pop(coordinator, None)
            raise
