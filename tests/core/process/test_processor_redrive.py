"""Dead letters go back to where they came from, each once, on the embedded broker."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import txnbridge
from tests.core.processor_kit import Fresh, numbers, url_of, values
from txnbridge import Bridge, Event, Message, Transaction
from txnbridge._process.redrive import Redrive
from txnbridge.testing import listening


@pytest.fixture
def url(tmp_path: Path) -> str:
    return url_of(tmp_path)


@pytest.fixture
def bridge(url: str) -> Iterator[Bridge]:
    with txnbridge.connect(url) as opened:
        yield opened


# Of a processor whose messages are all dead letters.
REFUSING: Any = {"group": "g", "dead_letter": "dead", "poison": ValueError, "max_dead_letters_in_a_row": None}


def make_dead_letters(url: str, count: int, topics: int = 1) -> None:
    """Messages in `in0` … that a group could not process, and nothing else."""
    with txnbridge.connect(url) as bridge:
        inputs = [f"in{number}" for number in range(topics)]
        with bridge.transaction() as txn:
            for number in range(count):
                txn.send(inputs[number % topics], b"%d" % number, key=b"k%d" % number, headers={"n": str(number)})
        bridge.processor(inputs, each=refuse, **REFUSING).run(until_idle=True)


def refuse(message: Message, txn: Transaction) -> None:
    raise ValueError("odd" if int(message.value) % 2 else "even")


def run_redrive(url: str) -> None:
    with txnbridge.connect(url) as bridge:
        Redrive(bridge, "dead").run()


def check_redriven(url: str) -> None:
    with txnbridge.connect(url) as bridge:
        assert values(bridge, "in0") == numbers(3) * 2


@pytest.mark.timeout(240)
def test_a_redrive_killed_at_any_event_and_run_again_sends_each_back_once(tmp_path, kill_walk):
    kill_walk(
        run_redrive, check_redriven, Fresh(tmp_path, lambda url: make_dead_letters(url, 3)), least={"commit/after"}
    )


def test_a_redriven_message_is_the_original(bridge, url):
    make_dead_letters(url, 4, topics=2)
    Redrive(bridge, "dead").run()
    for topic in ("in0", "in1"):
        first, second, *again = bridge.read(topic, limit=10)
        assert [m[3:7] for m in again] == [m[3:7] for m in (first, second)]  # key, value, headers, timestamp
        assert [m.headers.items_all() for m in again] == [[("n", m.headers["n"])] for m in (first, second)]


def test_a_redrive_takes_no_more_than_its_limit_and_the_next_one_goes_on_behind_it(bridge, url):
    make_dead_letters(url, 5)
    assert Redrive(bridge, "dead", limit=2).run() == (2, 0, 0, 0)
    assert Redrive(bridge, "dead", limit=2).run() == (2, 0, 0, 0)
    assert Redrive(bridge, "dead", limit=2).run() == (1, 0, 0, 0)
    assert Redrive(bridge, "dead", limit=2).run() == (0, 0, 0, 0)
    assert values(bridge, "in0") == numbers(5) * 2


@pytest.mark.parametrize("like", ["", "&like=kafka"])
def test_dead_letters_that_a_redrive_does_not_choose_are_there_for_another(like, url):
    """This holds also on a broker that knows only positions, where a dead letter cannot stay in its place."""
    make_dead_letters(url, 6)
    with txnbridge.connect(url + like) as bridge:
        assert Redrive(bridge, "dead", reason="odd").run() == (3, 3, 0, 0)
        assert values(bridge, "in0") == [*numbers(6), b"1", b"3", b"5"]
        assert Redrive(bridge, "dead", reason="odd").run() == (0, 3, 0, 0)
        assert Redrive(bridge, "dead").run() == (3, 0, 0, 0)
        assert values(bridge, "in0") == [*numbers(6), b"1", b"3", b"5", b"0", b"2", b"4"]


def test_a_preview_changes_nothing(bridge, url):
    make_dead_letters(url, 5)
    for _ in range(2):
        found = list(Redrive(bridge, "dead", limit=2, reason="even").preview())
        assert [message.value for message, _ in found] == [b"0", b"2"]
        assert [(letter.topic, letter.partition, letter.position) for _, letter in found] == [
            ("in0", 0, (0,)),
            ("in0", 0, (2,)),
        ]
    assert Redrive(bridge, "dead").run() == (5, 0, 0, 0)


def test_a_message_without_our_headers_stays(bridge, url):
    with bridge.transaction() as txn:
        txn.send("dead", b"from elsewhere")
        txn.send("dead", b"damaged", headers={"txnbridge-dead-topic": "in0", "txnbridge-dead-position": "["})
    make_dead_letters(url, 1)
    assert Redrive(bridge, "dead").run() == (1, 0, 2, 0)
    assert list(Redrive(bridge, "dead").preview()) == []
    assert values(bridge, "dead") == [b"from elsewhere", b"damaged", b"0"]


@pytest.mark.parametrize(("header", "number"), [("timestamp", "-1"), ("timestamp", "0"), ("partition", "-1")])
def test_a_message_without_a_time_or_a_place_of_its_own_comes_back_with_the_brokers(bridge, url, header, number):
    make_dead_letters(url, 1)
    (dead,) = bridge.read("dead", limit=10)
    with bridge.transaction() as txn:  # a message of Kafka may have no timestamp, which is -1
        txn.send("dead", b"1", headers={**dead.headers, f"txnbridge-dead-{header}": number})
    assert Redrive(bridge, "dead").run() == (2, 0, 0, 0)
    assert [m.value for m in bridge.read("in0", 9) if m.timestamp] == [b"0", b"0", b"1"]


@pytest.mark.parametrize("like", ["", "&like=kafka"])
def test_dead_letters_of_a_deleted_topic_stay_and_the_others_go_back(like, url):
    make_dead_letters(url, 4, topics=2)
    with txnbridge.connect(url + like) as bridge:
        bridge.admin.delete_topic("in0")
        [(message, _), *_] = Redrive(bridge, "dead", reason="odd").preview()
        renumbered = {**message.headers, "txnbridge-dead-partition": "99"}  # the topic has fewer partitions now
        with bridge.transaction() as txn:
            txn.send("dead", b"4", headers=renumbered)
        assert Redrive(bridge, "dead").run() == (3, 0, 0, 2)
        assert values(bridge, "in1") == [b"1", b"3", b"1", b"3", b"4"]
        bridge.ensure_topics("in0")
        assert Redrive(bridge, "dead").run() == (2, 0, 0, 0)


def test_a_redriven_message_that_is_poison_again_does_not_go_round_in_circles(bridge, url):
    make_dead_letters(url, 3)
    with bridge.processor("in0", each=refuse, **REFUSING) as processor:
        assert Redrive(bridge, "dead").run() == (3, 0, 0, 0)
        while processor.stats.dead_letters < 3:
            time.sleep(0.01)
    assert values(bridge, "dead") == numbers(3) * 2


def test_dead_letters_that_come_after_a_redrive_began_are_left_for_the_next(bridge, url):
    make_dead_letters(url, 3)
    late = [2]

    def send_late(event: Event) -> None:
        if event.name == "reader.poll" and event.data["group"] == "txnbridge-redrive-dead" and late:
            make_dead_letters(url, late.pop())

    with listening(send_late), txnbridge.connect(url) as redriving:
        assert Redrive(redriving, "dead").run() == (3, 0, 0, 0)
    assert Redrive(bridge, "dead").run() == (2, 0, 0, 0)


def test_a_message_without_a_key_comes_back_to_its_partition(bridge, url):
    bridge.admin.create_topic("in", partitions=8)
    with bridge.transaction() as txn:
        for number in range(8):
            txn.send("in", b"%d" % number, partition=number)
    bridge.processor("in", each=refuse, **REFUSING).run(until_idle=True)
    Redrive(bridge, "dead").run()
    assert sorted((m.partition, m.value) for m in bridge.read("in", limit=100)) == sorted(
        [(number, b"%d" % number) for number in range(8)] * 2
    )
