"""Tests of URLs, options and names: which are accepted, and which are refused."""

import pickle
import ssl

import pytest
from hypothesis import given as for_any
from hypothesis import strategies as st
from txnbridge_rocketmq.backend import RocketMQBackend
from txnbridge_rocketmq.settings import OPTIONS, parse_settings
from txnbridge_rocketmq.settings.names import decoded, encoded, group_name, is_system_topic, topic_name

from txnbridge.errors import InvalidOption
from txnbridge.spi import Capability, Context, Emitter, Url

pytestmark = pytest.mark.offline

HOSTS = (("h", None), ("h2", 19876))


def settings(hosts=HOSTS, path="", context=None, **given):
    options = {name: option.default for name, option in OPTIONS.items()} | given
    about = {"application": "a", "timeout": 30, "hold": None, "create_topics": None, **(context or {})}
    used_by = Context("b", Emitter("b", ()), **about)
    return parse_settings(Url("rocketmq", hosts, path, "rocketmq://h"), options, used_by)


def test_hosts_are_name_servers_and_without_a_port_they_have_rocketmqs_own():
    assert settings().name_servers == ("h:9876", "h2:19876")
    assert settings((("::1", None),)).name_servers == ("[::1]:9876",)
    assert settings(path="/").url == "rocketmq://h:9876,h2:19876"


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"hosts": ()}, "names the name servers"),
        ({"path": "/orders"}, "no path"),
        ({"prefix": "a.b"}, "prefix"),
        ({"prefix": ""}, "prefix"),
        ({"prefix": "x" * 61}, "prefix"),
        ({"access_key": "me"}, "secret_key"),
        ({"secret_key": "s"}, "access_key"),
        ({"security_token": "t"}, "security_token"),
        ({"tls_ca": "ca.pem"}, "tls_ca"),
        ({"tls_key": "key.pem", "tls": True}, "tls_certificate"),
        ({"context": {"client_options": {"operation.timeout": "3"}}}, r"operation\.timeout"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, dict) else "",
)
def test_an_impossible_setting_is_refused_by_name(given, match):
    with pytest.raises(InvalidOption, match=match):
        settings(**given)


def test_a_user_has_a_key_and_a_secret():
    assert settings().credentials() is None
    found = settings(access_key="me", secret_key="s", security_token="t").credentials()
    assert found is not None
    assert (found.access_key, found.secret_key, found.security_token) == ("me", "s", "t")


def test_secrets_are_neither_shown_nor_pickled():
    found = settings(access_key="me", secret_key="hidden-1", security_token="hidden-2")
    assert "hidden" not in repr(found) and "hidden" not in repr(found.credentials())
    with pytest.raises(TypeError, match="secrets"):
        pickle.dumps(found)
    assert {name for name, option in OPTIONS.items() if option.secret} == {"secret_key", "security_token"}


def test_certificates_and_hosts_are_checked_unless_told_otherwise():
    assert settings().tls_context() is None
    checked = settings(tls=True).tls_context()
    assert checked is not None and checked.check_hostname and checked.verify_mode == ssl.CERT_REQUIRED
    without_host = settings(tls=True, tls_verify_hostname=False).tls_context()
    assert without_host is not None
    assert (without_host.check_hostname, without_host.verify_mode) == (False, ssl.CERT_REQUIRED)
    trusting = settings(tls=True, tls_verify=False).tls_context()
    assert trusting is not None and trusting.verify_mode == ssl.CERT_NONE


def test_files_that_are_no_certificates_are_named(tmp_path):
    file = tmp_path / "ca.pem"
    file.write_text("nothing")
    for given in ({"tls_ca": str(file)}, {"tls_certificate": str(file)}, {"tls_ca": str(tmp_path / "missing")}):
        with pytest.raises(InvalidOption, match="tls_ca"):
            settings(tls=True, **given).tls_context()


def test_the_note_of_a_capability_is_one_sentence_on_its_cost_or_its_absence():
    backend = RocketMQBackend()
    assert backend.schemes == ("rocketmq",)
    for capability, support in backend.capabilities.items():
        if support.level.value != "native":
            assert support.note and not support.note.endswith("."), capability
    assert not backend.capabilities[Capability.ISOLATION]


@pytest.mark.parametrize("text", ["a", "a b", "a/b", "ü", "%20", "a.b", "~", "\ud800", ".", "a_c-d", "%2E", "|"])
def test_any_text_becomes_part_of_a_name_and_comes_back(text):
    assert decoded(encoded(text)) == text
    assert topic_name(f"x{encoded(text)}") == f"x{encoded(text)}"


@pytest.mark.parametrize("text", ["%FF", "%C3x"])
def test_a_name_of_others_that_is_no_encoded_text_stands_for_itself(text):
    assert decoded(text) == text


@for_any(st.text(min_size=1, max_size=5), st.text(min_size=1, max_size=5))
def test_two_texts_have_two_names(one, other):
    assert (encoded(one) == encoded(other)) is (one == other)
    assert topic_name(encoded(one)) == encoded(one)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a.b", "ü", "a\n", "x" * 128])
def test_a_text_that_is_no_name_is_refused(name):
    for check in (topic_name, group_name):
        with pytest.raises(InvalidOption, match="is not a"):
            check(name)
    assert group_name("x" * 120)
    with pytest.raises(InvalidOption):  # although a topic may have it
        group_name("x" * 121)


def test_an_application_names_its_log_and_its_group():
    found = settings(context={"application": "billing.eu"})
    assert found.log_topic("billing.eu") == "_txnbridge-log-billing%2Eeu"
    assert found.producer_group == "_txnbridge-app-billing%2Eeu"
    assert found.application_of(found.producer_group) == "billing.eu"
    with pytest.raises(InvalidOption, match="1 to 127"):
        found.log_topic("x" * 120)


@pytest.mark.parametrize("name", ["RMQ_SYS_TRANS_HALF_TOPIC", "SCHEDULE_TOPIC_XXXX", "%RETRY%g", "%DLQ%g", "TBW102"])
def test_topics_of_rocketmqs_own_are_known(name):
    assert is_system_topic(name)
    assert not is_system_topic("orders")
