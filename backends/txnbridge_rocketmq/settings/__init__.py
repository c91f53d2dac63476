"""What a bridge to RocketMQ was told, once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from txnbridge.errors import InvalidOption
from txnbridge.spi import Context, Option, Url
from txnbridge_rocketmq.settings.names import decoded, encoded, group_name, topic_name

if TYPE_CHECKING:  # the declaration of the options is read by everybody, the client only used by those who connect
    import ssl

    from txnbridge_rocketmq import client as remoting

_PORT = 9876  # of a name server without one, as everywhere with RocketMQ


@dataclass(frozen=True)
class Settings:
    """Everything that the rest of the backend asks about how to reach and use a cluster."""

    name_servers: tuple[str, ...]  # "host:port"
    timeout: float  # the bridge's default deadline in seconds
    hold: float | None
    application: str
    create_topics: int  # partitions of a missing topic; 0: never create
    prefix: str = "_txnbridge-"  # of every topic of our own
    access_key: str = ""
    secret_key: str = field(default="", repr=False)
    security_token: str = field(default="", repr=False)
    tls: bool = False
    tls_ca: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    tls_verify: bool = True
    tls_verify_hostname: bool = True

    def log_topic(self, application: str) -> str:
        """The topic of a decision log. Raises `InvalidOption` for an application whose name is too long."""
        return topic_name(f"{self.prefix}log-{encoded(application)}")

    @property
    def cluster_topic(self) -> str:
        """The topic whose first record names the cluster; with '-' behind it, how the topics begin that repeat it."""
        return f"{self.prefix}cluster"

    def broker_topic(self, broker: str) -> str:
        """The empty topic that notes that the cluster has a broker; too long a name for one where the broker's is."""
        return f"{self._broker_topics}{encoded(broker)}"

    def noted_broker(self, topic: str) -> str | None:
        """The broker that such a topic notes; None for other topics."""
        begin = self._broker_topics
        return decoded(topic.removeprefix(begin)) if topic.startswith(begin) else None

    @property
    def _broker_topics(self) -> str:
        return f"{self.prefix}broker-"

    @property
    def producer_group(self) -> str:
        """Whose members brokers ask what became of a half."""
        return group_name(encoded(self.application))

    def half_group(self, group: str) -> str:
        """The same for our half messages of this group. Raises `InvalidOption` for names that are too long."""
        return group_name(f"{self._half_groups}{encoded(self.application)}|{encoded(group)}")

    def shared_half_group(self, group: str) -> str:
        """The producer group of half messages that were stored before it named the application."""
        return group_name(f"{self._half_groups}{encoded(group)}")

    def group_of_halves(self, producer_group: str) -> tuple[str | None, str] | None:
        """The application, if it is named, and the group whose half messages are sent so; None for other ones."""
        if not producer_group.startswith(self._half_groups):
            return None
        *application, group = map(decoded, producer_group.removeprefix(self._half_groups).split("|"))
        return (application[0] if application else None), group

    @property
    def _half_groups(self) -> str:
        return f"{self.prefix}half-"

    @property
    def url(self) -> str:
        """Without secrets; for commands that a message tells to type."""
        return f"rocketmq://{','.join(self.name_servers)}"

    def credentials(self) -> remoting.Credentials | None:
        from txnbridge_rocketmq import client as remoting

        if not self.access_key:
            return None
        return remoting.Credentials(self.access_key, self.secret_key, self.security_token or None)

    def tls_context(self) -> ssl.SSLContext | None:
        """For connections to name servers and brokers. Raises `InvalidOption`."""
        import ssl

        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.tls_ca or None)
            if self.tls_certificate:
                context.load_cert_chain(self.tls_certificate, self.tls_key or None)
        except OSError as error:  # ssl.SSLError is one
            raise InvalidOption(
                f"the files of tls_ca, tls_certificate and tls_key are not PEM files that fit together: {error}"
            ) from error
        context.check_hostname = self.tls_verify and self.tls_verify_hostname
        if not self.tls_verify:
            context.verify_mode = ssl.CERT_NONE
        return context

    def __reduce__(self) -> Any:
        raise TypeError("settings hold secrets; they are not pickled")


_DEFAULTS = Settings((), 0, None, "", 0)

OPTIONS: Mapping[str, Option] = {
    "prefix": Option(str, _DEFAULTS.prefix, "how the names of our own topics begin"),
    "access_key": Option(str, "", "the user to sign requests for, where brokers control access"),
    "secret_key": Option(str, "", "the user's secret; requests are signed with it", secret=True),
    "security_token": Option(str, "", "the token that goes with temporary keys", secret=True),
    "tls": Option(bool, _DEFAULTS.tls, "whether connections to name servers and brokers are encrypted"),
    "tls_ca": Option(str, "", "a PEM file with the authorities to trust; without it the system's"),
    "tls_certificate": Option(str, "", "a PEM file with the certificate to authenticate with"),
    "tls_key": Option(str, "", "a PEM file with the certificate's key, if that is not beside it"),
    "tls_verify": Option(bool, _DEFAULTS.tls_verify, "whether the servers' certificates are checked"),
    "tls_verify_hostname": Option(
        bool, _DEFAULTS.tls_verify_hostname, "whether the servers' certificates must name their hosts"
    ),
}

# A topic has 127 characters at most, and the name of an application follows the prefix.
_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,60}")
_ONLY_WITH_TLS = ("tls_ca", "tls_certificate", "tls_key")


def read(url: Url, options: Mapping[str, Any], context: Context) -> Settings:
    """What a URL and our options say together. Raises `InvalidOption`."""
    for name in context.client_options:
        raise InvalidOption(
            f"the RocketMQ backend has no option {name!r}: its client is its own, and has none of its own"
        )
    settings = Settings(
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


def _check(settings: Settings) -> None:
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
