"""URLs, options, capabilities, and `like=`."""

import time
from datetime import UTC, datetime, timedelta, tzinfo
from importlib import import_module
from pathlib import Path

import pytest
from txnbridge_embedded.backend import OPTIONS, EmbeddedBackend, file_of
from txnbridge_embedded.imitation import PROFILES
from txnbridge_embedded.settings import Settings

import txnbridge
from tests.embedded.kit import begin, commit, open_writer, prepare, values
from txnbridge.errors import AccessDenied, InvalidOption, NotFound, NotSupported
from txnbridge.spi import Capability, Deadline, Level, Url


def test_a_relative_path_stays_where_it_was_when_the_folder_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with txnbridge.connect("embedded:broker.db") as bridge:
        monkeypatch.chdir("/")
        with bridge.transaction() as txn:
            txn.send("orders", b"1")
    assert (tmp_path / "broker.db").exists()


def test_a_path_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert file_of(Url("embedded", path="~/broker.db")) == tmp_path / "broker.db"


def test_without_a_path_the_file_is_in_the_users_data_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    txnbridge.connect("embedded:").close()
    assert (tmp_path / "data" / "txnbridge" / "broker.db").exists()
    assert (tmp_path / "data" / "txnbridge").stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert file_of(Url("embedded")) == tmp_path / ".local" / "share" / "txnbridge" / "broker.db"


def test_a_data_folder_that_cannot_be_made_is_told(tmp_path, monkeypatch):
    (tmp_path / "data").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with pytest.raises(AccessDenied, match="cannot be created"):
        file_of(Url("embedded"))


def test_a_host_is_refused_with_what_to_write_instead():
    with pytest.raises(InvalidOption, match="embedded:PATH"):
        txnbridge.connect("embedded://localhost/broker.db")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lease_seconds", 0),
        ("keep_seconds", -1.0),
        ("hold_seconds", float("inf")),
        ("hold_seconds", float("nan")),
        ("spill_bytes", 0),
        ("max_message_bytes", 2_000_000_000),
        ("max_bytes", -1),
        ("half_checks", 0),
        ("durability", "none"),
        ("like", "activemq"),
        ("client.id", "x"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(path, option, value):
    with pytest.raises(InvalidOption, match=option):
        txnbridge.connect(f"embedded:{path}", embedded={option: value})
    assert not path.exists()


def test_options_and_settings_have_the_same_defaults():
    settings = Settings()
    shared = vars(settings).keys() & OPTIONS.keys()
    assert len(shared) >= 8
    assert {name: OPTIONS[name].default for name in shared} == {name: getattr(settings, name) for name in shared}


def test_every_promise_but_sharing_by_key_is_kept_natively():
    kept = EmbeddedBackend.capabilities
    assert {c for c in Capability if kept[c].level is not Level.NATIVE} == {Capability.SHARE_KEY}


@pytest.mark.parametrize("name", PROFILES)
def test_like_takes_away_what_the_other_broker_lacks_and_nothing_else(opened, name):
    broker = opened(like=name)
    lacking = {c for c in Capability if not broker.capabilities[c]}
    assert lacking == {Capability.SHARE_KEY} | PROFILES[name].lacks.keys()
    assert broker.limits.message_bytes == PROFILES[name].limits.message_bytes
    assert opened().capabilities[Capability.INDIVIDUAL_ACK]  # the file itself is not changed


def send_one(broker, value=b"", headers=None):
    writer = open_writer(broker)
    begin(writer)
    try:
        writer.send("orders", value, None, headers, None, None)
        writer.commit(Deadline(5))
    finally:
        writer.close()


@pytest.mark.parametrize("name", PROFILES)
def test_like_refuses_nothing_that_the_other_brokers_backend_can_do(name):
    theirs = import_module(f"txnbridge_{name}.capabilities").CAPABILITIES
    assert [capability for capability in PROFILES[name].lacks if theirs[capability]] == []


def test_like_rocketmq_refuses_a_header_without_value(opened):
    with pytest.raises(NotSupported, match="bare-headers"):
        send_one(opened(like="rocketmq"), b"1", [("h", None)])


def test_like_rocketmq_refuses_more_messages_than_a_transaction_takes(opened):
    broker = opened(like="rocketmq")
    writer = open_writer(broker)
    begin(writer)
    with pytest.raises(NotSupported, match="at most 10000 messages"):
        writer.send_many("orders", [b"x"] * 10_001)
    writer.commit(Deadline(5))
    assert len(values(broker, "orders")) == 10_000
    begin(writer)
    writer.send_many("orders", [b"x"] * 10_000)  # the next transaction counts anew
    writer.commit(Deadline(5))


@pytest.mark.parametrize(("name", "most"), [("kafka", 999_964), ("pulsar", 5 << 20), ("rocketmq", 4 << 20)])
def test_like_refuses_a_message_that_is_too_large_there(opened, name, most):
    broker = opened(like=name)
    send_one(broker, bytes(most))
    with pytest.raises(InvalidOption, match=str(most)):
        send_one(broker, bytes(most + 1))


@pytest.mark.parametrize("name", ["", ".", "..", "orders/new", "bücher", "x" * 250, "a b"])
def test_like_kafka_refuses_a_name_that_no_topic_can_have_there(path: Path, name: str):
    with txnbridge.connect(f"embedded:{path}?like=kafka&create_topics=1") as bridge:
        for call in (
            lambda: bridge.admin.create_topic(name),
            lambda: bridge.read(name, 1),
            lambda: bridge.consumer(name, "g"),
            lambda: bridge.publisher().send(name, b"1"),
        ):
            with pytest.raises(InvalidOption):
                call()
        with bridge.transaction() as txn:
            with pytest.raises(InvalidOption):
                txn.send(name, b"1")
            txn.send("Orders_1.new-" + "x" * 200, b"1")
        assert len(bridge.admin.topics()) == 1


@pytest.mark.parametrize("like", PROFILES)
def test_like_creates_no_topic_unless_it_is_told_to(path: Path, like: str):
    url = f"embedded:{path}?like={like}"
    with txnbridge.connect(url) as bridge, bridge.transaction() as txn, pytest.raises(NotFound, match="topics create"):
        txn.send("orders", b"1")
    with txnbridge.connect(f"{url}&create_topics=3") as bridge, bridge.transaction() as txn:
        txn.send("orders", b"1")
        assert bridge.admin.topic("orders").partitions == 3
    with pytest.raises(InvalidOption, match="create_topics"):
        txnbridge.connect(f"{url}&create_topics=-1")
    with txnbridge.connect(f"{url}&create_topics=1", create_topics=0) as bridge, pytest.raises(NotFound):
        bridge.consumer("missing", "g")


def test_like_kafka_bounds_how_long_a_prepared_transaction_lives(opened):
    broker = opened(like="kafka", timeout=30)
    token = prepare(broker, "orders", b"1")
    assert broker.limits.prepared_seconds == 900
    assert token.expires_at is not None
    assert token.expires_at / 1000 - time.time() <= 900


def test_a_tombstone_is_taken_everywhere(opened):
    for name in PROFILES:
        broker = opened(like=name)
        writer = open_writer(broker)
        commit(writer, f"for-{name}", None, b"1")
        assert values(broker, f"for-{name}") == [None, b"1"]


def test_a_time_may_be_a_datetime_with_a_time_zone(path: Path):
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    with txnbridge.connect(f"embedded:{path}") as bridge:
        with bridge.transaction() as txn:
            txn.send("orders", b"1", timestamp=noon - timedelta(hours=1))
            txn.send("orders", b"2", timestamp=noon)
            for nowhere in (None, type("Nowhere", (tzinfo,), {"utcoffset": lambda *_: None})()):
                with pytest.raises(InvalidOption, match="needs a time zone"):
                    txn.send("orders", b"3", timestamp=noon.replace(tzinfo=nowhere))
        with bridge.consumer("orders", start=noon) as consumer:
            assert [(message.value, message.timestamp) for message in consumer.poll()] == [(b"2", 1_767_268_800_000)]
            consumer.seek(noon - timedelta(hours=2))
            assert [message.value for message in consumer.poll()] == [b"1", b"2"]
        bridge.consumer("orders", "readers").close()
        assert bridge.admin.reset_group("readers", noon) == {("orders", 0): (1,)}
