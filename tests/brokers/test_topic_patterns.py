"""Two processors read the topics of a real broker that fit a pattern, while topics come and go."""

import uuid
from contextlib import suppress
from functools import partial
from threading import Thread

import pytest

import txnbridge
from tests.brokers.test_spanning import url_of
from tests.failing import note_calls
from tests.in_time import wait_until
from txnbridge._process.processor import Processor
from txnbridge.cli import main

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


def deletes(bridge: txnbridge.Bridge, topic: str) -> bool:
    with suppress(txnbridge.InvalidState):  # the transaction whose messages are visible is still ending
        bridge.admin.delete_topic(topic)
        return True
    return False


@pytest.mark.parametrize("name", ["kafka", "pulsar", "rocketmq"])
def test_each_message_is_processed_once_while_topics_come_and_go(request, with_timing, name):
    url, tag = url_of(request, name), uuid.uuid4().hex[:8]
    with_timing(pattern_look=1.0)
    topics, out = [f"{tag}-{number}" for number in range(4)], f"out-{tag}"
    sent: list[bytes | None] = []

    def copy(message: txnbridge.Message, txn: txnbridge.Transaction) -> None:
        txn.send(out, message.value)

    def copied() -> list[bytes | None]:
        return sorted(message.value or b"" for message in bridge.read(out, 1000))

    with txnbridge.connect(url, create_topics=2) as bridge, txnbridge.connect(url) as other:
        bridge.ensure_topics(out, topics[0])
        first, second = (each.processor(f"{tag}-*", group=tag, each=copy) for each in (bridge, other))
        with first, second:
            for step in range(8):
                if step == 5:
                    wait_until(lambda: copied() == sent)
                    wait_until(partial(deletes, bridge, topics.pop(1)))
                for topic in topics[: 1 + step // 2]:
                    bridge.ensure_topics(topic)
                    values = [b"%03d" % number for number in range(len(sent), len(sent) + 10)]
                    with bridge.transaction() as txn:
                        txn.send_many(topic, values)
                    sent.extend(values)
                wait_until(lambda: len(copied()) > len(sent) // 2)  # then, perhaps, the next topic is made
            wait_until(lambda: len(copied()) >= len(sent))
            assert first.healthy and second.healthy
        assert copied() == sent


@pytest.mark.parametrize("name", ["kafka", "pulsar", "rocketmq"])
def test_a_copy_by_pattern_goes_on_when_a_topic_is_deleted(request, with_timing, tmp_path, monkeypatch, caplog, name):
    with_timing(pattern_look=1.0)
    url, there, tag = url_of(request, name), f"embedded:{tmp_path}/there.db", uuid.uuid4().hex[:8]
    topics = gone, kept, new = [f"{tag}-{number}" for number in range(3)]
    runs = note_calls(monkeypatch, Processor, "run")

    def sent_and_copied(topic: str, *contents: bytes) -> None:
        with bridge.transaction() as txn:
            txn.send_many(topic, contents)
        wait_until(lambda: [message.value for message in other.read(topic, 9)][-len(contents) :] == [*contents])

    with txnbridge.connect(url) as bridge, txnbridge.connect(there) as other:
        bridge.ensure_topics(gone, kept)
        other.ensure_topics(*topics)
        command = "copy", there, "--topics", f"{tag}-*", "--group", tag, "--url", url
        copy = Thread(target=main, args=(command,), kwargs={"standalone_mode": False})
        copy.start()
        try:
            sent_and_copied(gone, b"1")
            wait_until(partial(deletes, bridge, gone))
            wait_until(lambda: f"topic {gone!r} is gone" in caplog.text)
            sent_and_copied(kept, b"2", b"3")
            bridge.ensure_topics(new)
            sent_and_copied(new, b"4")
            assert copy.is_alive()
        finally:
            for processor, *_ in runs:
                processor.stop()
            copy.join()
