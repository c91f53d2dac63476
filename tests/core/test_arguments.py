"""Arguments that make no sense are refused with an error of ours on every broker, before the broker is asked."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import txnbridge
from txnbridge import Bridge, InvalidOption, Topic


class Wrong:
    """A codec that returns no bytes."""

    def __init__(self, encoded: object) -> None:
        self.encoded = encoded

    def encode(self, value: Any, context: Any) -> Any:
        return self.encoded

    def decode(self, data: bytes, context: Any) -> Any:
        return data


@pytest.fixture
def bridge(tmp_path: Path):
    with txnbridge.connect(f"embedded:{tmp_path}/broker.db") as bridge:
        bridge.ensure_topics("t")
        yield bridge


CALLS: dict[str, Callable[[Bridge], Any]] = {
    "a codec that returns text": lambda b: b.transaction().send(Topic("t", Wrong("x")), 1),
    "a codec that returns a number": lambda b: b.transaction().send(Topic("t", Wrong(1)), 1),
    "a key codec that returns text": lambda b: b.transaction().send(Topic("t", key=Wrong("x")), b"", key=1),
    "a codec that returns text, many": lambda b: b.transaction().send_many(Topic("t", Wrong("x")), [1]),
    "a timestamp beyond 63 bits": lambda b: b.transaction().send("t", b"", timestamp=1 << 63),
    "polling for ever": lambda b: b.consumer("t").poll(timeout=float("inf")),
    "polling for no number": lambda b: b.consumer("t").poll(timeout=float("nan")),
    "polling for text": lambda b: b.consumer("t").poll(timeout="1"),  # type: ignore[arg-type]
    "as many as text": lambda b: b.consumer("t").poll("1"),  # type: ignore[arg-type]
    "as many as a fraction": lambda b: b.consumer("t").poll(1.5),  # type: ignore[arg-type]
    "batches of text": lambda b: next(b.consumer("t").batches("1")),  # type: ignore[arg-type]
    "reading as many as text": lambda b: b.read("t", "1"),  # type: ignore[arg-type]
    "reading as many as infinity": lambda b: b.read("t", float("inf")),  # type: ignore[arg-type]
    "acknowledging nothing": lambda b: b.transaction().ack(None),  # type: ignore[arg-type]
    "acknowledging numbers": lambda b: b.transaction().ack([1]),  # type: ignore[list-item]
    "acknowledging up to nothing": lambda b: b.transaction().ack_up_to(None),  # type: ignore[arg-type]
    "giving back nothing": lambda b: b.consumer("t", "g").nack(None),  # type: ignore[arg-type]
    "seeking nothing": lambda b: b.consumer("t").seek(None),  # type: ignore[arg-type]
    "seeking in what is no partition": lambda b: b.consumer("t").seek({"t": (0,)}),  # type: ignore[dict-item]
    "seeking a time beyond 63 bits": lambda b: b.consumer("t").seek(1 << 70),
    "a consumer of nothing": lambda b: b.consumer(None),  # type: ignore[arg-type]
    "a start beyond 63 bits": lambda b: b.consumer("t", start=1 << 70),
    "a start before 1970": lambda b: b.consumer("t", start=-1),
    "keeping messages for no time": lambda b: b.admin.create_topic("never", retention_seconds=0),
    "keeping fewer than no bytes": lambda b: b.admin.create_topic("never", retention_bytes=-1),
    "keeping messages for ever": lambda b: b.admin.create_topic("never", retention_seconds=float("inf")),
    "keeping messages for text": lambda b: b.admin.create_topic("never", retention_seconds="1"),  # type: ignore[arg-type]
    "keeping more than 63 bits of bytes": lambda b: b.admin.create_topic("never", retention_bytes=1 << 63),
    "keeping a fraction of bytes": lambda b: b.admin.create_topic("never", retention_bytes=1.5),  # type: ignore[arg-type]
    "a fraction of partitions": lambda b: b.admin.create_topic("never", 1.5),  # type: ignore[arg-type]
    "partitions of text": lambda b: b.admin.create_topic("never", "3"),  # type: ignore[arg-type]
    "growing by nothing": lambda b: b.admin.grow_topic("t", None),  # type: ignore[arg-type]
    "growing to a fraction": lambda b: b.admin.grow_topic("t", 2.5),  # type: ignore[arg-type]
    "a publisher named by a number": lambda b: b.publisher(5),  # type: ignore[arg-type]
    "a publisher with an empty name": lambda b: b.publisher(""),
    "a sequence beyond 63 bits": lambda b: b.publisher("p").send("t", b"", sequence=1 << 63),
    "sharing of an unknown kind": lambda b: b.consumer("t", "g", sharing="all"),
    "a start that is no time": lambda b: b.consumer("t", "g", start="yesterday"),
    "a start that is a truth": lambda b: b.consumer("t", "g", start=True),
    "a group without a name": lambda b: b.consumer("t", " "),
    "a consumer of no topics": lambda b: b.consumer([], "g"),
    "a topic twice": lambda b: b.consumer(["t", "t"], "g"),
    "preparing by a word": lambda b: b.transaction(prepare="no"),  # type: ignore[call-overload]
    "a group commit that is nothing": lambda b: b.transaction(group_commit=None),  # type: ignore[call-overload]
    "a fingerprint that is a number": lambda b: b.transaction(fingerprint=1),  # type: ignore[call-overload]
    "holding without preparing": lambda b: b.transaction(hold=5),
    "a sequence that is a truth": lambda b: b.publisher("p").send("t", b"", sequence=True),
    "a sequence below zero": lambda b: b.publisher("p").send("t", b"", sequence=-1),
    "a publisher's partition that is a fraction": lambda b: b.publisher("p").send("t", b"", partition=1.0),  # type: ignore[arg-type]
    "a publisher's timestamp below zero": lambda b: b.publisher("p").send("t", b"", timestamp=-1),
    "a publisher's headers without values": lambda b: b.publisher("p").send("t", b"", headers=["ab"]),  # type: ignore[list-item]
}


@pytest.mark.filterwarnings("ignore:transaction .* was left unfinished")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_wrong_argument_is_refused(bridge: Bridge, call: Callable[[Bridge], Any]) -> None:
    with pytest.raises(InvalidOption):
        call(bridge)
    with bridge.transaction() as txn:  # and harms nothing
        txn.send("t", b"1")


def test_a_limit_is_kept_and_one_beyond_all_messages_returns_all_messages(bridge: Bridge) -> None:
    with bridge.transaction() as txn:
        txn.send_many("t", [b"1", b"2"])
    assert [message.value for message in bridge.read("t", 1)] == [b"1"]
    assert len(bridge.consumer("t", "g").poll(1 << 63)) == len(bridge.read("t", 1 << 63)) == 2


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("kafka://host:" + "9" * 5000, None),
        ("embedded:~nobody-of-this-name/x.db", None),
        ("embedded:\udcff\ud800.db", None),
        ("embedded:a%00b.db", None),
        ("embedded:" + "x" * 300, None),
        ("embedded:x.db", {"lease_seconds": 1e308}),
        ("embedded:x.db", {"max_bytes": float("inf")}),
        ("embedded:x.db", {"max_bytes": 1 << 70}),
    ],
)
def test_an_address_that_cannot_be_is_refused(tmp_path, monkeypatch, url, options):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidOption):
        txnbridge.connect(url) if options is None else txnbridge.connect(url, embedded=options)
    assert not list(tmp_path.iterdir())


def test_a_secret_that_is_no_text_is_not_quoted(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"hunter2\xff")
    with pytest.raises(InvalidOption, match="no UTF-8") as raised:
        txnbridge.connect("embedded:x.db", embedded={"durability": f"file:{tmp_path}/secret"})
    assert raised.value.__cause__ is None and raised.value.__suppress_context__
