"""Tests of a bridge's settings for both clients: no unknown setting is taken, and no secret is shown."""

import base64
import copy
import ctypes
import logging
import pickle
import shlex
import shutil
import ssl
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient
from hypothesis import example, given
from hypothesis import strategies as st
from txnbridge_kafka import settings
from txnbridge_kafka.settings import OPTIONS, REFUSED, KafkaSettings, java, names
from txnbridge_kafka.write.producer import LEAST_TIMEOUT_MS, ClientLogMonitor, TransactionalProducer

import txnbridge
from tests.java_kit import ask_java
from tests.kafka.certificates import Authority, openssl
from tests.kafka.kit import Lines
from txnbridge._base.url import parse_url, resolve_options
from txnbridge.errors import InvalidOption
from txnbridge.spi import Context, Emitter, Url

pytestmark = pytest.mark.offline

HERE = Url("kafka", (("127.0.0.1", None),), "", "kafka://127.0.0.1")
SECRET = "hunter2-of-us-all"
TLS, SASL = {"security.protocol": "SSL"}, {"security.protocol": "SASL_SSL"}
LISTED = "2.16.0"  # the librdkafka whose settings we list; a newer one may have more
PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"
OAUTH = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"


def read(
    told: Mapping[str, Any] | None = None, url: Url = HERE, timeout: float = 30.0, **options: Any
) -> KafkaSettings:
    context = Context("bridge", Emitter("bridge", ()), "app", timeout, None, None, told or {})
    return settings.read(url, {**{name: option.default for name, option in OPTIONS.items()}, **options}, context)


def refusal(told: Mapping[str, Any], **more: Any) -> str:
    with pytest.raises(InvalidOption) as caught:
        read(told, **more)
    return str(caught.value)


def test_the_logs_of_another_prefix_or_another_broker_are_not_where_others_look():
    plain = Context("bridge", Emitter("bridge", ()), "app", 30, None, None)
    options = {name: option.default for name, option in OPTIONS.items()}
    found = [settings.read(HERE, options, replace(plain, own_logs=own)).common_logs for own in (True, False)]
    assert [*found, read(prefix="mine-").common_logs] == [True, False, False]


def test_a_host_without_a_port_has_kafkas_own():
    hosts = (("h1", None), ("h2", 9093), ("::1", None))
    found = read(url=Url("kafka", hosts, "/", "kafka://h1,h2:9093,[::1]/"))
    assert found.bootstrap == found.client["bootstrap.servers"] == "h1:9092,h2:9093,[::1]:9092"


@pytest.mark.parametrize(
    ("url", "reason"),
    [("kafka://h/orders", "kafka://h/orders: a Kafka URL has no path"), ("kafka:h", "kafka://host:9092")],
)
def test_a_url_that_names_no_cluster_is_refused(url, reason):
    with pytest.raises(InvalidOption, match=reason):
        read(url=parse_url(url)[0])


OUT_OF_RANGE = {"prefix": ("", "a.b", "x" * 101), "replicas": (0, -2), "prepared_ids": (0, 1001)}


@pytest.mark.parametrize(
    "options",
    [
        *({name: value} for name, values in OUT_OF_RANGE.items() for value in values),
        {"group_protocol": "consumer", "assignment": "range"},
    ],
    ids=str,
)
def test_an_option_out_of_range_is_refused_by_name(options):
    assert any(name in refusal({}, **options) for name in options)


def test_options_and_defaults_arrive():
    found = read(replicas=3, prepared_ids=1000, group_protocol="consumer", prefix="x-")
    assert (found.replicas, found.prepared_ids, found.group_protocol, found.prefix) == (3, 1000, "consumer", "x-")
    assert (found.application, found.timeout, found.hold, found.create_topics) == ("app", 30.0, None, 0)


@pytest.mark.parametrize(("timeout", "patience"), [(0.5, 1500), (6, 2000), (30, 10_000), (600, 10_000)])
def test_a_half_open_connection_is_noticed_well_within_the_deadline(timeout, patience):
    found = read(timeout=timeout)
    assert int(found.client["socket.timeout.ms"]) == round(found.access.answer_seconds * 1000) == patience


def test_a_users_setting_wins_over_our_default():
    found = read({"client.id": "billing", "socket.timeout.ms": 2500})
    assert (found.client["client.id"], found.access.client_id) == ("billing", "billing")
    assert (found.client["socket.timeout.ms"], found.access.answer_seconds) == ("2500", 2.5)


def test_a_transaction_may_be_shorter_than_the_wait_for_an_answer():
    TransactionalProducer(read({"socket.timeout.ms": 60_000}), "shop.p0", LEAST_TIMEOUT_MS).drop()


@pytest.mark.live
@pytest.mark.timeout(600)  # the first start of a version fetches it
@pytest.mark.parametrize("times", [{"timeout": 901}, {"timeout": 60, "hold": 841}], ids=str)
def test_a_time_that_the_cluster_does_not_allow_is_refused_at_connect(kafka_broker, times):
    with pytest.raises(InvalidOption, match=r"901 s.* 900 s \(transaction\.max\.timeout\.ms\)"):
        txnbridge.connect(kafka_broker.url, **times)


@pytest.fixture(scope="module")
def librdkafka(tmp_path_factory) -> dict[str, str]:
    """Every setting of the library with P, C or * for who takes it, as the library itself lists them."""
    libraries = [*Path(confluent_kafka.__file__).parents[1].glob("confluent_kafka.libs/librdkafka*.so*")]
    if not libraries:
        pytest.skip("this confluent-kafka brings no library of its own to ask")
    listing = tmp_path_factory.mktemp("librdkafka") / "settings"
    libc, library = ctypes.CDLL(None), ctypes.CDLL(str(libraries[0]))
    libc.fopen.restype = ctypes.c_void_p
    file = ctypes.c_void_p(libc.fopen(str(listing).encode(), b"w"))
    library.rd_kafka_conf_properties_show(file)
    libc.fclose(file)
    rows = [[cell.strip() for cell in line.split("|")] for line in listing.read_text().splitlines()]
    return {row[0]: row[1] for row in rows if len(row) > 4 and "." in row[0]}


def test_every_setting_of_the_client_is_sorted_as_it_sorts_them_or_refused(librdkafka):
    translated = java.NAMES - names.COMMON
    ours = dict.fromkeys(names.PRODUCER, "P") | dict.fromkeys(names.CONSUMER, "C") | dict.fromkeys(names.COMMON, "*")
    assert len(librdkafka) > 150
    sorted_by_it = {n: kind for n, kind in librdkafka.items() if n not in REFUSED and n not in translated}
    assert sorted_by_it.items() >= ours.items()
    if confluent_kafka.libversion()[0] == LISTED:
        assert sorted_by_it == ours


@pytest.mark.live  # it starts Java
def test_every_setting_of_the_java_clients_is_taken_translated_or_refused(tmp_path):
    imports = "org.apache.kafka.clients.producer.ProducerConfig org.apache.kafka.clients.consumer.ConsumerConfig"
    each = "for (var n : {}Config.configNames()) System.out.println(n);"
    listed = ask_java(tmp_path, imports, each.format("Producer") + each.format("Consumer"))
    assert len(set(listed)) > 100
    known = names.PRODUCER | names.CONSUMER | names.COMMON | REFUSED.keys() | java.NAMES
    # A name without a dot could not be told from an option of ours: the core refuses it.
    assert {name for name in listed if "." in name} - known == set()


NEAREST = {"lingr.ms": "linger.ms", "compresion.type": "compression.type", "sasl.jaas.cfg": "sasl.jaas.config"}
NEAREST |= {"ssl.truststore.locations": "ssl.truststore.location"}


@pytest.mark.parametrize(("name", "nearest"), NEAREST.items())
def test_an_unknown_setting_is_refused_with_the_nearest_known_one(name, nearest):
    assert refusal({name: "1"}) == f"the Kafka client has no setting {name!r}; did you mean {nearest!r}?"


HOLDS = {"enable.idempotence": True, "isolation.level": "read_committed", "request.required.acks": "all"}


@pytest.mark.parametrize("told", [*HOLDS.items(), ("max.in.flight.requests.per.connection", 1)], ids=lambda t: t[0])
def test_a_setting_that_holds_anyway_may_be_given(told: tuple[str, object]) -> None:
    assert read(dict([told])) == read({})


def test_acks_and_retries_of_other_programs_may_be_said_where_they_change_nothing():
    ours, clients = resolve_options(OPTIONS, {"acks": "all", "retries": "3", "linger.ms": "5"}, "kafka")
    assert read(clients, **ours) == read({"linger.ms": "5"})
    with pytest.raises(InvalidOption, match="'acks' must be one of 'all', '-1'"):
        resolve_options(OPTIONS, {"acks": "1"}, "kafka")
    with pytest.raises(InvalidOption, match="'retries' is at least 1"):
        read({}, retries=0)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_setting_with_an_owner_is_refused_with_the_reason(name):
    assert refusal({name: "7"}) == f"{name!r} is not yours to set: {REFUSED[name]}"


@pytest.mark.parametrize(
    "told",
    [{"linger.ms": "soon"}, {"fetch.min.bytes": -1}, {"security.protocol": "TLS"}, {"socket.timeout.ms": "soon"}],
    ids=str,
)
def test_a_value_that_the_client_does_not_take_is_refused(told):
    (name,) = told
    assert name in refusal(told).replace("queue.buffering.max.ms", "linger.ms")  # librdkafka's own name for it


@pytest.mark.parametrize("value", [None, {}, [], b"x", print])
def test_a_value_of_a_kind_that_no_setting_has_is_refused(value):
    assert "'linger.ms' must be text, a number or true or false" in refusal({"linger.ms": value})


def test_values_may_be_numbers_truth_values_and_paths(tmp_path):
    authority = Authority(tmp_path, "ours")
    told = {"security.protocol": "ssl", "ssl.ca.location": authority.certificate, "check.crcs": True, "linger.ms": 2.5}
    found = read(told)
    assert (found.consumer["check.crcs"], found.producer["linger.ms"]) == ("true", "2.5")
    assert found.client["ssl.ca.location"] == str(authority.certificate)


def test_no_client_warns_about_what_is_for_another_kind():
    lines = Lines()
    told = {"linger.ms": 5, "compression.type": "lz4", "fetch.min.bytes": 10, "session.timeout.ms": 6000}
    found = read({**told, "max.partition.fetch.bytes": 1000, "buffer.memory": 1 << 20, "client.rack": "r"})
    producer = Producer({**found.client, **found.producer}, logger=lines)
    producer.poll(0)
    consumer = Consumer({**found.client, **found.consumer, "group.id": "g"}, logger=lines)
    consumer.poll(0)
    consumer.close()
    AdminClient(dict(found.client), logger=lines).poll(0)
    assert [line for line in lines if "CONFWARN" in line] == []
    # And such a warning would be seen.
    Producer({**found.client, **found.consumer}, logger=lines).poll(0)
    assert any("CONFWARN" in line and "fetch.min.bytes" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "value", "place", "target", "result"),
    [
        ("fetch.max.wait.ms", 100, "consumer", "fetch.wait.max.ms", "100"),
        ("max.request.size", 2_000_000, "client", "message.max.bytes", "2000000"),
        ("buffer.memory", 33554432, "producer", "queue.buffering.max.kbytes", "32768"),
        ("buffer.memory", 1, "producer", "queue.buffering.max.kbytes", "1"),
        ("send.buffer.bytes", -1, "client", "socket.send.buffer.bytes", "0"),
        ("receive.buffer.bytes", 65536, "client", "socket.receive.buffer.bytes", "65536"),
        ("compression.zstd.level", 3, "producer", "compression.level", "3"),
        ("batch.size", 16384, "producer", "batch.size", "16384"),
        ("linger.ms", 0, "producer", "linger.ms", "0"),
        ("max.poll.interval.ms", 60000, "consumer", "max.poll.interval.ms", "60000"),
        ("retry.backoff.ms", 50, "client", "retry.backoff.ms", "50"),
    ],
)
def test_a_java_name_becomes_the_clients_own(name, value, place, target, result):
    assert getattr(read({name: value}), place)[target] == result


def test_a_java_number_that_is_none_is_refused():
    assert refusal({"buffer.memory": "32MB"}) == "option 'buffer.memory' must be a whole number"


@pytest.mark.parametrize(
    "told",
    [
        {"compression.lz4.level": 1, "compression.level": 2},
        {"max.request.size": 5000, "message.max.bytes": 5000},
        {"sasl.mechanism": "PLAIN", "sasl.mechanisms": "PLAIN", "security.protocol": "SASL_SSL"},
        {"sasl.jaas.config": f'{PLAIN} required username="u" password="p";', "sasl.username": "u"},
    ],
    ids=lambda told: next(iter(told)),
)
def test_the_same_setting_under_two_names_is_refused(told):
    assert "is given twice: also under" in refusal(told)


ALGORITHM, VERIFICATION = "ssl.endpoint.identification.algorithm", "enable.ssl.certificate.verification"


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, (True, ssl.CERT_REQUIRED)),
        ({ALGORITHM: ""}, (False, ssl.CERT_REQUIRED)),
        *[({VERIFICATION: no}, (False, ssl.CERT_NONE)) for no in ("false", "False", "0", False)],
    ],
)
def test_certificates_and_names_are_checked_unless_that_is_given_up(told, expected):
    found = read({**TLS, **told})
    assert found.client.get(ALGORITHM) == ("none" if ALGORITHM in told else None)
    context = found.access.tls
    assert context is not None
    assert (context.check_hostname, context.verify_mode) == expected
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("name", ["ssl.ca.location", "ssl.keystore.key", "ssl.key.password"])
def test_tls_settings_without_tls_are_refused(name):
    assert "has no effect without security.protocol=SSL or SASL_SSL" in refusal({name: "x"})


def pem(authority: Authority, password: str = "") -> dict[str, Any]:
    mine = authority.issue("client", password)
    files = {"ca": authority.certificate, "certificate": mine.certificate, "key": mine.key}
    sealed = {"ssl.key.password": password} if password else {}
    return {**TLS, **{f"ssl.{name}.location": str(path) for name, path in files.items()}, **sealed}


def as_java_files(authority: Authority) -> dict[str, Any]:
    trust = {"ssl.truststore.type": "PEM", "ssl.truststore.location": str(authority.certificate)}
    store = str(authority.issue("client", SECRET).store)
    return {**TLS, **trust, "ssl.keystore.type": "pem", "ssl.keystore.location": store, "ssl.key.password": SECRET}


def as_java_text(authority: Authority) -> dict[str, Any]:
    mine = authority.issue("client")
    trust = {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": authority.certificate.read_text()}
    store = {"ssl.keystore.type": "PEM", "ssl.keystore.certificate.chain": mine.certificate.read_text()}
    return {**TLS, **trust, **store, "ssl.keystore.key": mine.key.read_text()}


@pytest.mark.parametrize(
    "tell",
    [pem, lambda authority: pem(authority, SECRET), as_java_files, as_java_text],
    ids=["files", "sealed", "java-files", "java-text"],
)
def test_pem_is_taken_in_every_form(tmp_path, tell):
    context = read(tell(Authority(tmp_path, "ours"))).access.tls
    assert context is not None
    assert context.cert_store_stats()["x509_ca"] == 1  # ours, and none of the system's


@pytest.mark.parametrize("name", ["ssl.certificate.location", "ssl.key.location"])
def test_half_a_certificate_is_refused(tmp_path, name):
    told = pem(Authority(tmp_path, "ours"))
    del told[name]
    assert "needs both" in refusal(told)


@pytest.mark.parametrize("password", ["", "wrong"])
def test_a_key_that_cannot_be_opened_is_refused_and_nobody_is_asked(tmp_path, password):
    told = {**pem(Authority(tmp_path, "ours"), SECRET), "ssl.key.password": password}
    reason = refusal(told)
    assert "ssl.key" in reason and SECRET not in reason


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ({"ssl.ca.location": "/nowhere/ca.pem"}, "ssl.ca.location cannot be used: No such file"),
        ({"ssl.ca.pem": SECRET}, "ssl.ca.pem cannot be used"),
        ({"ssl.crl.location": "/nowhere"}, "ssl.crl.location cannot be used"),
        ({"ssl.cipher.suites": "NONE-OF-THESE"}, "ssl.cipher.suites cannot be used"),
        ({"ssl.certificate.pem": SECRET, "ssl.key.pem": SECRET}, "'ssl.key…' cannot be used"),
    ],
    ids=lambda told: next(iter(told)) if isinstance(told, dict) else "",
)
def test_a_setting_that_tls_cannot_use_is_named(told, named):
    reason = refusal({**TLS, **told})
    assert named in reason and SECRET not in reason


def keytool(line: str, password: str) -> None:
    """Run a line of commands as a person would, who types the passwords that each asks for."""
    if "keytool" in line and not shutil.which("keytool"):
        pytest.skip("needs Java's keytool")
    for command in line.split(" && "):
        run = subprocess.run(command, shell=True, input=f"{password}\n" * 4, capture_output=True, text=True)
        assert run.returncode == 0, (command, run.stderr)


@pytest.fixture
def stores(tmp_path, tmp_path_factory) -> tuple[Path, Authority]:
    """A folder with a blank in its name, with a trust store and a key store of each kind."""
    folder = tmp_path / "my stores"
    folder.mkdir()
    authority = Authority(folder, "ours")
    mine = authority.issue("client")
    openssl("pkcs12", "-export", "-in", mine.store, "-out", folder / "key.p12", "-passout", f"pass:{SECRET}")
    return folder, authority


def commanded(reason: str) -> str:
    assert "must be a PEM file here" in reason
    return reason.partition("convert the store by: ")[2]


@pytest.mark.live  # it starts Java
@pytest.mark.parametrize("kind", ["JKS", "PKCS12"])
def test_a_java_trust_store_is_refused_with_the_command_that_converts_it(stores, kind):
    folder, authority = stores
    store, password = folder / "trust.jks", ["-storetype", kind, "-storepass", SECRET, "-noprompt"]
    line = ["keytool", "-importcert", "-file", str(authority.certificate), "-keystore", str(store), *password]
    keytool(shlex.join(line), "")
    told = {"security.protocol": "SSL", "ssl.truststore.location": store, "ssl.truststore.password": SECRET}
    reason = refusal({**told, "ssl.truststore.type": kind})
    assert SECRET not in reason
    keytool(commanded(reason), SECRET)
    converted = {"ssl.truststore.location": folder / "trust.pem", "ssl.truststore.type": "PEM"}
    context = read({"security.protocol": "SSL", **converted}).access.tls
    assert context is not None
    assert context.cert_store_stats()["x509_ca"] == 1


@pytest.mark.live  # it starts Java
@pytest.mark.parametrize("kind", ["JKS", "PKCS12", ""])
def test_a_java_key_store_is_refused_with_the_command_that_converts_it(stores, kind):
    folder, _ = stores
    store = folder / "key.p12"
    if kind == "JKS":
        store = folder / "key.jks"
        line = ["keytool", "-importkeystore", "-srckeystore", str(folder / "key.p12"), "-srcstorepass", SECRET]
        keytool(shlex.join([*line, "-destkeystore", str(store), "-deststoretype", "JKS", "-deststorepass", SECRET]), "")
    told = {"security.protocol": "SSL", "ssl.keystore.location": store, "ssl.keystore.password": SECRET}
    reason = refusal({**told, **({"ssl.keystore.type": kind} if kind else {})})
    assert SECRET not in reason
    keytool(commanded(reason), SECRET)
    read({"security.protocol": "SSL", "ssl.keystore.location": folder / "key.pem", "ssl.keystore.type": "PEM"})


@pytest.mark.parametrize(
    "told",
    [
        {"ssl.truststore.password": SECRET},
        {"ssl.keystore.type": "JKS"},
        {"ssl.truststore.location": "/ca.pem", "ssl.truststore.type": "PEM", "ssl.truststore.password": SECRET},
    ],
    ids=str,
)
def test_a_setting_that_a_store_does_not_need_is_refused(told):
    reason = refusal({**TLS, **told})
    assert next(iter(told)).rpartition(".")[0] in reason and SECRET not in reason


@pytest.mark.parametrize("line", [False, True], ids=["own-names", "jaas"])
@pytest.mark.parametrize(
    ("mechanism", "module"), [("PLAIN", PLAIN), ("SCRAM-SHA-256", SCRAM), ("SCRAM-SHA-512", SCRAM)]
)
def test_a_password_reaches_both_clients(mechanism, module, line):
    told = {"sasl.username": "anna", "sasl.password": SECRET}
    if line:
        told = {"sasl.jaas.config": f'{module} required username="anna" password="{SECRET}";'}
    found = read({**told, "security.protocol": "sasl_ssl", "sasl.mechanism": mechanism.lower()})
    assert (found.client["sasl.username"], found.client["sasl.password"]) == ("anna", SECRET)
    assert (found.access.username, found.access.password) == ("anna", SECRET)
    assert found.client["sasl.mechanism"] == found.access.mechanism == mechanism
    assert found.client["security.protocol"] == "SASL_SSL" and found.access.tls is not None


ENDPOINT, HANDLER = "sasl.oauthbearer.token.endpoint.url", "sasl.login.callback.handler.class"
OAUTH_LOGIN = {
    "sasl.mechanism": "OAUTHBEARER",
    ENDPOINT: "https://id.example/token",
    "sasl.oauthbearer.client.id": "app",
    "sasl.oauthbearer.client.secret": SECRET,
}


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ({"sasl.username": "u"}, "'sasl.username' has no effect without security.protocol=SASL_SSL"),
        (SASL, "'sasl.mechanism' is one of PLAIN"),
        ({**SASL, "sasl.mechanism": "GSSAPI"}, "Kerberos is not supported"),
        ({**SASL, "sasl.mechanism": "PLAIN", "sasl.username": "u"}, "needs 'sasl.password'"),
        ({**SASL, "sasl.mechanism": "OAUTHBEARER"}, "needs 'sasl.oauthbearer.token.endpoint"),
        ({**SASL, **OAUTH_LOGIN, ENDPOINT: "id.example/token"}, f"{ENDPOINT!r} is a URL with https://"),
        ({HANDLER: "org.example.Mine"}, f"{HANDLER!r} names a Java class"),
    ],
)
def test_a_login_that_is_not_whole_is_refused(told, named):
    assert named in refusal(told)


def test_an_oauth_login_of_java_reaches_both_clients():
    handler = "org.apache.kafka.common.security.oauthbearer.secured.OAuthBearerLoginCallbackHandler"
    line = f"{OAUTH} required clientId=app clientSecret='{SECRET}' scope='a b' extension_pool=x;"
    found = read({**SASL, ENDPOINT: "https://id.example/token", HANDLER: handler, "sasl.jaas.config": line})
    assert found.client["sasl.oauthbearer.method"] == "oidc"
    assert found.client["sasl.oauthbearer.client.secret"] == SECRET
    assert (found.client["sasl.oauthbearer.scope"], found.client["sasl.oauthbearer.extensions"]) == ("a b", "pool=x")
    assert found.access.tokens is not None
    assert found.access.tokens.extensions() == {"pool": "x"}


@pytest.mark.parametrize(
    ("line", "module", "options"),
    [
        ("a.B required;", "a.B", {}),
        ("a.B required\n  x=y // the rest\n  z='q' /* of\nit */;", "a.B", {"x": "y", "z": "q"}),
        (r'a.B OPTIONAL p="a\"b\\c;=\'" ;  ', "a.B", {"p": "a\"b\\c;='"}),
        (r'a.B required p="\101\7x\n\q\377";', "a.B", {"p": "A\7x\nq\377"}),
        ("a.B required p='say \"x\"';", "a.B", {"p": 'say "x"'}),
        ('a.B required p="";', "a.B", {"p": ""}),
        ("a.B required p=x p=y;", "a.B", {"p": "y"}),
    ],
)
def test_a_jaas_line_is_read(line, module, options):
    assert java.parse_jaas(line) == (module, options)


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r") + '"'


@given(
    st.dictionaries(st.from_regex(r"[A-Za-z_]\w*", fullmatch=True), st.text()), st.sampled_from([" ", "\n", "/*x*/"])
)
def test_any_value_survives_a_jaas_line(options, space):
    line = space.join(["a.B", "required", *(f"{name}={quoted(value)}" for name, value in options.items()), ";"])
    assert java.parse_jaas(line) == ("a.B", options)


JAAS_PARTS = ["a.B", "required", "x", "=", ";", '"', "'", "\\", " ", "\n", "//", "/*", "*/", '"y"', "é", "1", "\\4"]


def told_about(line: str) -> str:
    """Return the refusal of a line; empty if the line can be used."""
    try:
        java.login(line, "PLAIN")
    except InvalidOption as error:
        return str(error)
    return ""


@given(st.one_of(st.text(), st.lists(st.sampled_from(JAAS_PARTS)).map("".join)))
@example('a.B required x="')
@example("a.B required x=;")
def test_any_jaas_line_is_read_or_refused(line):
    assert told_about(line)  # none of them names a login module that we know


@given(st.text(alphabet=st.characters(categories=["Lo", "Nd"]), min_size=6))
def test_a_secret_in_a_line_that_cannot_be_used_is_not_shown(secret):
    for line in (
        f"{PLAIN} required password={secret}",
        f'{PLAIN} required password="{secret}',
        f'{PLAIN} required username="u" {secret}="x";',
        f'{SCRAM} required password="{secret}";',
        f"{secret} {secret}",
        f"{secret} required;",
    ):
        reason = told_about(line)
        assert reason and secret not in reason


JAAS_OF_JAVA = """
var in = new BufferedReader(new InputStreamReader(System.in, "UTF-8"));
for (String line; (line = in.readLine()) != null; ) {
    String jaas = new String(Base64.getDecoder().decode(line), "UTF-8");
    try {
        var entries = JaasContext.loadClientContext(Map.of("sasl.jaas.config", new Password(jaas)))
            .configurationEntries();
        var words = new ArrayList<String>(List.of(entries.get(0).getLoginModuleName()));
        entries.get(0).getOptions().forEach((name, value) -> { words.add(name); words.add((String) value); });
        for (var word : words) System.out.print(Base64.getEncoder().encodeToString(word.getBytes("UTF-8")) + ",");
        System.out.println();
    } catch (Exception e) { System.out.println("-"); }
}
"""


Jaas = tuple[str, dict[str, str]] | None


def parsed_by_java(folder: Path, lines: list[str]) -> list[Jaas]:
    """Let Kafka's own reader of JAAS lines read these."""

    def parsed(answer: str) -> Jaas:
        module, *pairs = (base64.b64decode(word).decode() for word in answer.split(",")[:-1])
        return module, dict(zip(pairs[::2], pairs[1::2], strict=True))

    imports = "org.apache.kafka.common.security.JaasContext org.apache.kafka.common.config.types.Password"
    sent = [base64.b64encode(line.encode()).decode() for line in lines]
    return [None if answer == "-" else parsed(answer) for answer in ask_java(folder, imports, JAAS_OF_JAVA, sent)]


def ours(line: str) -> Jaas:
    try:
        return java.parse_jaas(line)
    except InvalidOption:
        return None


@pytest.mark.live  # it starts Java
def test_a_jaas_line_is_read_as_java_reads_it(tmp_path):
    lines = [
        "a.B required;",
        "a.B required",
        "a.B x=y;",
        "a.B required x=y z=\"q r\" u='v';",
        'a.B required x="a\\"b\\\\c" y="\\101\\7z\\n\\q";',
        "a.B required // note\n x=y /* more\n */ ;",
        "a.B required x=y; c.D required;",
        'a.B required x="y";;',
        'a.B sufficient password="p;w=d\'";',
        'a.B required x="";',
        "a.B required x=;",
        "a.B required x;",
        "a.B required =x;",
        "a.B required x=1;",
        "a.B required x=y@z;",
        "",
        "   ",
        "a.B requisite x_y-z$='\\400\\08';",
        "a.B\trequired\r\nx=y;\n\n",
        "a.B required a=b-c d=e.f;",
    ]
    assert [ours(line) for line in lines] == parsed_by_java(tmp_path, lines)


@pytest.mark.live  # it starts Java
def test_no_jaas_line_is_read_in_another_way_than_java_reads_it(tmp_path):
    random = Random("jaas")
    parts = [*JAAS_PARTS, "/", "-1", "z@w", "$", ":", "'q'", "\r", "\t", ",", "x=y", 'x="y"', "#", "2a"]
    lines = ["a.B required " + "".join(random.choices(parts, k=random.randrange(12))) + ";" for _ in range(3000)]
    both = [
        (mine, javas)
        for line, javas in zip(lines, parsed_by_java(tmp_path, lines), strict=True)
        if (mine := ours(line)) and javas
    ]
    assert len(both) > 100
    assert [mine for mine, _ in both] == [javas for _, javas in both]


@pytest.mark.parametrize(
    ("line", "mechanism", "named"),
    [
        ("com.example.Own required;", None, "must be one of PlainLoginModule, ScramLoginModule, OAuthBearer"),
        (f"{PLAIN} required username=u password=p;", "SCRAM-SHA-256", "needs sasl.mechanism=PLAIN"),
        (f"{SCRAM} required username=u password=p;", None, "needs sasl.mechanism=SCRAM-SHA-256 or SCRAM-SHA-512"),
        (f"{SCRAM} required username=u tokenauth=true;", "SCRAM-SHA-256", "takes username, password here"),
        (f"{OAUTH} required unsecuredLoginStringClaim_sub=x;", None, "takes clientId, clientSecret, scope here"),
    ],
)
def test_a_login_that_needs_java_is_refused(line, mechanism, named):
    with pytest.raises(InvalidOption, match=named):
        java.login(line, mechanism)


@pytest.mark.parametrize(
    "told",
    [
        {"sasl.mechanism": "PLAIN", "sasl.username": "u", "sasl.password": SECRET},
        {"sasl.jaas.config": f'{PLAIN} required username="u" password="{SECRET}";'},
        OAUTH_LOGIN,
    ],
    ids=["plain", "jaas", "oauth"],
)
def test_no_secret_is_in_what_is_shown_logged_or_pickled(told, caplog):
    caplog.set_level(logging.DEBUG)
    found = read({**SASL, **told})
    assert SECRET not in repr(found) + str(found)
    for copier in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="secrets") as caught:
            copier(found)
        assert SECRET not in str(caught.value)
    provider = found.access.tokens
    if provider is not None:
        assert SECRET not in repr(provider)
        with pytest.raises(TypeError, match="secrets"):
            pickle.dumps(provider)
    assert SECRET not in refusal({**SASL, **told, "no.such.setting": 1})
    assert SECRET not in refusal({**SASL, **told, "linger.ms": SECRET})
    assert SECRET not in caplog.text


def test_no_name_of_a_program_hides_that_its_connection_was_lost():
    monitor = ClientLogMonitor(0)
    monitor.log(20, "%s [%s] %s", "FAIL", "Connect to shop#producer-1", "a:9092/1: Disconnected (after 9ms)")
    assert monitor.taint_reason


def test_a_secret_that_the_client_repeats_is_taken_out_of_its_words():
    told = {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.username": "u", "sasl.password": SECRET}
    reason = refusal({**told, "compression.type": SECRET})
    assert reason.endswith('Invalid value "…" for configuration property "compression.codec"')
