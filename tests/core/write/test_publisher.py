"""Tests of the checks that a publisher makes before it asks a broker."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.core.processor_kit import values
from tests.core.toy import connect_toy
from tests.in_time import Hold
from txnbridge import Bridge, DeadlineExceeded, InvalidOption, connect
from txnbridge.errors import UsageError


@pytest.fixture
def bridge(tmp_path: Path) -> Iterator[Bridge]:
    with connect(f"embedded:{tmp_path}/broker.db") as bridge:
        yield bridge


def test_a_sequence_that_goes_back_within_a_session_is_refused(bridge: Bridge) -> None:
    with bridge.publisher("import") as publisher:
        for sequence in (1, 5):
            publisher.send("rows", b"%d" % sequence, sequence=sequence)
        for sequence in (3, 4, 5):
            with pytest.raises(InvalidOption, match=rf"sequence {sequence} for rows comes after 5"):
                publisher.send("rows", b"%d" % sequence, sequence=sequence)
        publisher.send("rows", b"6", sequence=6)
        publisher.send("other-rows", b"1", sequence=1)
    assert values(bridge, "rows") == [b"1", b"5", b"6"]


def test_messages_sent_again_after_resuming_are_skipped_until_the_first_new_one(bridge: Bridge) -> None:
    with bridge.publisher("import") as publisher:
        publisher.send("rows", b"5", sequence=5)
    with bridge.publisher("import") as publisher:
        for sequence in (4, 5, 3, 7):
            publisher.send("rows", b"%d" % sequence, sequence=sequence)
        with pytest.raises(InvalidOption, match="comes after 7"):
            publisher.send("rows", b"6", sequence=6)
    assert values(bridge, "rows") == [b"5", b"7"]


@pytest.mark.parametrize(
    ("like", "refused"),
    [("", "a publisher with a name"), ("?like=kafka", "resume-sequence")],
    ids=["embedded", "kafka"],
)
def test_without_a_name_there_are_no_sequences(tmp_path: Path, like: str, refused: str) -> None:
    with connect(f"embedded:{tmp_path}/broker.db{like}") as bridge, bridge.publisher() as publisher:
        with pytest.raises(UsageError, match=refused):
            publisher.send("rows", b"", sequence=1)
        with pytest.raises(UsageError, match=refused):
            publisher.last_sequence("rows")


@pytest.mark.parametrize("call", ["send", "flush", "last_sequence", "close"])
def test_a_call_waits_for_another_threads_no_longer_than_the_bridges_timeout(call: str) -> None:
    bridge, broker = connect_toy(timeout=0.1)
    hold = Hold()
    broker.publisher = lambda *_: SimpleNamespace(**dict.fromkeys(("send", "flush", "last_sequence", "close"), hold))  # type: ignore[assignment,method-assign]
    publisher = bridge.publisher("import")
    arguments = {"send": ("rows", b"2"), "last_sequence": ("rows",)}.get(call, ())
    with bridge, hold.asked_by(lambda: publisher.send("rows", b"1")), pytest.raises(DeadlineExceeded):
        getattr(publisher, call)(*arguments)
