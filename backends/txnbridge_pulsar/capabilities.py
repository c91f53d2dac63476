"""The capabilities and limits of Pulsar through this backend, and capabilities that depend on a cluster's settings."""

from __future__ import annotations

from collections.abc import Mapping

from txnbridge.spi import NATIVE, Capabilities, Capability, Level, Limits, Support, absent, emulated

# The broker's default is 5 MiB for an entry, which also holds the messages' metadata.
LIMITS = Limits(message_bytes=5_000_000)

CAPABILITIES = Capabilities(
    "Pulsar",
    {
        **dict.fromkeys(Capability, NATIVE),
        Capability.FENCING: emulated(
            "each transactional id has a fence topic, held by its newest owner, which names transactions there"
            " before they write; the opener aborts those of older owners"
        ),
        Capability.PREPARE: emulated(
            "an open transaction that nobody needs any more; a record of it was kept before. In groups that share by"
            " message or key it acknowledges only whole entries"
        ),
        Capability.RESOLVE_ANYWHERE: emulated("anybody may end a transaction whose number the token carries"),
        Capability.STATUS_LOOKUP: emulated(
            "each transaction has a message on a proof topic of its writer, which is visible if it was committed"
        ),
        Capability.SHARE_MESSAGE: Support(
            Level.NATIVE,
            "messages that were sent as one entry go to one member together: those of one transaction that have no key,"
            " or the same one",
        ),
        Capability.REPLAY: Support(
            Level.NATIVE,
            "a position whose ledger is gone is PositionLost: by retention, or because the topic was deleted and made"
            " anew. Without admin_url a group is not told of that, and reads such a topic from its beginning",
        ),
        Capability.BINARY_HEADERS: emulated("a value that is not text is kept in base64 under another name"),
        Capability.BARE_HEADERS: absent("a message's properties are text with a name"),
        Capability.GROUP_ADMIN: absent("it is not built; `pulsar-admin topics stats` and `reset-cursor` do it"),
        Capability.RESUME_SEQUENCE: Support(
            Level.NATIVE,
            "the broker forgets a name that nobody uses for 360 minutes, or as it is set"
            " (brokerDeduplicationProducerInactivityTimeoutMinutes); then nothing is sent under it any more",
        ),
        Capability.DECISION_LOG: emulated("a topic without partitions in which the first record for an id counts"),
        Capability.HALF_MESSAGES: absent("the broker asks nobody back"),
    },
)

_NEEDS_REST = "it needs the option admin_url: without REST the broker does not tell"
WITHOUT_REST: Mapping[Capability, Support] = {
    Capability.TOPIC_ADMIN: absent("it needs the option admin_url: topics are made and deleted by REST"),
    Capability.LIST_OPEN: absent(_NEEDS_REST),
    Capability.END_OPEN: absent(_NEEDS_REST),
    Capability.RESUME_SEQUENCE: absent(
        "it needs the option admin_url: only REST tells whether the broker removes duplicates, by which sequences are"
        " kept"
    ),
}
WITHOUT_DEDUPLICATION: Mapping[Capability, Support] = {
    Capability.RESUME_SEQUENCE: absent(
        "brokers do not remove duplicates in this namespace, and only where they do they keep sequences:"
        " brokerDeduplicationEnabled, or pulsar-admin namespaces set-deduplication --enable TENANT/NAMESPACE"
    )
}
_OFF = "transactions are off in this cluster (transactionCoordinatorEnabled)"
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
    ),
    absent(_OFF),
)
