"""URLs and options: what is taken, and what is refused by name."""

import pickle

import pytest
from txnbridge_pulsar.settings import OPTIONS, read
from txnbridge_pulsar.settings.topic_names import Namespace, decoded, encoded, whole_topic
from txnbridge_pulsar.write.message_format import key_hash, key_on_wire, to_headers, to_properties

from txnbridge.errors import InvalidOption
from txnbridge.spi import Context, Emitter, Url

pytestmark = pytest.mark.offline

HOSTS = (("h", None), ("h2", 6651))


def settings(scheme="pulsar", hosts=HOSTS, path="", context=None, **given):
    options = {name: option.default for name, option in OPTIONS.items()} | given
    about = {"bridge": "b", "events": Emitter("b", ()), "application": "a", "timeout": 30, "hold": None}
    given_context = Context(**{**about, "create_topics": None, **(context or {})})
    return read(Url(scheme, hosts, path, f"{scheme}://h"), options, given_context)


@pytest.mark.parametrize(
    ("where", "service", "namespace"),
    [
        (("pulsar", HOSTS, ""), "pulsar://h:6650,h2:6651", "public/default"),
        (("pulsar+ssl", (("h", None),), "/"), "pulsar+ssl://h:6651", "public/default"),
        (("pulsar", (("::1", None),), "/tenant/space"), "pulsar://[::1]:6650", "tenant/space"),
    ],
)
def test_hosts_without_a_port_have_pulsars_own_and_the_path_is_tenant_and_namespace(where, service, namespace):
    assert (settings(*where).service, str(settings(*where).namespace)) == (service, namespace)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"path": "/tenant"}, "/tenant/namespace"),
        ({"path": "/tenant/space/topic"}, "/tenant/namespace"),
        ({"hosts": ()}, "pulsar://host"),
        ({"context": {"client_options": {"operation.timeout": "3"}}}, r"operation\.timeout"),
        ({"context": {"timeout": 300, "hold": 601}}, r"901 s together.*longest_transaction"),
        *(({"prefix": bad}, "prefix") for bad in ("a.b", "")),
        *(({"longest_transaction": bad}, "longest_transaction") for bad in (0.0, 20.0)),
        *(({"admin_url": bad}, "admin_url") for bad in ("h:80", "http://u@h:80", "http://h:80,", "http://h:80/admin")),
        ({"prepared_ids": 0}, "prepared_ids"),
        ({"tls_ca": "ca.pem"}, "tls_ca"),
        ({"user": "me"}, "password"),
        ({"password": "secret"}, "user"),
        ({"token": "a", "user": "me", "password": "p"}, "two ways"),
        ({"token": "a", "token_file": "f"}, "two ways"),
        ({"scheme": "pulsar+ssl", "tls_key": "key.pem"}, "tls_certificate"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, dict) else "",
)
def test_an_option_that_cannot_be_is_refused_by_name(given, match):
    with pytest.raises(InvalidOption, match=match):
        settings(**given)


def test_a_prepared_transaction_lives_as_long_as_may_be_unless_told_otherwise():
    assert settings().longest_prepared == 900
    assert settings(context={"hold": 10}).longest_prepared == 40
    assert settings(context={"timeout": 300, "hold": 600}).longest_prepared == 900


@pytest.mark.parametrize(
    ("given", "method", "data"),
    [
        ({}, "none", b""),
        ({"token": " abc "}, "token", b"abc"),
        ({"user": "me", "password": "p:q"}, "basic", b"me:p:q"),
        ({"scheme": "pulsar+ssl", "tls_certificate": "c.pem"}, "tls", b""),
    ],
    ids=["none", "token", "basic", "tls"],
)
def test_a_bridge_says_who_it_is_in_three_ways_or_not_at_all(given, method, data):
    way = settings(**given).authentication()
    assert (way.method, way.data()) == (method, data)


def test_a_token_file_is_read_each_time(tmp_path):
    file = tmp_path / "token"
    file.write_text("one\n")
    way = settings(token_file=str(file)).authentication()
    assert way.data() == b"one"
    file.write_text("two\n")
    assert way.data() == b"two"


def test_secrets_are_neither_shown_nor_pickled():
    found = settings(user="me", password="hidden-1")
    assert "hidden" not in repr(found)
    assert "hidden" not in repr(settings(token="hidden-2"))
    with pytest.raises(TypeError, match="secrets"):
        pickle.dumps(found)
    assert {name for name, option in OPTIONS.items() if option.secret} == {"token", "password"}


def test_files_that_are_no_certificates_are_named(tmp_path):
    file = tmp_path / "ca.pem"
    file.write_text("nothing")
    with pytest.raises(InvalidOption, match="tls_ca"):
        settings("pulsar+ssl", tls_ca=str(file)).tls_context()


@pytest.mark.parametrize("text", ["a", "a b", "a/b", "ü", "=20", "%2F", "a-partition-0", "~", "\ud800", ".", "a.b_c-d"])
def test_any_text_becomes_part_of_a_name_and_comes_back(text):
    name = encoded(text)
    assert decoded(name) == text
    assert name.isascii() and "/" not in name
    assert whole_topic(f"persistent://t/n/x-{name}")[0].endswith(name)


def test_a_short_name_is_in_the_urls_namespace_and_a_full_one_anywhere():
    here = Namespace("t", "n")
    assert here.full_name("orders") == "persistent://t/n/orders"
    assert here.full_name("persistent://a/b/orders") == "persistent://a/b/orders"
    assert here.short_name("persistent://t/n/orders") == "orders"
    assert here.short_name("persistent://a/b/orders") == "persistent://a/b/orders"


@pytest.mark.parametrize("name", ["", "a/b", "t/n/orders", "non-persistent://t/n/a", "a\nb", "orders-partition-3"])
def test_a_text_that_is_no_topic_name_is_refused(name):
    with pytest.raises(InvalidOption):
        Namespace("t", "n").full_name(name)


def test_a_key_goes_where_the_java_client_puts_it():
    # String.hashCode of Java: 31 a + b and so on, of UTF-16, without the sign.
    assert key_hash(b"") == 0
    assert key_hash(b"ab") == 31 * 97 + 98
    assert key_hash("😀".encode()) == 31 * 0xD83D + 0xDE00
    assert key_hash(b"polygenelubricants") == 0  # of which Java makes the smallest number there is
    assert key_hash(b"\xff") == key_hash(b"/w==")  # what is no text is text to the Java client, in base64


def test_a_key_is_text_where_it_is_and_else_bytes():
    assert key_on_wire(None) is None
    assert key_on_wire("ü".encode()) == "ü"
    assert key_on_wire(b"\xff") == b"\xff"


HEADERS = [("kind", b"new"), ("kind", b"again"), ("binary", b"\xff\x00"), ("empty", b"")]
HEADERS += [("txnbridge-b64.kind", b"not in base64"), ("txnbridge-b64.txnbridge-b64.", b"\xfe")]


def test_headers_come_back_as_they_were():
    properties = to_properties(HEADERS)
    assert all(isinstance(value, str) for _, value in properties)
    assert to_headers(properties) == HEADERS
    assert properties[:2] == [("kind", "new"), ("kind", "again")]
    # Another's property that looks like ours is taken as it is.
    assert to_headers([("txnbridge-b64.x", "no base64!")]) == [("txnbridge-b64.x", b"no base64!")]
