"""The official client beside our readers: what it writes we read, and a group goes on from one to the other."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.reading_kit import values
from tests.pulsar.client_kit import batch_of, service
from tests.pulsar.reading_kit import write

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pulsar") is None, reason="needs the official client: pip install pulsar-client"
)
PROGRAM = Path(__file__).with_name("official.py")


@pytest.fixture
def official(pulsar_broker):
    """Have the official client do something in a process of its own; what it says."""

    def run(what, topic):
        command = [sys.executable, str(PROGRAM), service(pulsar_broker), what, topic]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


@pytest.mark.parametrize("group", [None, "group"], ids=["alone", "group"])
def test_messages_of_the_official_client_are_read(official, topic, member, group):
    official("write", topic)
    found = member(topic, group).take(21)
    assert [(m.value, m.key, m.headers["number"], m.timestamp) for m in found[:20]] == [
        (b"%d" % number, b"key %d" % number, str(number), 1000 + number) for number in range(20)
    ]
    assert found[20].value == b"x" * 6_000_000
    assert json.loads(member(f"{topic}-schema", group).take(1)[0].value) == {"id": 7}


@pytest.mark.parametrize("commit", [True, False], ids=["committed", "aborted"])
def test_the_official_client_goes_on_where_our_transactions_left_a_group(official, client, topic, member, commit):
    write(client, topic, b"0", batch_of(b"1", b"2", b"3"), b"end")
    reader = member(topic)
    found = reader.take(4)
    txn = reader.begin((topic, 0))
    reader.ack(txn, [found[0], found[2]])
    reader.end(txn, commit)
    reader.leave()
    assert official("read", topic) == (["1", "3"] if commit else ["0", "1", "2", "3"])
    assert values(member(topic).take(5 - 2 * commit)) == ([b"1", b"3"] if commit else [b"0", b"1", b"2", b"3"]) + [
        b"end"
    ]
