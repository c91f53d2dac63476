"""The settings of a bridge to Kafka, read once from its URL and options."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from txnbridge.errors import InvalidOption
from txnbridge.spi import HALF_CHECK_SECONDS, HALF_CHECKS, Context, Option, Url
from txnbridge_kafka.settings import java, names, security

PORT = 9092  # for a host without a port, as in other Kafka clients


@dataclass(frozen=True)
class Timing:
    """The backend's internal durations and sizes, which tests override. Durations are in seconds."""

    # The interval of the monitor's checks. One request to each leader is cheap at this interval. Coordinators are asked
    # only about transactions that are open in two checks, which are few: most transactions end within milliseconds.
    monitor_interval: float = 10.0
    # If leaders list very many producers, the interval grows up to this: checks take one per cent of the time.
    monitor_longest_interval: float = 30.0
    # The longest poll for space in the client's buffer. After each poll the writer checks its deadline.
    buffer_poll: float = 0.05
    # How many messages a reader converts at a time. Many more would not fit into the processor's cache.
    converted_at_once: int = 1000
    # One poll takes buffered messages of the client until their values have so many bytes, a quarter of the client's
    # buffer: a poll for 10,000 large messages must not need gigabytes of memory.
    poll_bytes: int = 16 * 2**20


@dataclass(frozen=True)
class KafkaSettings:
    """The checked settings of a bridge to a Kafka cluster, for confluent-kafka's clients and for raw requests."""

    bootstrap: str  # "host:port,host:port"
    client: Mapping[str, Any] = field(repr=False)  # librdkafka's settings, for every confluent-kafka client
    access: security.Access = field(repr=False)  # the same settings for raw requests
    timeout: float  # the bridge's default deadline in seconds
    hold: float | None
    application: str
    create_topics: int  # partitions of a missing topic; 0: never create
    common_logs: bool = True  # whether its decision logs are where bridges with other settings find them
    prefix: str = Option.setting("_txnbridge-", "the prefix of the names of internal topics, such as decision logs")
    replicas: int = Option.setting(-1, "replicas of each topic that we create; -1: the broker's default")
    prepared_ids: int = Option.setting(
        64, "how many prepared transactions of one transactional id may be unresolved at once (1 to 1000)"
    )
    half_check_seconds: float = Option.setting(
        HALF_CHECK_SECONDS, "seconds from the first check-back of a half message to the second; then they double"
    )
    half_checks: int = Option.setting(
        HALF_CHECKS, "after this many check-backs without a decision a half message is parked"
    )
    group_protocol: str = Option.setting(
        "classic",
        "how groups share partitions: classic (members do it), consumer (the broker does, from 4.0 on)",
        ("classic", "consumer"),
    )
    assignment: str = Option.setting(
        "cooperative-sticky",
        "how members of a classic group share partitions",
        ("cooperative-sticky", "range", "roundrobin"),
    )
    log_level: int = Option.setting(
        6,
        "the client's log lines up to this syslog level go to `logging`: 3 errors, 4 warnings, 6 all but debugging",
        tuple(range(8)),
    )
    # The settings for producers only and for consumers only: a client of the other kind would log a warning about them.
    producer: Mapping[str, Any] = field(default_factory=dict, repr=False)
    consumer: Mapping[str, Any] = field(default_factory=dict, repr=False)

    advice: str = ""  # the settings to check, for the error if no connection can be made
    timing: Timing = field(default_factory=Timing)

    def log_topic(self, name: str) -> str:
        return f"{self.prefix}log-{name}"

    @property
    def soonest_retry(self) -> float:
        """Return a time in seconds within which no producer repeats a request: half of retry.backoff.ms.

        A producer waits for retry.backoff.ms ± 20 % before it repeats a request.
        """
        return float(self.client.get("retry.backoff.ms", 100)) / 2000

    def __reduce__(self) -> Any:
        raise TypeError("settings have secrets and cannot be pickled")


_RETRIES = 2_147_483_647  # the default of Kafka's Java client

OPTIONS: Mapping[str, Option] = {
    **Option.of(KafkaSettings),
    "acks": Option(str, "all", "which replicas confirm a message: all of them, as transactions need", ("all", "-1")),
    "retries": Option(int, _RETRIES, "has no effect from 1 on: what may pass is tried again until the deadline"),
}
# Options that other programs set, and that say what holds here anyway.
_WITHOUT_EFFECT = ("acks", "retries")

# A topic's name has at most 249 characters, and a decision log's name is the prefix and the application's name.
_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,100}")
_MOST_PREPARED_IDS = 1000  # a coordinator keeps each id in memory for seven days, and each is opened separately

_ALL_IN_ORDER = "a transaction needs each message stored once, in order, by all replicas in sync"
_ACKS = "the backend acknowledges messages, in transactions"
_LOG = "the backend learns from the client's log that a connection was lost; to see more or less of it: log_level"
_DEADLINE = "it follows from timeout= and hold= of connect() and transaction()"
_JAVA_PARTITIONER = "murmur2_random"
_PARTITIONER = "a key's partition is the one that Kafka's Java client picks"
_CODECS = "values and keys are bytes, or what a topic's codec makes of them"
_PLUGINS = "interceptors and metrics are plug-ins of txnbridge, which get its events and headers"
_REPORTS = "delivery reports are the writer's own"
_POLL = "the number is an argument of poll() and batches()"
_NOTHING_LIKE_IT = "the client library has no setting like it"
_KEYS = "certificates and keys are PEM files or text here, because two clients need them"
_OIDC = "only a client's id and secret are supported for a token endpoint"

# The client settings that a user may not set, each with the reason, which the error's text has.
REFUSED: Mapping[str, str] = {
    name: reason
    for reason, listed in {
        "the URL names the brokers": "bootstrap.servers metadata.broker.list bootstrap.controllers",
        "it is connect(transactional_id=…)": "transactional.id",
        _DEADLINE: "transaction.timeout.ms message.timeout.ms delivery.timeout.ms max.block.ms default.api.timeout.ms",
        _ALL_IN_ORDER: "enable.idempotence enable.gapless.guarantee request.required.acks queuing.strategy "
        "max.in.flight max.in.flight.requests.per.connection message.send.max.retries",
        "readers return committed messages only": "isolation.level",
        _ACKS: "enable.auto.commit auto.commit.enable auto.commit.interval.ms enable.auto.offset.store "
        "offset.store.method offset.store.path offset.store.sync.interval.ms",
        "it is consumer(start=…)": "auto.offset.reset",
        "it is consumer(group=…)": "group.id",
        "it is the option group_protocol": "group.protocol group.protocol.type",
        "it is the option assignment": "partition.assignment.strategy",
        "it is connect(create_topics=…)": "allow.auto.create.topics",
        "readers set it themselves": "enable.partition.eof",
        _LOG: "log.connection.close log.queue log.thread.name",
        "the backend does not deliver statistics": "statistics.interval.ms",
        _REPORTS: "delivery.report.only.error produce.offset.report",
        _PARTITIONER: "partitioner.class partitioner.ignore.keys partitioner.adaptive.partitioning.enable "
        "partitioner.availability.timeout.ms partitioner.rack.aware",
        _CODECS: "key.serializer value.serializer key.deserializer value.deserializer",
        _PLUGINS: "interceptor.classes plugin.library.paths metric.reporters metrics.num.samples "
        "metrics.recording.level metrics.sample.window.ms",
        _POLL: "max.poll.records consume.callback.max.messages",
        "share groups are not supported": "share.acknowledgement.mode share.acquire.mode",
        "prepared transactions work without it": "transaction.two.phase.commit.enable",
        "any value may be env:NAME or file:/path": "config.providers",
        "TLS 1.2 or newer is used": "ssl.protocol ssl.enabled.protocols",
        _KEYS: "ssl.engine.location ssl.engine.id ssl.providers ssl.engine.factory.class ssl.certificate.verify_cb",
        _OIDC: "enable.sasl.oauthbearer.unsecure.jwt sasl.oauthbearer.config sasl.oauthbearer.grant.type "
        "sasl.oauthbearer.metadata.authentication.type sasl.oauthbearer.assertion.algorithm "
        "sasl.oauthbearer.assertion.claim.aud sasl.oauthbearer.assertion.claim.exp.seconds "
        "sasl.oauthbearer.assertion.claim.iss sasl.oauthbearer.assertion.claim.jti.include "
        "sasl.oauthbearer.assertion.claim.nbf.seconds sasl.oauthbearer.assertion.claim.sub "
        "sasl.oauthbearer.assertion.file sasl.oauthbearer.assertion.jwt.template.file "
        "sasl.oauthbearer.assertion.template.file sasl.oauthbearer.assertion.private.key.file "
        "sasl.oauthbearer.assertion.private.key.passphrase sasl.oauthbearer.assertion.private.key.pem",
        security.KERBEROS: "sasl.kerberos.keytab sasl.kerberos.kinit.cmd sasl.kerberos.min.time.before.relogin "
        "sasl.kerberos.principal sasl.kerberos.service.name sasl.kerberos.ticket.renew.jitter "
        "sasl.kerberos.ticket.renew.window.factor",
        _NOTHING_LIKE_IT: "metadata.max.idle.ms exclude.internal.topics security.providers ssl.provider "
        "ssl.keymanager.algorithm ssl.trustmanager.algorithm ssl.secure.random.implementation "
        "socket.connection.setup.timeout.max.ms internal.throw.on.fetch.stable.offset.unsupported "
        "sasl.client.callback.handler.class sasl.login.class sasl.login.connect.timeout.ms sasl.login.read.timeout.ms "
        "sasl.login.refresh.buffer.seconds sasl.login.refresh.min.period.seconds sasl.login.refresh.window.factor "
        "sasl.login.refresh.window.jitter sasl.login.retry.backoff.max.ms sasl.login.retry.backoff.ms "
        "sasl.oauthbearer.clock.skew.seconds sasl.oauthbearer.expected.audience sasl.oauthbearer.expected.issuer "
        "sasl.oauthbearer.header.urlencode sasl.oauthbearer.jwks.endpoint.refresh.ms "
        "sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms sasl.oauthbearer.jwks.endpoint.retry.backoff.ms "
        "sasl.oauthbearer.jwks.endpoint.url sasl.oauthbearer.jwt.retriever.class "
        "sasl.oauthbearer.jwt.validator.class sasl.oauthbearer.scope.claim.name bootstrap.resolve.timeout.ms "
        "sasl.oauthbearer.allow.unverified.audience sasl.oauthbearer.allow.unverified.issuer "
        "metadata.cluster.check.enable buffer.memory.allocation.strategy",
    }.items()
    for name in listed.split()
}


# Refused settings with the values that are accepted, because the backend uses the same: other programs pass them.
_HARMLESS_VALUES: Mapping[str, frozenset[str]] = {
    "request.required.acks": frozenset({"all", "-1"}),
    "enable.idempotence": frozenset({"true"}),
    "isolation.level": frozenset({"read_committed"}),
    "enable.auto.commit": frozenset({"false"}),
    # An idempotent producer keeps the order with up to five requests.
    "max.in.flight": frozenset("12345"),
    "max.in.flight.requests.per.connection": frozenset("12345"),
}


def read(url: Url, options: Mapping[str, Any], context: Context) -> KafkaSettings:
    """Return the settings from a URL, its options and the client's settings. Raise `InvalidOption` if one is wrong."""
    bootstrap = _bootstrap(url)
    _check(options)
    given = {name: _value(name, value) for name, value in context.client_options.items()}
    given = {name: value for name, value in given.items() if value.lower() not in _HARMLESS_VALUES.get(name, ())}
    for name in given:
        if name in REFUSED:
            raise InvalidOption(f"{name!r} is not yours to set: {REFUSED[name]}")
    completed = security.complete(java.librdkafka_names(given))
    client, producer, consumer = _sorted({**_defaults(context.timeout), **completed})
    access = security.access(client)
    _check_by_creating_clients(client, producer, consumer, options["group_protocol"])
    return KafkaSettings(
        bootstrap=bootstrap,
        client={"bootstrap.servers": bootstrap, **client},
        access=access,
        timeout=context.timeout,
        hold=context.hold,
        application=context.application,
        create_topics=context.create_topics or 0,
        common_logs=context.own_logs and options["prefix"] == OPTIONS["prefix"].default,
        producer={"partitioner": _JAVA_PARTITIONER, **producer},
        consumer=consumer,
        advice=security.advice(client),
        **{name: value for name, value in options.items() if name not in _WITHOUT_EFFECT},
    )


def _bootstrap(url: Url) -> str:
    if not url.hosts:
        raise InvalidOption(f"{url}: a broker's URL is kafka://host:9092,host2:9092")
    if url.path not in ("", "/"):
        raise InvalidOption(f"{url}: a Kafka URL has no path; a topic's name goes into send() and consumer()")
    return ",".join(f"{f'[{name}]' if ':' in name else name}:{port or PORT}" for name, port in url.hosts)


def _check(options: Mapping[str, Any]) -> None:
    if not _PREFIX.fullmatch(options["prefix"]):
        raise InvalidOption("option 'prefix' is 1 to 100 letters, digits, '_' and '-'")
    if options["replicas"] != -1 and options["replicas"] < 1:
        raise InvalidOption("option 'replicas' is at least 1, or -1 for the broker's default")
    if not 1 <= options["prepared_ids"] <= _MOST_PREPARED_IDS:
        raise InvalidOption(f"option 'prepared_ids' is 1 to {_MOST_PREPARED_IDS}")
    if options["retries"] < 1:
        raise InvalidOption("option 'retries' is at least 1: a message whose answer was lost has to be sent again")
    if options["group_protocol"] == "consumer" and options["assignment"] != OPTIONS["assignment"].default:
        raise InvalidOption("with group_protocol=consumer the broker shares partitions: see 'group.remote.assignor'")


def _value(name: str, value: Any) -> str:
    """Return a client setting's value as text. Raise `InvalidOption` for a value of another type."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | int | float | os.PathLike):
        raise InvalidOption(f"option {name!r} must be text, a number or true or false")
    return str(value)


def _defaults(timeout: float) -> dict[str, str]:
    """Return the backend's defaults that differ from librdkafka's. The user's settings override them."""
    # Within one deadline a half-open connection must be noticed, and another tried. The client warns about less than
    # 1.5 seconds: a fetch waits at the broker for half a second, and the client wants one second more.
    patience = str(int(min(max(timeout / 3, 1.5), 10.0) * 1000))
    return {
        "client.id": "txnbridge",
        "socket.timeout.ms": patience,
        "socket.connection.setup.timeout.ms": patience,
        # A new client waits for half of this time before it connects to a broker. The client's default of 100 ms would
        # be most of the time to open a transactional id. Each attempt doubles the time.
        "reconnect.backoff.ms": "20",
        # The client's default of ten seconds between two connection attempts is too long for a deadline of thirty.
        "reconnect.backoff.max.ms": "1000",
        # Less than the broker's ten minutes: the broker might close an idle connection during a request.
        "connections.max.idle.ms": "540000",
        # By default a client creates a topic with a mistyped name if the broker allows that.
        "allow.auto.create.topics": "false",
    }


def _sorted(settings: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Return the settings for every client, for producers only, and for consumers only."""
    producer = {name: value for name, value in settings.items() if name in names.PRODUCER}
    consumer = {name: value for name, value in settings.items() if name in names.CONSUMER}
    own = {*producer, *consumer}
    return {name: value for name, value in settings.items() if name not in own}, producer, consumer


def _check_by_creating_clients(
    client: Mapping[str, str], producer: Mapping[str, str], consumer: Mapping[str, str], group_protocol: str
) -> None:
    """Check setting names and values by creating clients, which connect to no broker and fetch no OAuth token."""
    from confluent_kafka import Consumer, KafkaException, Producer

    tried = {**client, "sasl.oauthbearer.method": "default"}
    group = {"group.id": "settings", "group.protocol": group_protocol}
    try:
        Producer({**tried, **producer}, logger=_SilentLogger())
        Consumer({**tried, **consumer, **group}, logger=_SilentLogger()).close()
    except KafkaException as error:
        raise _refusal(error.args[0].str(), client) from None


class _SilentLogger:
    """A logger that drops the log lines of clients that only check settings: the real clients log them again."""

    def log(self, *line: object) -> None:
        pass


_UNKNOWN = re.compile(r'No such configuration property: "(.*)"')


def _refusal(text: str, client: Mapping[str, str]) -> InvalidOption:
    unknown = _UNKNOWN.search(text)
    if unknown:
        known = (names.COMMON | names.PRODUCER | names.CONSUMER | java.NAMES) - REFUSED.keys()
        near = difflib.get_close_matches(unknown[1], known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return InvalidOption(f"the Kafka client has no setting {unknown[1]!r}{hint}")
    for secret in security.secrets(client):
        text = text.replace(secret, "…")
    return InvalidOption(f"the Kafka client refuses a setting: {text.strip()}")
