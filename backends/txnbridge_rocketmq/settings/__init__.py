"""The options of a bridge to RocketMQ, and the settings that follow from its URL and options."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from txnbridge.errors import InvalidOption
from txnbridge.spi import Context, Option, Url
from txnbridge_rocketmq.settings.names import decoded, encoded, group_name, topic_name
from txnbridge_rocketmq.settings.timing import RocketMQTiming

if TYPE_CHECKING:  # the options are read by every process, the client only by processes that connect
    import ssl

    from txnbridge_rocketmq.client.credentials import Credentials

_PORT = 9876  # the default port of name servers


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
        return f"{self._broker_topics}{encoded(broker)}"

    def noted_brokers(self, topics: Iterable[str]) -> set[str]:
        """Return the brokers that topics named by `broker_topic` record."""
        begin = self._broker_topics
        return {decoded(topic.removeprefix(begin)) for topic in topics if topic.startswith(begin)}

    @property
    def _broker_topics(self) -> str:
        return f"{self.prefix}broker-"

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
        from txnbridge_rocketmq.client.credentials import Credentials

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
