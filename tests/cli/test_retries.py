import json
import time

import pytest
from txnbridge_conformance.observing import eventually

from tests.core.processor_kit import send
from tests.failing import on_call
from txnbridge import Capability, Poison
from txnbridge._process.retry_overview import waiting_topics
from txnbridge.spi import absent


def fail(message, txn):
    raise KeyError("no stock")


@pytest.fixture
def waits(bridge):
    """Three orders that wait for an hour: two after their second attempt, one after its first."""
    bridge.processor("orders", group="shipping", each=fail, retry=[0.001, 3600]).run(until_idle=True)
    send(bridge, "orders", b"1", b"2")
    processor = bridge.processor("orders", group="shipping", each=fail, retry=[0.001, 3600])
    with processor:
        eventually(lambda: len(bridge.read("shipping-retry-3600s", 10)) == 2, "they do not fail twice")
    send(bridge, "orders", b"3")
    bridge.processor("orders", group="shipping", each=fail, retry=[3600]).run(until_idle=True)
    return time.time()


def test_waiting_messages_are_listed_by_topic_without_processed_ones(invoke, bridge, waits):
    emptied, waiting = json.loads(invoke("retries", "list", "--json").stdout)
    both, unknown = {"group": "shipping", "due": 0}, {"next_due": None, "attempts": None, "reason": None}
    assert emptied == {"topic": "shipping-retry-1ms", "delay": 0.001, "waiting": 0, **both, **unknown}
    assert 0 < waiting.pop("next_due") / 1000 <= waits + 3600
    last = {"attempts": 2, "reason": "KeyError: 'no stock'"}
    assert waiting == {"topic": "shipping-retry-3600s", "delay": 3600, "waiting": 3, **both, **last}
    shown = invoke("retries", "list", "--group", "shipping").stdout.splitlines()
    assert shown[1].split() == ["shipping-retry-1ms", "0", "0", "-", "-", "-"]
    assert shown[2].split()[:3] == ["shipping-retry-3600s", "3", "0"] and shown[2].endswith("KeyError: 'no stock'")


def test_messages_that_are_due_and_not_processed_are_counted(bridge):
    send(bridge, "orders", b"1")
    processor = bridge.processor("orders", group="shipping", each=fail, retry=[0.001, 0.002])
    with pytest.raises(Poison), processor:
        eventually(lambda: not processor.healthy, "it does not stop")
    (_, last) = waiting_topics(bridge)
    assert (last.topic, last.waiting, last.due, last.attempts) == ("shipping-retry-2ms", 0, 1, 2)


def test_retries_lists_only_messages_not_due_where_a_broker_tells_no_position(
    invoke, bridge, waits, monkeypatch, broken_broker
):
    told = property(lambda broker: broker.inner.capabilities.but({Capability.GROUP_ADMIN: absent("a test says so")}))
    monkeypatch.setenv("TXNBRIDGE_URL", bridge.url.replace("embedded", broken_broker(capabilities=told)))
    listed = json.loads(invoke("retries", "list", "--json").stdout)
    found = {each["topic"]: (each["waiting"], each["due"]) for each in listed}
    assert found == {"shipping-retry-1ms": (0, None), "shipping-retry-3600s": (3, None)}
    assert invoke("retries", "list").stdout.endswith("this broker does not tell which of them are processed\n")


def test_a_retry_topic_that_is_deleted_meanwhile_hides_no_other_one(bridge, waits, monkeypatch):
    def delete(topic, **_):
        if topic == "shipping-retry-1ms":
            bridge.admin.delete_topic(topic)

    on_call(monkeypatch, bridge, "consumer", delete)
    assert [each.topic for each in waiting_topics(bridge)] == ["shipping-retry-3600s"]
