"""Batches whose messages are all alike are read in fewer steps, and as every other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from txnbridge_pulsar.client.codec import encode
from txnbridge_pulsar.client.entry_contents import MessageBatch
from txnbridge_pulsar.client.errors import CorruptEntry
from txnbridge_pulsar.client.received_entries import ReceivedEntry

pytestmark = pytest.mark.offline


class Slow(ReceivedEntry):
    """Reads each message by itself."""

    def _alike(self, payload):
        return []


def entry_of(count, payload, kind=ReceivedEntry):
    metadata = encode(
        "MessageMetadata", {"producer_name": "p", "sequence_id": 0, "publish_time": 1, "num_messages_in_batch": count}
    )
    tail = len(metadata).to_bytes(4, "big") + metadata + payload
    return kind(None, 1, {"message_id": {"ledger_id": 1, "entry_id": 2}}, tail)


def batch_of(*payloads):
    batch = MessageBatch()
    batch.extend(payloads)
    return entry_of(len(payloads), batch.body())


@given(st.binary(max_size=300), st.integers(1, 300))
def test_messages_of_one_size_come_as_they_were_sent(content, count):
    payloads = [bytes([number % 256]) + content for number in range(count)] if content else [b""] * count
    entry = batch_of(*payloads)
    assert entry._alike(entry._unpacked())
    assert [record[:2] for record in entry.records()] == list(enumerate(payloads))


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=20))
def test_messages_of_any_size_come_as_they_were_sent(payloads):
    assert [record[1] for record in batch_of(*payloads).records()] == payloads


@given(st.binary(max_size=60), st.integers(1, 2**31 - 1))
def test_whatever_the_bytes_are_both_ways_say_the_same(payload, count):
    alike, slow = entry_of(count, payload), entry_of(count, payload, Slow)
    assert told(alike) == told(slow)


def told(entry):
    try:
        return entry.records()
    except CorruptEntry as error:
        return str(error)


def test_a_message_that_says_more_than_the_first_is_read_by_itself():
    batch = MessageBatch()
    batch.append(b"12345")
    batch.append(b"", "k")  # as many bytes: two of the key's own, its tag and its length
    entry = entry_of(2, batch.body())
    assert [record[1] for record in entry.records()] == [b"12345", b""]
