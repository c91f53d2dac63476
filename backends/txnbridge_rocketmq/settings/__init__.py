"""The options of a bridge to RocketMQ, and the settings that follow from its URL and options."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from txnbridge.errors import InvalidOption
from txnbridge.spi import Context, Option, Url
from txnbridge_rocketmq.capabilities import LIMITS
from txnbridge_rocketmq.settings.names import decoded, encoded, group_name, topic_name

if TYPE_CHECKING:  # the options are read by every process, the client only by processes that connect
    import ssl

    from txnbridge_rocketmq.client.connection import Credentials

_PORT = 9876  # the default port of name servers


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
    # The number of handed-out messages kept as reference records. Beyond it, half of the older ones are dropped.
    references: int = 2000
    # The filter for duplicates remembers messages in two generations of this size, and then forgets the older one. A
    # message takes some 200 bytes.
    remembered_messages: int = 10_000


@dataclass(frozen=True)
class RocketMQSettings:
    """The settings of a bridge: how to reach a cluster, and the names of the bridge's own topics and groups."""

    name_servers: tuple[str, ...]  # "host:port"
    timeout: float  # the bridge's default deadline in seconds
    hold: float | None  # seconds for which a prepared transaction waits to be ended
    application: str
    create_topics: int  # partitions of a topic that is created on first use; 0: topics are never created
    prefix: str = Option.setting("_txnbridge-", "the prefix of the names of txnbridge's own topics")
    access_key: str = Option.setting("", "the user in whose name requests are signed, for brokers that control access")
    secret_key: str = Option.setting("", "the user's secret; requests are signed with it", secret=True)
    security_token: str = Option.setting("", "the token of temporary keys", secret=True)
    tls: bool = Option.setting(False, "whether connections to name servers and brokers are encrypted")
    tls_ca: str = Option.setting("", "a PEM file with the authorities to trust; default: the system's")
    tls_certificate: str = Option.setting("", "a PEM file with the certificate to authenticate with")
    tls_key: str = Option.setting("", "a PEM file with the certificate's key, if it is not in the same file")
    tls_verify: bool = Option.setting(True, "whether the servers' certificates are checked")
    tls_verify_hostname: bool = Option.setting(True, "whether the servers' certificates must name their hosts")
    timing: RocketMQTiming = field(default_factory=RocketMQTiming)

    def log_topic(self, application: str) -> str:
        """Return the name of an application's decision log topic. Raise `InvalidOption` if the name is too long."""
        return topic_name(f"{self.prefix}log-{encoded(application)}")

    @property
    def cluster_topic(self) -> str:
        """The topic whose first record is the cluster's id. Empty topics named <this name>-<id>-… repeat the id."""
        return f"{self.prefix}cluster"

    def broker_topic(self, broker: str) -> str:
        """Return the name of the empty topic that records a broker. The name may be longer than brokers allow."""
        return f"{self.prefix}broker-{encoded(broker)}"

    def noted_brokers(self, topics: Iterable[str]) -> set[str]:
        """Return the brokers that topics named by `broker_topic` record."""
        begin = self.broker_topic("")
        return {decoded(topic.removeprefix(begin)) for topic in topics if topic.startswith(begin)}

    @property
    def producer_group(self) -> str:
        """The producer group of the application, to whose members brokers send check-backs.

        Its name begins with the prefix, because a gRPC proxy puts each producer of a topic into the group of the
        topic's name (hazard H134).
        """
        return group_name(f"{self._application_groups}{encoded(self.application)}")

    def application_of(self, producer_group: str) -> str | None:
        """Return the application for which `producer_group` is the name; None for any other name."""
        begin = self._application_groups
        return decoded(producer_group.removeprefix(begin)) if producer_group.startswith(begin) else None

    @property
    def _application_groups(self) -> str:
        return f"{self.prefix}app-"

    def half_group(self, group: str) -> str:
        """Return the producer group for a resolver group's half messages. Raise `InvalidOption` for long names."""
        return group_name(f"{self._half_groups}{encoded(self.application)}|{encoded(group)}")

    def group_of_halves(self, producer_group: str) -> tuple[str, str] | None:
        """Return the application and group for which `half_group` gives this name; None for any other name."""
        if not producer_group.startswith(self._half_groups):
            return None
        application, bar, group = producer_group.removeprefix(self._half_groups).partition("|")
        return (decoded(application), decoded(group)) if bar else None

    @property
    def _half_groups(self) -> str:
        return f"{self.prefix}half-"

    @property
    def url(self) -> str:
        """The URL without secrets, for commands in error texts."""
        return f"rocketmq://{','.join(self.name_servers)}"

    def credentials(self) -> Credentials | None:
        from txnbridge_rocketmq.client.connection import Credentials

        if not self.access_key:
            return None
        return Credentials(self.access_key, self.secret_key, self.security_token or None)

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the TLS context of all connections, or None. Raise `InvalidOption` if a file cannot be used."""
        import ssl

        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.tls_ca or None)
            if self.tls_certificate:
                context.load_cert_chain(self.tls_certificate, self.tls_key or None)
        except OSError as error:  # `ssl.SSLError` is a subclass
            raise InvalidOption(
                f"the files of tls_ca, tls_certificate and tls_key are not PEM files that fit together: {error}"
            ) from error
        context.check_hostname = self.tls_verify and self.tls_verify_hostname
        if not self.tls_verify:
            context.verify_mode = ssl.CERT_NONE
        return context

    def __reduce__(self) -> Any:
        raise TypeError("settings hold secrets; they are not pickled")


OPTIONS: Mapping[str, Option] = Option.of(RocketMQSettings)

# The name of an application follows the prefix, and a topic has 127 characters at most.
_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,60}")
_ONLY_WITH_TLS = ("tls_ca", "tls_certificate", "tls_key")


def parse_settings(url: Url, options: Mapping[str, Any], context: Context) -> RocketMQSettings:
    """Return the settings for a URL and options. Raise `InvalidOption` if a value is invalid."""
    for name in context.client_options:
        raise InvalidOption(f"the RocketMQ backend has no option {name!r}: its client has no options of its own")
    settings = RocketMQSettings(
        name_servers=_name_servers(url),
        timeout=context.timeout,
        hold=context.hold,
        application=context.application,
        create_topics=context.create_topics or 0,
        **options,
    )
    _check(settings)
    return settings


def _name_servers(url: Url) -> tuple[str, ...]:
    if not url.hosts:
        raise InvalidOption(f"{url}: a URL names the name servers, rocketmq://host:9876,host2:9876")
    if url.path not in ("", "/"):
        raise InvalidOption(f"{url}: a RocketMQ URL has no path; a topic's name goes into send() and consumer()")
    return tuple(f"{f'[{name}]' if ':' in name else name}:{port or _PORT}" for name, port in url.hosts)


def _check(settings: RocketMQSettings) -> None:
    if not _PREFIX.fullmatch(settings.prefix):
        raise InvalidOption("option 'prefix' is 1 to 60 letters, digits, '_' and '-'")
    if bool(settings.access_key) != bool(settings.secret_key):
        raise InvalidOption("options 'access_key' and 'secret_key' belong together")
    if settings.security_token and not settings.access_key:
        raise InvalidOption("option 'security_token' has no effect without 'access_key' and 'secret_key'")
    for name in _ONLY_WITH_TLS:
        if getattr(settings, name) and not settings.tls:
            raise InvalidOption(f"option {name!r} has no effect without 'tls'")
    if settings.tls_key and not settings.tls_certificate:
        raise InvalidOption("option 'tls_key' has no effect without 'tls_certificate'")
