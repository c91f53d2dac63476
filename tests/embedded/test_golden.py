"""A file that this version wrote stays readable, with all that is in it."""

import json
import lzma
from pathlib import Path

import pytest

import txnbridge
from tests.embedded.kit import rows
from tests.inside import broker_of
from txnbridge import Outcome
from txnbridge.spi import Deadline, Decision, TokenState

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def tokens():
    return json.loads((GOLDEN / "v2.json").read_text())


@pytest.fixture
def bridge(path):
    path.write_bytes(lzma.decompress((GOLDEN / "v2.db.xz").read_bytes()))
    with txnbridge.connect(f"embedded:{path}", transactional_id="billing", application="golden") as opened:
        yield opened


def test_messages(bridge):
    found = sorted(bridge.read("orders", 100), key=lambda message: message.partition)
    assert [(m.partition, m.position, m.key, m.value, m.timestamp) for m in found] == [
        (0, (0,), b"key", b"1", 1234),
        (1, (0,), b"", None, 1235),
        (2, (0,), None, b"", 1236),
    ]
    assert found[0].headers.raw == (("h", b"\xff\x00"), ("h", "ü".encode()))
    orders = bridge.admin.topic("orders")
    assert (orders.partitions, orders.retention_seconds, orders.retention_bytes) == (3, 10**9, 10**12)


def test_tokens(bridge, tokens):
    states = {name: bridge.status(token).state for name, token in tokens.items()}
    assert states == {"prepared": TokenState.PREPARED, "committed": TokenState.COMMITTED, "aborted": TokenState.ABORTED}
    [prepared] = bridge.admin.transactions()
    assert (prepared.state, prepared.messages, prepared.groups) == ("prepared", 1, ("group",))
    assert bridge.commit(tokens["prepared"]) is Outcome.COMMITTED
    assert b"prepared" in [message.value for message in bridge.read("orders", 100)]


def test_a_group_goes_on_behind_its_acknowledged_messages(bridge, tokens):
    bridge.commit(tokens["prepared"])
    with bridge.consumer("inputs", "group") as consumer:
        found = [message.value for message in consumer.poll(100, timeout=10)]
    assert found == [b"%d" % number for number in range(3, 10)]


def test_an_aborted_acknowledgement_is_delivered_again(bridge, tokens):
    bridge.abort(tokens["prepared"])
    with bridge.consumer("inputs", "group") as consumer:
        found = [message.value for message in consumer.poll(100, timeout=10)]
    assert sorted(found) == sorted(b"%d" % number for number in (1, *range(3, 10)))


def test_a_publishers_sequence(bridge):
    with bridge.publisher("import") as publisher:
        assert publisher.last_sequence("published") == 7


def test_a_decision_log(bridge):
    log = broker_of(bridge).decision_log("golden", Deadline(10))
    assert list(log.read(None, None, Deadline(10))) == [((1,), b"second"), ((2,), b"third")]


def test_a_half_message(bridge):
    halves = broker_of(bridge).half_store()
    assert halves is not None
    [half] = halves.checks("g", 10, Deadline(10))
    assert halves.end(half, Decision.COMMIT, Deadline(10)) is Outcome.COMMITTED
    [message] = bridge.read("halves", 10)
    assert (message.value, message.key, message.headers.raw) == (b"h", b"k", (("a", b"b"),))


def test_owners_and_writing_go_on(bridge):
    assert rows(broker_of(bridge), "SELECT epoch FROM identities WHERE name = 'billing'") == [(2,)]
    with bridge.transaction() as txn:
        txn.send("orders", b"new", partition=1)
    assert [m.value for m in bridge.read("orders", 100) if m.partition == 1] == [None, b"new"]
