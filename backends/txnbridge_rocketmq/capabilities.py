"""The capabilities and limits of RocketMQ through this backend, and capabilities that depend on brokers' settings."""

from __future__ import annotations

from collections.abc import Mapping

from txnbridge.spi import NATIVE, Capabilities, Capability, Limits, Support, absent, emulated

CAPABILITIES = Capabilities(
    "RocketMQ",
    {
        Capability.ATOMIC_TOPICS: emulated(
            "each message is stored as a half message; one record in the decision log decides all of them, and then"
            " they are published one after another; readers of txnbridge drop duplicates that late requests publish"
        ),
        Capability.ATOMIC_ACK: emulated("the record that decides the transaction has its acknowledgements"),
        Capability.ISOLATION: absent(
            "the broker ends one half message at a time, so a reader may see some messages of a transaction before the"
            " others are published"
        ),
        Capability.PARTITION_ORDER: NATIVE,
        Capability.GROUP_ORDER: NATIVE,
        Capability.FENCING: emulated(
            "after an opening of the id in the decision log, records of older owners do not count"
        ),
        Capability.PREPARE: emulated("the halves are stored, and a record in the decision log names them"),
        Capability.RESOLVE_ANYWHERE: emulated(
            "any process may decide in the log, whose prepare record lists the halves"
        ),
        Capability.STATUS_LOOKUP: emulated(
            "the decision log has the decision; a transaction of one message may have none: its message is looked up"
        ),
        Capability.IDEMPOTENT_SEND: emulated(
            "a message without an answer is looked up by its unique key; if it is not found, the publisher fails and"
            " does not send it again"
        ),
        Capability.RESUME_SEQUENCE: absent("the broker keeps no sequences of publishers"),
        Capability.DEADLINE: emulated(
            "when a broker sends a check-back about a half whose deadline is past, an open bridge of the application"
            " writes ABORT to the decision log and answers"
        ),
        Capability.LIST_OPEN: emulated(
            "the broker's own topic of halves is read from the position of its check-back service on, and the decision"
            " log says which are prepared"
        ),
        Capability.END_OPEN: emulated("ABORT is written to the decision log first, then the halves are dropped"),
        Capability.INDIVIDUAL_ACK: absent("a group's position in a queue is one number"),
        Capability.CONFLICT: emulated(
            "if two decisions acknowledge the same messages of a queue, the first one in the log counts"
        ),
        Capability.REDELIVERY: emulated("the reader goes back to the messages that were given back"),
        Capability.SHARE_MESSAGE: absent("each queue is read by one member of a group, in order"),
        Capability.SHARE_KEY: absent("each queue is read by one member of a group, in order"),
        Capability.START_BY_TIME: emulated(
            "the broker finds the first message stored since that time; from there on the reader looks for the first"
            " timestamp that is not earlier"
        ),
        Capability.REPLAY: NATIVE,
        Capability.TOMBSTONES: emulated("a property says that there is no value; the body holds one byte"),
        Capability.EMPTY_VALUE: emulated("a property says that the value is empty; the body holds one byte"),
        Capability.BINARY_HEADERS: emulated("a value that is not text is kept in base64 under another name"),
        Capability.REPEATED_HEADERS: emulated("further values of a name are kept under other names"),
        Capability.RENEWED_TOPICS: emulated(
            "the last read message's offset in the broker's commit log identifies the topic"
        ),
        Capability.BARE_HEADERS: absent("a message's properties are text with a name"),
        Capability.CHOOSE_PARTITION: NATIVE,
        Capability.TIMESTAMPS: emulated("a property, because brokers judge the age of a half by their own timestamp"),
        Capability.TOPIC_ADMIN: NATIVE,
        Capability.GROUP_ADMIN: absent(
            "not implemented; a group's positions are in the decision log, and `mqadmin consumerProgress` may differ"
        ),
        Capability.DECISION_LOG: emulated("a topic with one queue in which the first record for an id counts"),
        Capability.HALF_MESSAGES: NATIVE,
        Capability.SURVIVES_BROKER_KILL: NATIVE,
    },
)

_IN_ROCKSDB = absent("the broker keeps halves in RocksDB (transRocksDBEnable), where other processes cannot list them")
WITH_ROCKSDB: Mapping[Capability, Support] = dict.fromkeys((Capability.LIST_OPEN, Capability.END_OPEN), _IN_ROCKSDB)
REJECTED = "the broker with txnbridge's own topics accepts no transactions (rejectTransactionMessage)"

# Brokers accept bodies of 4 MiB by default. A process keeps all halves of a transaction until the last has ended.
LIMITS = Limits(message_bytes=4 << 20, transaction_messages=10_000)
