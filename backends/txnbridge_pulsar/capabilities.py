"""The capabilities and limits of Pulsar through this backend, and capabilities that a cluster's settings remove."""

from __future__ import annotations

from collections.abc import Mapping

from txnbridge.spi import NATIVE, Capabilities, Capability, Level, Limits, Support, absent, emulated

# The broker's default is 5 MiB for an entry, which also holds the messages' metadata.
LIMITS = Limits(message_bytes=5_000_000)

CAPABILITIES = Capabilities(
    "Pulsar",
    {
        **dict.fromkeys(Capability, NATIVE),
        Capability.GROUP_ORDER: absent(
            "when a group goes back, for example because a transaction aborts, the broker may leave out entries, whose"
            " messages come later: once, but behind later ones"
        ),
        Capability.FENCING: emulated(
            "each transactional id has a fence topic, held by its newest owner, which names transactions there"
            " before they write; the opener aborts those of older owners"
        ),
        Capability.PREPARE: emulated(
            "a prepared transaction stays open at its coordinator, without its process, and a record says so"
        ),
        Capability.RESOLVE_ANYWHERE: emulated("any process may end a transaction by the id in its token"),
        Capability.STATUS_LOOKUP: emulated(
            "each transaction has a message on a proof topic of its writer, which is visible if it was committed"
        ),
        Capability.SHARE_MESSAGE: Support(
            Level.NATIVE,
            "messages that were sent as one entry go to one member together: messages of one transaction without a key,"
            " or with the same key",
        ),
        Capability.REPLAY: Support(
            Level.NATIVE,
            "a position is PositionLost if retention removed its ledger, or the topic was deleted and recreated."
            " Without admin_url a group does not notice a new topic, and reads it from its beginning",
        ),
        Capability.BINARY_HEADERS: emulated("a value that is not text is kept in base64 under another name"),
        Capability.BARE_HEADERS: absent("a property of a message needs a name and a value"),
        Capability.GROUP_ADMIN: absent("not implemented; use `pulsar-admin topics stats` and `reset-cursor`"),
        Capability.RESUME_SEQUENCE: Support(
            Level.NATIVE,
            "the broker forgets a name that is unused for 360 minutes"
            " (brokerDeduplicationProducerInactivityTimeoutMinutes); then the name can no longer send",
        ),
        Capability.DECISION_LOG: emulated("a topic without partitions in which the first record for an id counts"),
        Capability.HALF_MESSAGES: emulated(
            "txnbridge keeps them in a topic of each group; a resolver publishes those that the decision log commits"
        ),
    },
)

_NEEDS_REST = "it needs the option admin_url: only REST lists open transactions"
WITHOUT_REST: Mapping[Capability, Support] = {
    Capability.TOPIC_ADMIN: absent("it needs the option admin_url: topics are created and deleted by REST"),
    Capability.HALF_MESSAGES: absent("they need the option admin_url: their topic is created by REST"),
    Capability.LIST_OPEN: absent(_NEEDS_REST),
    Capability.END_OPEN: absent(_NEEDS_REST),
    Capability.RESUME_SEQUENCE: absent(
        "it needs the option admin_url: only REST says whether the broker removes duplicates, as sequences require"
    ),
}
WITHOUT_DEDUPLICATION: Mapping[Capability, Support] = {
    Capability.RESUME_SEQUENCE: absent(
        "brokers keep sequences only where they remove duplicates, and in this namespace they do not: set"
        " brokerDeduplicationEnabled, or pulsar-admin namespaces set-deduplication --enable TENANT/NAMESPACE"
    )
}
TRANSACTIONS_ARE_OFF = "transactions are off in this cluster (transactionCoordinatorEnabled)"
