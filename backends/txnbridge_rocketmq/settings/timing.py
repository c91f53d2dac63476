"""The durations and limits that tests change."""

from __future__ import annotations

from dataclasses import dataclass

from txnbridge_rocketmq.capabilities import LIMITS


@dataclass(frozen=True)
class RocketMQTiming:
    """Durations in seconds, and limits, that tests change. Other durations are constants in their modules."""

    # The assumed difference between the clocks of hosts (hazard H67). A host whose clock is ahead by more would abort
    # transactions that their owners can still commit. Clocks under NTP differ by milliseconds.
    clocks_differ: float = 5.0
    # Each message of a transaction is ended by itself, and its process keeps all of them in memory until then.
    transaction_messages: int = LIMITS.transaction_messages or 0

    # --- publishing ---------------------------------------------------------------------------------------------------

    # A published message can be looked up after a millisecond mostly, and after 67 on a busy machine. If another
    # process may have sent the commit just now, a second look-up follows after this time.
    index_delay: float = 0.25
    # For this long, a message is looked up that the broker claims to have. Not found by then, it counts as missing.
    index_timeout: float = 10.0
    # The wait between two such look-ups by a process that publishes, and by a reader, which looks up many messages.
    publish_look_up_pause: float = 0.01
    read_look_up_pause: float = 0.05
    # How long a look-up stays valid. A process may be suspended while it publishes, and others take over from a process
    # that publishes nothing for some seconds. Therefore a process repeats a look-up that is older than this before it
    # sends a commit (hazard H63).
    look_up_valid: float = 1.0
    # The number of messages published after one look-up, which takes much less time than a look-up stays valid.
    published_at_once: int = 64
    # The wait before END_TRANSACTION is repeated to a broker that is down or busy.
    end_pause: float = 0.05
    # While another process publishes a transaction: the time without a newly published message after which that process
    # counts as dead. A live broker publishes a message in milliseconds.
    publisher_stalled: float = 5.0

    # --- check-backs --------------------------------------------------------------------------------------------------

    # The time to settle one transaction, which may have thousands of messages to publish. The bridge settles one at a
    # time, and brokers repeat a check-back without a response.
    settle_timeout: float = 30.0
    # The wait before discarded halves that could not be ended are tried again: by then the decision log may be
    # available, or another process may have ended them.
    discarded_retry: float = 60.0
    # The least wait between two reads of the discarded halves, for brokers that discard halves soon.
    discarded_pause: float = 1.0
    # While a resolver decides a half message, further check-backs about it wait; for this long if the resolver does not
    # answer. The broker sends a check-back for each of its halves in each round.
    resolver_timeout: float = 30.0

    # --- reading ------------------------------------------------------------------------------------------------------

    # How long a member waits for the lock of a queue. The lock's holder may be dead, or in a long transaction.
    lock_timeout: float = 10.0
    # The wait before a failed or incomplete pull is repeated.
    pull_pause: float = 0.1
    # For this long, a missing record is requested again. A broker that has just started, or is dropping old messages,
    # may briefly report wrong bounds.
    missing_timeout: float = 3.0
    # A response holds fewer large messages, and further requests sent ahead are wasted. After this many full responses
    # the reader requests more messages at once again.
    full_responses: int = 100
    # The number of handed-out messages that are kept as reference records. Beyond it, half of the older ones are
    # dropped.
    references: int = 2000
    # The filter for duplicates remembers messages in two generations of this size, and then forgets the older one. A
    # message takes some 200 bytes.
    remembered_messages: int = 10_000
