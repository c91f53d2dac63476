"""The capabilities and limits of RocketMQ through this backend, and capabilities that depend on brokers' settings."""

from __future__ import annotations

from collections.abc import Mapping

from txnbridge.spi import NATIVE, Capabilities, Capability, Limits, Support, absent, emulated

CAPABILITIES = Capabilities(
    "RocketMQ",
    {
        Capability.ATOMIC_TOPICS: emulated(
            "each message waits as a half of its own; one record in the decision log decides all of them, and then they"
            " are published one after another; a request that comes late publishes one again, and our readers drop it"
        ),
        Capability.ATOMIC_ACK: emulated("what was read is part of the record that decides the transaction"),
        Capability.ISOLATION: absent(
            "the broker ends one half message at a time, so a reader may see some messages of a transaction before the"
            " others are published"
        ),
        Capability.PARTITION_ORDER: NATIVE,
        Capability.GROUP_ORDER: NATIVE,
        Capability.FENCING: emulated("an opening of the id in the decision log voids what older owners write there"),
        Capability.PREPARE: emulated("the halves are stored, and a record in the decision log names them"),
        Capability.RESOLVE_ANYWHERE: emulated(
            "anybody may decide in the log, whose record of the preparation says which halves there are"
        ),
        Capability.STATUS_LOOKUP: emulated("the decision log tells what was decided"),
        Capability.IDEMPOTENT_SEND: emulated(
            "a message without an answer is looked up by its own id; where it is not found the publisher fails and does"
            " not send it again"
        ),
        Capability.RESUME_SEQUENCE: absent("the broker keeps no sequences of those who send"),
        Capability.DEADLINE: emulated(
            "when a broker asks about a half whose deadline is past, an open bridge of the application writes ABORT and"
            " answers"
        ),
        Capability.LIST_OPEN: emulated(
            "the broker's own topic of halves is read from where the broker stands in it, and the decision log tells"
            " which are prepared"
        ),
        Capability.END_OPEN: emulated("ABORT is written to the decision log first, then the halves are dropped"),
        Capability.INDIVIDUAL_ACK: absent("a group's place in a queue is one number"),
        Capability.CONFLICT: emulated(
            "of two decisions that acknowledge the same part of a queue the first one in the log counts"
        ),
        Capability.REDELIVERY: emulated("the reader goes back to what was given back"),
        Capability.SHARE_MESSAGE: absent("each queue is read by one member of a group, in order"),
        Capability.SHARE_KEY: absent("each queue is read by one member of a group, in order"),
        Capability.START_BY_TIME: emulated(
            "brokers know when they stored a message; from there on the reader looks for the first one stamped so late"
        ),
        Capability.REPLAY: NATIVE,
        Capability.TOMBSTONES: emulated("a property says that there is no value; the body holds one byte"),
        Capability.EMPTY_VALUE: emulated("a property says that the value is empty; the body holds one byte"),
        Capability.BINARY_HEADERS: emulated("a value that is not text is kept in base64 under another name"),
        Capability.REPEATED_HEADERS: emulated("further values of a name are kept under names of their own"),
        Capability.RENEWED_TOPICS: emulated("a queue is known by where the broker's commit log has a message of it"),
        Capability.BARE_HEADERS: absent("a message's properties are text with a name"),
        Capability.CHOOSE_PARTITION: NATIVE,
        Capability.TIMESTAMPS: emulated("a property, because brokers judge by their own how old a half is"),
        Capability.TOPIC_ADMIN: NATIVE,
        Capability.GROUP_ADMIN: absent(
            "it is not built: where a group stands is in the decision log, not in what `mqadmin consumerProgress` shows"
        ),
        Capability.DECISION_LOG: emulated("a topic with one queue in which the first record for an id counts"),
        Capability.HALF_MESSAGES: NATIVE,
        Capability.SURVIVES_BROKER_KILL: NATIVE,
    },
)

_IN_ROCKSDB = absent("the broker keeps halves in RocksDB (transRocksDBEnable), where nobody else can list them")
WITH_ROCKSDB: Mapping[Capability, Support] = dict.fromkeys((Capability.LIST_OPEN, Capability.END_OPEN), _IN_ROCKSDB)
_REJECTED = absent("the broker with our own topics takes no transactions (rejectTransactionMessage)")
WITHOUT_TRANSACTIONS: Mapping[Capability, Support] = dict.fromkeys(
    (
        Capability.ATOMIC_TOPICS,
        Capability.ATOMIC_ACK,
        Capability.FENCING,
        Capability.PREPARE,
        Capability.RESOLVE_ANYWHERE,
        Capability.STATUS_LOOKUP,
        Capability.DEADLINE,
        Capability.LIST_OPEN,
        Capability.END_OPEN,
        Capability.CONFLICT,
        Capability.HALF_MESSAGES,
    ),
    _REJECTED,
)

# Brokers accept bodies of 4 MiB by default. A process keeps all halves of a transaction in memory until the last has
# ended.
LIMITS = Limits(message_bytes=4 << 20, transaction_messages=10_000)
