"""A client of Apache Pulsar's binary protocol with transactions. It knows nothing of bridges.

The client never sends a message twice, reconnects or resumes by itself, and every error says whether the broker may
have acted on the request. Each connection has one reading thread; all other code runs on the caller's thread.
google-crc32c is needed, and for their compressions lz4, zstandard and python-snappy.

    with PulsarClient("pulsar://localhost:6650") as client:
        txn = client.transactions.begin(60_000, timeout=10)
        client.transactions.register(txn, 10, topics=["orders"])
        producer = client.create_producer("orders", timeout=10, transactions=True)
        batch = MessageBatch()
        batch.extend([b"one", b"two"])
        assert not producer.send(batch, txn, timeout=10).result(10).duplicate
        client.transactions.end(txn, commit=True, timeout=10)
"""

from __future__ import annotations

from txnbridge_pulsar.client.connecting.address import full_topic_name, partition_name
from txnbridge_pulsar.client.connecting.authentication import (
    NO_AUTHENTICATION,
    TLS_AUTHENTICATION,
    Authentication,
    basic_authentication,
    tls_context,
    token_authentication,
    token_file,
)
from txnbridge_pulsar.client.connecting.connection import Response
from txnbridge_pulsar.client.format.compression import Compression
from txnbridge_pulsar.client.format.ids import EARLIEST, LATEST, MessageId, TxnId
from txnbridge_pulsar.client.format.outgoing_entry import MessageBatch, Single
from txnbridge_pulsar.client.format.received_entries import ReceivedEntry, ReceivedMessage

from .client import PulsarClient, closing
from .consumer import PulsarConsumer, SubscriptionType
from .errors import (
    BrokerConnectionLost,
    Closed,
    ConnectFailed,
    ConsumerBusy,
    CoordinatorNotFound,
    CorruptEntry,
    InvalidTransactionStatus,
    MessageTooLarge,
    MissingLibrary,
    NotAllowed,
    NotAuthenticated,
    NotAuthorized,
    NotOwner,
    PerhapsDropped,
    ProducerBusy,
    ProducerFenced,
    ProtocolError,
    PulsarError,
    RequestTimedOut,
    ServerError,
    ServerErrorCode,
    TopicNotFound,
    TopicTerminated,
    TransactionConflict,
    TransactionNotFound,
)
from .inbox import Inbox
from .pending_sends import Receipt, Send
from .producer import AccessMode, PulsarProducer
from .transactions import Transactions
