"""URLs and options: nothing is taken that nobody knows."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.toy import connect_toy
from txnbridge import BackendMissing, InvalidOption, connect
from txnbridge._base.plugins import plugins
from txnbridge._base.url import find_backend, parse_url, resolve_options
from txnbridge.spi import Option

OPTIONS = {
    "batch_size": Option(int, 10, "how many"),
    "fast": Option(bool, False, "whether"),
    "level": Option(str, "full", "how sure", choices=("full", "normal")),
    "wait": Option(float, 1.5, "how long"),
}


@pytest.mark.parametrize(
    ("text", "hosts", "path"),
    [
        ("kafka://h1:9092,h2", (("h1", 9092), ("h2", None)), ""),
        ("kafka://[::1]:9092", (("::1", 9092),), ""),
        ("pulsar://h:6650/tenant/space", (("h", 6650),), "/tenant/space"),
        ("embedded:orders.db", (), "orders.db"),
        ("embedded:///abs/a%20b.db", (), "/abs/a b.db"),
        ("embedded:////abs/x.db", (), "/abs/x.db"),
        ("embedded:", (), ""),
        ("embedded:./a:b@c", (), "./a:b@c"),
    ],
)
def test_a_url_is_taken_apart(text: str, hosts: tuple[tuple[str, int | None], ...], path: str) -> None:
    url, options = parse_url(text)
    assert (url.hosts, url.path, options) == (hosts, path, {})


def test_the_query_holds_options() -> None:
    assert parse_url("embedded:x?like=kafka&fast=")[1] == {"like": "kafka", "fast": ""}


@pytest.mark.parametrize(
    "bad",
    [
        *("", "orders.db", "kafka://h:port", "kafka://h:0", "kafka://u:pw@h:1", "a:?x=1&x=2", 7),
        *("kafka:u:pw@h:1", "kafka:/u:pw@h:1", "kafka://u:pw/w@h:1"),
    ],
)
def test_a_wrong_url_is_refused(bad: object) -> None:
    with pytest.raises(InvalidOption) as caught:
        parse_url(bad)
    assert "pw" not in str(caught.value)


@given(st.text())
def test_no_url_raises_anything_else(text: str) -> None:
    with contextlib.suppress(InvalidOption):
        parse_url(text)


def test_a_secret_in_the_query_is_not_in_the_shown_url() -> None:
    assert "hunter2" not in str(parse_url("kafka://h:1?sasl.password=hunter2")[0])


def test_options_are_typed_and_complete() -> None:
    ours, clients = resolve_options(OPTIONS, {"batch_size": "5", "fast": "yes", "linger.ms": "3"}, "toy")
    assert ours == {"batch_size": 5, "fast": True, "level": "full", "wait": 1.5}
    assert clients == {"linger.ms": "3"}


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InvalidOption, match=r"'batchsize'.*'batch_size'"):
        resolve_options(OPTIONS, {"batchsize": 1}, "toy")


@pytest.mark.parametrize(
    "given_options",
    [{"batch_size": "many"}, {"fast": "perhaps"}, {"level": "none"}, {"wait": None}, {"batch_size": True}],
)
def test_a_value_of_the_wrong_kind_is_refused_by_the_options_name(given_options: dict[str, object]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(given_options))):
        resolve_options(OPTIONS, given_options, "toy")


def test_a_value_may_come_from_the_environment_or_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SIZE", "7")
    (tmp_path / "level").write_text("normal\n")
    ours, _ = resolve_options(OPTIONS, {"batch_size": "env:SIZE", "level": f"file:{tmp_path}/level"}, "toy")
    assert (ours["batch_size"], ours["level"]) == (7, "normal")


@pytest.mark.parametrize("value", ["env:NOT_SET_ANYWHERE", "file:/does/not/exist"])
def test_a_value_that_is_not_where_it_should_be_is_an_error(value: str) -> None:
    with pytest.raises(InvalidOption, match="level"):
        resolve_options(OPTIONS, {"level": value}, "toy")


def test_an_unknown_scheme_names_the_known_ones_and_one_of_ours_what_to_install(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(BackendMissing, match="embedded"):  # which is known
        find_backend("amqp")
    with pytest.raises(BackendMissing, match="a host is kafka://localhost:9092, say"):
        connect("localhost:9092")
    monkeypatch.setattr(plugins, "backends", list)
    with pytest.raises(BackendMissing, match=r"pip install -e '\.\[pulsar\]'"):
        find_backend("pulsar")


def test_no_orders_land_in_a_local_file_by_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TXNBRIDGE_URL", raising=False)
    with pytest.raises(InvalidOption, match="TXNBRIDGE_URL"):
        connect()


NO_SECONDS = [float("inf"), float("nan"), -1, "30", True, 1e300]


@pytest.mark.parametrize(
    "wrong",
    [
        *({name: ""} for name in ("transactional_id", "application")),
        *({"transactional_id": wrong} for wrong in (" ", b"billing", "é" * 180)),
        *({"writers": wrong} for wrong in (0, 1.5)),
        *({"create_topics": wrong} for wrong in (-1, "1")),
        *({"timeout": 0}, {"embedded": "durability"}),
        *({name: wrong} for name in ("timeout", "hold") for wrong in NO_SECONDS),
    ],
    ids=repr,
)
def test_an_argument_of_connect_that_makes_no_sense_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(wrong))):
        connect(f"embedded:{tmp_path}/broker.db", **wrong)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("mistyped", "meant"), [("timout", "timeout"), ("writer", "writers"), ("embeded", "embedded")])
def test_a_mistyped_argument_of_connect_is_answered_with_the_nearest(tmp_path: Path, mistyped: str, meant: str) -> None:
    with pytest.raises(InvalidOption, match=f"no option '{mistyped}'; did you mean '{meant}'"):
        connect(f"embedded:{tmp_path}/broker.db", **{mistyped: 5})  # type: ignore[arg-type]


def test_a_mistyped_argument_of_connect_in_the_url_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="no option 'create_topic'; did you mean 'create_topics'"):
        connect(f"embedded:{tmp_path}/broker.db?create_topic=5")


@pytest.mark.parametrize("wrong", NO_SECONDS, ids=repr)
def test_a_time_that_nothing_can_wait_for_is_refused(wrong: Any) -> None:
    bridge, _ = connect_toy()
    with bridge, bridge.consumer("t", "g") as consumer:
        for call in (
            lambda: bridge.transaction(timeout=wrong),
            lambda: bridge.transaction(prepare=True, hold=wrong),
            lambda: consumer.poll(timeout=wrong),
            lambda: bridge.processor("t", group="g", each=lambda m, txn: None, timeout=wrong),
            lambda: bridge.processor("t", group="g", each=lambda m, txn: None, stop_timeout=wrong),
        ):
            with pytest.raises(InvalidOption, match="number of seconds"):
                call()
