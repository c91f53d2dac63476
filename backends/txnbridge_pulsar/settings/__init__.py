"""The settings of a bridge to Pulsar, read once from the URL and the options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from txnbridge.errors import InvalidOption
from txnbridge.spi import HALF_CHECK_SECONDS, HALF_CHECKS, Context, Option, Url
from txnbridge_pulsar.settings.topic_names import Namespace, encoded

if TYPE_CHECKING:  # the options are read without connecting, which needs no client
    import ssl

    from txnbridge_pulsar import client as wire

_PORTS = {"pulsar": 6650, "pulsar+ssl": 6651}  # the ports of hosts without one, as in every client of Pulsar


@dataclass(frozen=True)
class Timing:
    """Durations in seconds, limits and sizes. Users cannot set them by options; tests change some of them."""

    # --- writing
    # A presence record serves the transactions that begin within this time. The record states until when any of them
    # can be open, and the cleanup drops the record long after that. Writing a record takes ten milliseconds.
    presence_seconds: float = 300.0
    # A writer writes a new presence record after this many transactions. To find an outcome, a proof topic is read from
    # the last presence record on, so the distance must stay short.
    transactions_per_presence: int = 1000
    # Half of a broker's default entry size: the next owner's first record has all of this one, and more.
    max_fence_record_bytes: int = 2_500_000
    # A writer or reader that closes after a commit waits this long for notices that topics were unloaded.
    unload_notice_seconds: float = 0.02

    # --- reading
    # Bytes that the inbox may hold; entries that were taken from the inbox may have as much again.
    reader_bytes: int = 32 * 1024 * 1024
    # The most delivery counts that are kept for one partition.
    max_delivery_counts: int = 1000
    # Seconds by which brokers time transactions out late.
    timeout_delay_seconds: float = 5.0
    # Seconds to wait for a REST answer, on which reading does not depend.
    rest_seconds: float = 3.0
    # After a REST timeout a reader sends no request for this many times as long: there would be one per partition.
    no_rest_factor: float = 10.0
    # Seconds between two checks why nothing comes from partitions. A check takes two requests for each partition, and a
    # dozen more if an open transaction is found.
    idle_check_seconds: float = 30.0

    # --- cleanup of proof topics
    # Seconds until the first cleanup, so that a short-lived bridge does none, and between two cleanups.
    first_cleanup_seconds: float = 5.0
    cleanup_every_seconds: float = 600.0
    # A token shows its transaction's outcome for this long after the deadline; clocks may differ by much less.
    token_valid_seconds: float = 3600.0

    # --- administration
    # A transaction that is open for longer is reported: no message after it can be read.
    long_open_seconds: float = 60.0
    # A prepared transaction is reported when less than this share of its time is left, while it can still be committed.
    expiry_warning_share: float = 0.25
    # Seconds after which a pending-ack store that is still opening counts as stuck: it reads some thousand records.
    store_opening_seconds: float = 10.0
    # Seconds for the first attempt to list open transactions; then all topics are loaded.
    listing_seconds: float = 3.0
    # Seconds to wait for a coordinator: one that knows a transaction answers in milliseconds.
    coordinator_seconds: float = 3.0


@dataclass(frozen=True)
class PulsarSettings:
    """The settings of one bridge: how to reach and use a cluster."""

    service: str  # "pulsar://host:port,host:port"
    namespace: Namespace
    timeout: float  # the bridge's default deadline in seconds
    hold: float | None
    application: str
    create_topics: int  # partitions of a missing topic; 0: topics are never created
    admin_url: str = Option.setting(
        "", "the brokers' REST interface, http://host:8080,host2:8080: topics are created and checked by it"
    )
    prefix: str = Option.setting("_txnbridge-", "the beginning of the names of internal topics")
    longest_transaction: float = Option.setting(
        900.0, "seconds that a transaction may be open; while it is, no later messages on its topics can be read"
    )
    prepared_ids: int = Option.setting(
        64, "how many prepared transactions of one transactional id may be open at once (1 to 1000)"
    )
    half_check_seconds: float = Option.setting(
        HALF_CHECK_SECONDS, "seconds from the first check-back of a half message to the second; then they double"
    )
    half_checks: int = Option.setting(
        HALF_CHECKS, "after this many check-backs without a decision a half message is parked"
    )
    compression: str = Option.setting(
        "none",
        "compression of messages; lz4, zstd and snappy need a package each",
        ("none", "lz4", "zlib", "zstd", "snappy"),
    )
    mix_keys: bool = Option.setting(
        False,
        "whether messages of different keys share entries: many times faster, but in a group that shares by key"
        " several members then get messages of the same key",
    )
    listener: str = Option.setting("", "the advertised listener to ask brokers for")
    token: str = Option.setting("", "the token to authenticate with", secret=True)
    token_file: str = Option.setting("", "a file with the token, read again whenever the broker asks for one")
    user: str = Option.setting("", "the user to authenticate as, with a password")
    password: str = Option.setting("", "the user's password", secret=True)
    tls_ca: str = Option.setting("", "a PEM file with the authorities to trust; default: the system's")
    tls_certificate: str = Option.setting("", "a PEM file with the certificate to authenticate with")
    tls_key: str = Option.setting("", "a PEM file with the certificate's key, if it is not in the same file")
    tls_verify: bool = Option.setting(True, "whether the brokers' certificates are checked")
    tls_verify_hostname: bool = Option.setting(True, "whether the brokers' certificates must name their hosts")
    timing: Timing = field(default_factory=Timing, repr=False)

    @property
    def tls(self) -> bool:
        return self.service.startswith("pulsar+ssl://")

    @property
    def pack(self) -> wire.Compression:
        """Return how this bridge compresses the payloads that it sends."""
        from txnbridge_pulsar import client as wire

        return wire.Compression[self.compression.upper()]

    @property
    def longest_prepared(self) -> float:
        """Return for how many seconds a transaction to be prepared may be open: its time-out plus the option `hold`."""
        return self.longest_transaction if self.hold is None else self.timeout + self.hold

    def log_topic(self, application: str) -> str:
        return f"{self.prefix}log-{encoded(application)}"

    @property
    def cluster_topic(self) -> str:
        """Return the name of the topic whose first record names the cluster."""
        return f"{self.prefix}cluster"

    @property
    def late_write_canary(self) -> str:
        """Return the name of the canary topic, which nobody reads.

        `outcome/late_writes` sends a late message of a transaction to this topic. The answer shows whether brokers
        refuse the transaction's late messages.
        """
        return f"{self.prefix}lamp"

    def authentication(self) -> wire.Authentication:
        from txnbridge_pulsar import client as wire

        if self.token_file:
            return wire.token_file(self.token_file)
        if self.token:
            return wire.token_authentication(self.token)
        if self.user:
            return wire.basic_authentication(self.user, self.password)
        return wire.TLS_AUTHENTICATION if self.tls_certificate else wire.NO_AUTHENTICATION

    def tls_context(self) -> ssl.SSLContext:
        """Return the TLS context for brokers and their REST interface. Raise `InvalidOption` if files are unusable."""
        from txnbridge_pulsar import client as wire

        files = (self.tls_ca or None, self.tls_certificate or None, self.tls_key or None)
        try:
            return wire.tls_context(*files, self.tls_verify_hostname, self.tls_verify)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise InvalidOption(
                f"the files of tls_ca, tls_certificate and tls_key are not PEM files that fit together: {error}"
            ) from error

    def __reduce__(self) -> Any:
        raise TypeError("settings hold secrets; they are not pickled")


OPTIONS: Mapping[str, Option] = Option.of(PulsarSettings)

_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,100}")
_MAX_PREPARED_IDS = 1000  # each takes a topic
# Options that have no effect on a connection without TLS.
_ONLY_WITH_TLS = ("tls_ca", "tls_certificate", "tls_key")


def read(url: Url, options: Mapping[str, Any], context: Context) -> PulsarSettings:
    """Read the settings from a URL and the backend's options. Raise `InvalidOption` if a value is invalid."""
    for name in context.client_options:
        raise InvalidOption(f"the Pulsar backend has no option {name!r}: its client has no options of its own")
    settings = PulsarSettings(
        service=_service(url),
        namespace=_namespace(url),
        timeout=context.timeout,
        hold=context.hold,
        application=context.application,
        create_topics=context.create_topics or 0,
        **{**options, "admin_url": options["admin_url"].rstrip("/")},
    )
    _check(settings)
    return settings


def _service(url: Url) -> str:
    if not url.hosts:
        raise InvalidOption(f"{url}: a broker's URL is pulsar://host:6650,host2:6650/tenant/namespace")
    default = _PORTS[url.scheme]
    hosts = (f"{f'[{name}]' if ':' in name else name}:{port or default}" for name, port in url.hosts)
    return f"{url.scheme}://{','.join(hosts)}"


def _namespace(url: Url) -> Namespace:
    parts = [part for part in url.path.split("/") if part]
    if not parts:
        return Namespace("public", "default")  # the default of every client of Pulsar
    if len(parts) != 2:
        raise InvalidOption(f"{url}: after the hosts comes /tenant/namespace; a topic's name is given to send()")
    return Namespace(*parts)


def _check(settings: PulsarSettings) -> None:
    if not _PREFIX.fullmatch(settings.prefix):
        raise InvalidOption("option 'prefix' is 1 to 100 letters, digits, '_' and '-'")
    if not 1 <= settings.prepared_ids <= _MAX_PREPARED_IDS:
        raise InvalidOption(f"option 'prepared_ids' is 1 to {_MAX_PREPARED_IDS}")
    _check_times(settings)
    if settings.admin_url and not re.match(r"https?://[^/@,]+(,[^/@,]+)*$", settings.admin_url):
        raise InvalidOption(
            "option 'admin_url' is http://host:8080,host2:8080, or with https:// before them, without path or password"
        )
    for name in _ONLY_WITH_TLS:
        if getattr(settings, name) and not (settings.tls or settings.admin_url.startswith("https:")):
            raise InvalidOption(f"option {name!r} has no effect without TLS: the URL begins with pulsar+ssl://")
    _check_credentials(settings)


def _check_times(settings: PulsarSettings) -> None:
    longest = settings.longest_transaction
    if not longest > 0:
        raise InvalidOption("option 'longest_transaction' is a number of seconds above 0")
    if settings.timeout + (settings.hold or 0) > longest:
        raise InvalidOption(
            f"timeout and hold are {settings.timeout + (settings.hold or 0):g} s together; the limit is {longest:g} s"
            " (option 'longest_transaction')"
        )


def _check_credentials(settings: PulsarSettings) -> None:
    if bool(settings.user) != bool(settings.password):
        raise InvalidOption("options 'user' and 'password' belong together")
    ways = {"token": settings.token, "token_file": settings.token_file, "user": settings.user}
    given = [name for name, value in ways.items() if value]
    if len(given) > 1:
        raise InvalidOption(f"options {' and '.join(map(repr, given))} are two ways to authenticate: give one")
    if settings.tls_key and not settings.tls_certificate:
        raise InvalidOption("option 'tls_key' has no effect without 'tls_certificate'")
