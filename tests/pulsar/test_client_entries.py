"""Entries: what is sent is received again, alone and in batches, packed and in chunks; and damaged ones are refused."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.client.format.codec import encode
from txnbridge_pulsar.client.format.compression import Compression, compress, decompress
from txnbridge_pulsar.client.format.frames import FrameReader, command, parse, send_command, split_entry
from txnbridge_pulsar.client.format.ids import (
    ack_set,
    cumulative_ack_fields,
    delivered_indexes,
    extra_index_ack_fields,
    individual_ack_fields,
)
from txnbridge_pulsar.client.format.outgoing_entry import Content
from txnbridge_pulsar.client.format.received_entries import CHUNK_OVERHEAD_BYTES, MAX_INCOMPLETE_MESSAGES, Chunks

from tests.pulsar.client_kit import batch_of

pytestmark = pytest.mark.offline

MINIMUM = {"producer_name": "p", "sequence_id": 5, "publish_time": 1}


@contextmanager
def traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def entry_of(
    content: Content,
    index_words: list[int] | None = None,
    compression: Compression = Compression.NONE,
    kind: type[wire.ReceivedEntry] = wire.ReceivedEntry,
    **metadata: Any,
) -> wire.ReceivedEntry:
    """Return the content as a consumer gets it."""
    body = content.body()
    described: dict[str, Any] = {**MINIMUM, **content.metadata(), **metadata}
    if compression:
        described |= {"compression": compression, "uncompressed_size": len(body)}
    frame = send_command(
        {"producer_id": 1, "sequence_id": 5}, encode("MessageMetadata", described), compress(compression, body)
    )
    position = {"ledger_id": 7, "entry_id": 8, "partition": 2}
    fields: dict[str, Any] = {"message_id": position, "ack_set": index_words or []}
    return kind(None, 1, fields, parse(frame[4:]).tail)


KEYS = st.none() | st.binary(max_size=20) | st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
PROPERTIES = st.lists(st.tuples(TEXT, TEXT), max_size=3)
MESSAGES = st.tuples(st.none() | st.binary(max_size=200), KEYS, PROPERTIES, st.none() | st.integers(1, 1 << 40))


def as_bytes(key: bytes | str | None) -> bytes | None:
    return key.encode() if isinstance(key, str) else key


def parts(message: Any) -> tuple[Any, ...]:
    return (message.value, message.key, message.properties, message.event_time)


@given(st.lists(MESSAGES, min_size=1, max_size=20), st.sampled_from([Compression.NONE, Compression.ZLIB]))
def test_a_batch_is_read_as_it_was_filled(messages, compression):
    batch = wire.MessageBatch()
    for message in messages:
        batch.append(*message)
    assert batch.size == len(batch.body())
    entry = entry_of(batch, compression=compression)
    assert (entry.is_batch, entry.count, entry.permits) == (True, len(messages), len(messages))
    read = entry.messages()
    assert [parts(found) for found in read] == [(m[0], as_bytes(m[1]), *m[2:]) for m in messages]
    assert [found.id for found in read] == [wire.MessageId(7, 8, 2, i, len(messages)) for i in range(len(messages))]


@given(MESSAGES)
def test_a_message_alone_is_read_as_it_was_sent(message):
    value, key, properties, event_time = message
    (found,) = entry_of(wire.Single(value, key, properties, event_time)).messages()
    assert parts(found) == (value, as_bytes(key), properties, event_time)
    assert found.id == wire.MessageId(7, 8, 2)


def test_times_that_java_cannot_hold_are_none_or_the_latest():
    entry = entry_of(wire.Single(b"", event_time=1 << 63), publish_time=(1 << 64) - 1)
    assert (entry.messages()[0].event_time, entry.publish_time) == (None, (1 << 63) - 1)


@given(st.lists(st.binary(max_size=300), max_size=30))
def test_a_batch_of_payloads_alone_has_the_same_bytes_as_one_filled_message_by_message(payloads):
    at_once, one_by_one = wire.MessageBatch(), wire.MessageBatch()
    at_once.extend(payloads)
    for payload in payloads:
        one_by_one.append(payload)
    assert (at_once.body(), at_once.size, at_once.count) == (one_by_one.body(), one_by_one.size, len(payloads))


def test_the_key_of_a_batchs_first_message_routes_it():
    batch = wire.MessageBatch()
    batch.append(b"1", b"\x00key")
    batch.append(b"2", b"other")
    assert batch.metadata()["partition_key"] == "AGtleQ=="
    assert batch.metadata()["partition_key_b64_encoded"]


def test_a_key_that_is_not_the_base64_that_it_claims_to_be_is_taken_as_text():
    odd = wire.Single(b"v", "é")
    (message,) = entry_of(odd, partition_key_b64_encoded=True).messages()
    assert message.key == "é".encode()


def test_a_batch_that_claims_billions_of_messages_takes_no_such_memory():
    entry = entry_of(batch_of(b"x"), num_messages_in_batch=2**31 - 1)
    with traced():
        assert not entry.is_acknowledged and tracemalloc.get_traced_memory()[1] < 1_000_000


def test_an_entry_says_which_transaction_it_belongs_to_also_if_that_is_0_0():
    assert entry_of(wire.Single(b"x")).txn is None
    assert entry_of(wire.Single(b"x"), **wire.TxnId(0, 0).fields).txn == wire.TxnId(0, 0)


def test_messages_of_a_batch_that_are_acknowledged_are_left_out():
    entry = entry_of(batch_of(*(b"%d" % number for number in range(130))), ack_set(130, [0, 63, 64, 129]))
    assert [message.index for message in entry.messages()] == [i for i in range(130) if i not in (0, 63, 64, 129)]
    assert entry.permits == 126


@pytest.mark.parametrize(
    ("left", "is_acknowledged"), [([], False), ([0b110], False), ([0b010], False), ([0b100], True)]
)
def test_a_batch_is_acknowledged_if_at_most_its_extra_index_is_left_and_its_size_is_known(left, is_acknowledged):
    assert entry_of(batch_of(b"1", b"2"), left).is_acknowledged == is_acknowledged
    fields = {"message_id": {"ledger_id": 7, "entry_id": 8}, "ack_set": left}
    unreadable = wire.ReceivedEntry(None, 1, fields, b"damaged")
    assert unreadable.fault is not None and not unreadable.is_acknowledged


class Slow(wire.ReceivedEntry):
    """Reads each message by itself."""

    def _alike(self, payload):
        return []


@given(st.binary(max_size=300), st.integers(1, 300))
def test_messages_of_one_size_come_as_they_were_sent(content, count):
    payloads = [bytes([number % 256]) + content for number in range(count)] if content else [b""] * count
    entry = entry_of(batch_of(*payloads))
    assert entry._alike(entry._unpacked())
    assert [record[:2] for record in entry.records()] == list(enumerate(payloads))


@given(st.binary(max_size=60), st.integers(1, 2**31 - 1))
def test_a_batch_of_any_bytes_is_the_same_in_both_ways_of_reading(payload, count):
    alike = entry_of(wire.Single(payload), num_messages_in_batch=count)
    slow = entry_of(wire.Single(payload), kind=Slow, num_messages_in_batch=count)
    assert records_or_error(alike) == records_or_error(slow)


def records_or_error(entry):
    try:
        return entry.records()
    except wire.CorruptEntry as error:
        return str(error)


def test_a_message_that_says_more_than_the_first_is_read_by_itself():
    batch = batch_of(b"12345")
    batch.append(b"", "k")  # as many bytes: two of the key's own, its tag and its length
    assert [record[1] for record in entry_of(batch).records()] == [b"12345", b""]


@given(st.integers(1, 300), st.data())
def test_the_bits_of_a_batch_name_what_is_not_acknowledged(size, data):
    acked = data.draw(st.sets(st.integers(0, size - 1)))
    words = ack_set(size, acked)
    left = sorted(set(range(size)) - acked)
    assert delivered_indexes(words) == left
    assert bool(words) == bool(left)


def test_ids_of_one_batch_become_one_with_bits_and_its_size_and_others_none():
    ids = [wire.MessageId(1, 2, -1, 0, 3), wire.MessageId(1, 3), wire.MessageId(1, 2, -1, 2, 3)]
    whole = [wire.MessageId(1, 4, -1, index, 2) for index in range(2)]
    assert individual_ack_fields(ids + whole) == [
        {"ledger_id": 1, "entry_id": 2, "ack_set": [0b010], "batch_size": 3},
        {"ledger_id": 1, "entry_id": 3},
        {"ledger_id": 1, "entry_id": 4, "ack_set": [], "batch_size": 2},
    ]


@given(st.integers(1, 300), st.data())
def test_the_extra_index_of_a_batch_is_never_acknowledged_together_with_messages(size, data):
    acked = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
    (fields,) = individual_ack_fields([wire.MessageId(1, 2, -1, index, size) for index in acked], extra_index=True)
    left = sorted(set(range(size)) - acked)
    assert delivered_indexes(fields["ack_set"]) == [*left, size]
    assert fields["batch_size"] == size + 1
    assert delivered_indexes(extra_index_ack_fields(wire.MessageId(1, 2), size)["ack_set"]) == list(range(size))


def test_acknowledging_up_to_the_middle_of_a_batch_leaves_its_rest():
    fields = cumulative_ack_fields(wire.MessageId(1, 2, -1, 1, 4))
    assert fields == {"ledger_id": 1, "entry_id": 2, "ack_set": [0b1100], "batch_size": 4}


@pytest.mark.parametrize("kind", list(Compression), ids=lambda kind: kind.name)
@pytest.mark.parametrize("data", [b"", b"x", b"again and again " * 1000], ids=["empty", "short", "long"])
def test_packed_bytes_are_unpacked(kind, data):
    assert decompress(kind, installed(compress, kind, data), len(data), 1 << 20) == data


def installed(call: Any, *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except wire.MissingLibrary as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("kind", [kind for kind in Compression if kind], ids=lambda kind: kind.name)
def test_a_packed_entry_of_another_size_than_it_claims_is_refused_and_takes_no_such_memory(kind):
    for data, sizes in (b"again and again " * 10, (0, 159, 161)), (bytes(50_000_000), (1000,)):
        packed = installed(compress, kind, data)
        for size in sizes:
            with traced():
                with pytest.raises(wire.CorruptEntry):
                    decompress(kind, packed, size, 1 << 20)
                assert tracemalloc.get_traced_memory()[1] < 5_000_000


@pytest.mark.parametrize("kind", [1, 2, 3, 4, 5, -1])
def test_an_entry_that_claims_more_than_is_taken_is_refused_unread(kind):
    with pytest.raises(wire.CorruptEntry):
        decompress(kind, b"", 1 << 30, 1 << 20)


@given(kind=st.sampled_from([kind for kind in Compression if kind]), data=st.binary(max_size=200))
def test_garbage_is_unpacked_or_refused(kind, data):
    with suppress(wire.CorruptEntry, wire.MissingLibrary):
        decompress(kind, data, 100, 1 << 20)


def chunk_of(uuid: str, number: int, of: int, payload: bytes, at: int, whole: int) -> wire.ReceivedEntry:
    metadata: dict[str, Any] = {"uuid": uuid, "chunk_id": number, "num_chunks_from_msg": of}
    entry = entry_of(wire.Single(payload), **metadata, total_chunk_msg_size=whole)
    entry.id = wire.MessageId(7, at)
    return entry


def add(chunks: Chunks, entry: wire.ReceivedEntry, max_bytes: int = 1 << 20) -> wire.ReceivedEntry | None:
    assert entry.chunk is not None
    return chunks.add(entry, entry.chunk, max_bytes)


def test_a_message_in_chunks_is_whole_with_its_last_one():
    chunks = Chunks()
    assert add(chunks, chunk_of("a", 0, 3, b"one ", 1, 13)) is None
    assert add(chunks, chunk_of("b", 0, 2, b"other", 2, 10)) is None
    assert add(chunks, chunk_of("a", 1, 3, b"two ", 3, 13)) is None
    whole = add(chunks, chunk_of("a", 2, 3, b"three", 4, 13))
    assert whole is not None
    assert [message.payload for message in whole.messages()] == [b"one two three"]
    assert whole.id == wire.MessageId(7, 4, first_chunk=(7, 1))
    assert whole.parts == (wire.MessageId(7, 1), wire.MessageId(7, 3), wire.MessageId(7, 4))
    assert whole.chunk is None


def test_chunks_that_come_again_from_the_first_make_the_message_once():
    chunks = Chunks()
    found = [add(chunks, chunk_of("a", number, 2, b"one", number, 6)) for number in (0, 0, 1)]
    assert [entry is not None for entry in found] == [False, False, True]
    assert found[2] is not None and found[2].parts == (wire.MessageId(7, 0), wire.MessageId(7, 1))


def test_chunks_that_a_sender_has_stored_twice_make_the_message_once_and_are_acknowledged_with_it():
    chunks = Chunks()
    numbers = enumerate((0, 1, 0, 1, 1, 0, 1, 1, 2))
    found = [add(chunks, chunk_of("a", number, 3, b"one", at, 9)) for at, number in numbers]
    assert found[:-1] == [None] * 8 and found[-1] is not None
    assert [message.payload for message in found[-1].messages()] == [b"oneoneone"]
    assert sorted(found[-1].parts) == [wire.MessageId(7, at) for at in range(9)]


def test_chunks_that_do_not_add_up_to_their_message_are_refused():
    chunks = Chunks()
    add(chunks, chunk_of("a", 0, 2, b"one", 1, 7))
    whole = add(chunks, chunk_of("a", 1, 2, b"two", 2, 7))
    assert whole is not None
    with pytest.raises(wire.CorruptEntry, match="7:1"):
        whole.messages()


def begun(chunks: Chunks) -> list[list[wire.ReceivedEntry]]:
    """Return the entries of each incomplete message."""
    return list(chunks._begun.values())


def held(chunks: Chunks) -> int:
    """Bytes, as they count."""
    return sum(entry.size + CHUNK_OVERHEAD_BYTES for each in begun(chunks) for entry in each)


def test_incomplete_messages_are_held_within_a_limit():
    chunks = Chunks()
    for number in range(10 * MAX_INCOMPLETE_MESSAGES):
        add(chunks, chunk_of(f"{number}", 0, 2, b"one", number, 6))
    assert len(begun(chunks)) == MAX_INCOMPLETE_MESSAGES
    for number in range(10):
        add(chunks, chunk_of(f"large {number}", 0, 2, bytes(1000), number, 2000), max_bytes=5000)
        assert held(chunks) <= 5000
    assert chunks.incomplete


@pytest.mark.parametrize("claimed", [10, 1000, 10**6, None], ids="claims {}".format)
def test_one_message_is_held_within_the_limit_whatever_it_claims(claimed):
    chunks, refused = Chunks(), []
    for number in range(500):
        chunk = chunk_of("a", number, 500, bytes(100_000), number, 0)
        if claimed is None:
            del chunk.metadata["total_chunk_msg_size"]
        else:
            chunk.metadata["total_chunk_msg_size"] = claimed
        if (found := add(chunks, chunk, max_bytes=5_000_000)) is not None:
            refused.append((number, found))
        assert held(chunks) <= 5_000_000
    ((number, entry),) = refused  # told once: who seeks behind it goes on
    assert 40 < number < 50 and not chunks.incomplete
    with pytest.raises(wire.CorruptEntry, match=rf"larger.*7:{number}"):
        entry.messages()


@pytest.mark.parametrize(("of", "claimed"), [(2, 2**31 - 1), (2**31 - 1, 4)])
def test_a_message_that_claims_to_be_too_large_is_refused_with_its_first_chunk(of, claimed):
    chunks = Chunks()
    entry = add(chunks, chunk_of("a", 0, of, b"x", 1, claimed))
    assert entry is not None and not chunks.incomplete
    with pytest.raises(wire.CorruptEntry, match="claims"):
        entry.messages()
    assert add(chunks, chunk_of("a", 1, of, b"x", 2, claimed)) is None
    chunks = Chunks((7, 2), True)  # of a reader that has begun between both
    assert add(chunks, chunk_of("a", 0, of, b"x", 1, claimed)) is None
    entry = add(chunks, chunk_of("a", 1, of, b"x", 2, claimed))
    assert entry is not None and entry.fault is not None


def test_many_small_chunks_take_no_more_memory_than_a_few_large_ones():
    chunks, limit, of, number = Chunks(), 2_000_000, 100, 0
    with traced():  # each says that few follow
        while add(chunks, chunk_of("a", number, number + of, b"", number, 0), limit) is None:
            number += 1
            assert tracemalloc.get_traced_memory()[0] < limit
    assert number > of


def test_a_message_that_fills_the_limit_is_whole():
    def parts():
        return [chunk_of("a", number, 3, bytes(1000), number, 3000) for number in range(3)]

    chunks = Chunks()
    size = sum(part.size + CHUNK_OVERHEAD_BYTES for part in parts())
    found = [add(chunks, part, max_bytes=size) for part in parts()]
    assert found[2] is not None and [message.payload for message in found[2].messages()] == [bytes(3000)]
    found = [add(chunks, part, max_bytes=size - 1) for part in parts()]
    assert found[:2] == [None, None] and found[2] is not None and found[2].fault is not None


def test_a_message_that_was_dropped_for_others_and_goes_on_is_told_once():
    chunks = Chunks()
    for number in range(MAX_INCOMPLETE_MESSAGES + 1):
        add(chunks, chunk_of(f"{number}", 0, 4, b"x", number, 4))
    dropped = [add(chunks, chunk_of("0", number, 4, b"x", 100 + number, 4)) for number in (1, 2, 3)]
    assert [entry is not None for entry in dropped] == [True, False, False]
    assert dropped[0] is not None
    with pytest.raises(wire.CorruptEntry, match=r"dropped.*7:101"):
        dropped[0].messages()
    found = [add(chunks, chunk_of("0", number, 4, b"x", number, 4)) for number in range(4)]  # it comes again
    assert found[3] is not None and len(found[3].messages()) == 1


def arrive(chunks: Chunks, number: int, arrival: int, redeliveries: int = 0, of: int = 3) -> wire.ReceivedEntry | None:
    """Add a chunk of 1,000 bytes that is the entry with this number since the consumer was opened."""
    chunk = chunk_of("a", number, of, bytes(1000), number, 1000 * of)
    chunk.arrival, chunk.redeliveries = arrival, redeliveries
    return add(chunks, chunk, max_bytes=18_000)


def test_chunks_wait_for_the_next_one_twice_as_long_each_time_they_come_again():
    chunks, waited = Chunks(), []
    for redeliveries in range(6):
        arrive(chunks, 0, 2 * redeliveries, redeliveries)
        arrive(chunks, 1, 2 * redeliveries + 1)  # it starts the wait anew, but does not shorten it
        waited.append(next(number for number in range(20) if chunks.take(2 * redeliveries + 1, every=False)))
        assert not chunks.incomplete and held(chunks) == 0
    assert waited == [1, 2, 4, 8, 8, 8]


def test_only_chunks_whose_message_does_not_continue_are_given_back():
    chunks, other = Chunks(), chunk_of("other", 0, 2, b"x", 9, 2)
    arrive(chunks, 0, 1)
    other.arrival = 2
    add(chunks, other)
    assert chunks.take(2, every=False) == []
    arrive(chunks, 1, 3)
    assert chunks.take(3, every=False) == [other.id]
    whole = arrive(chunks, 2, 4)
    assert whole is not None and [len(message.payload) for message in whole.messages()] == [3000]
    assert [chunks.take(4, every) for every in (False, False, True)] == [[], [], []]


def test_chunks_that_were_given_back_are_not_read_in_part_or_counted():
    """A chunk that was under way when the ones before it were given back goes back, too."""
    chunks, parts = Chunks(), [wire.MessageId(7, number) for number in range(8)]
    for number in range(7):
        arrive(chunks, number, number + 1, of=8)
    assert [chunks.take(7, every=False) for _ in range(2)] == [[], parts[:7]]
    assert arrive(chunks, 7, 8, of=8) is None
    for number in range(7):
        assert arrive(chunks, number, 9 + number, redeliveries=1, of=8) is None
    assert [chunks.take(15, every=False) for _ in range(2)] == [[], parts[7:]]
    whole = arrive(chunks, 7, 16, redeliveries=1, of=8)
    assert whole is not None and whole.parts == tuple(parts) and len(whole.messages()[0].payload) == 8000
    assert held(chunks) == 0 and chunks.take(16, every=True) == []


@pytest.mark.parametrize("numbers", [(1,), (0, -5)], ids=["its first one was not seen", "below zero"])
def test_a_chunk_that_cannot_come_now_starts_no_message(numbers):
    chunks = Chunks()
    assert [add(chunks, chunk_of("a", number, 3, b"x", 9 + number, 3)) for number in numbers] == [None] * len(numbers)
    assert not chunks.incomplete


def tail_of(content: Content) -> bytes:
    frame = send_command({"producer_id": 1, "sequence_id": 5}, encode("MessageMetadata", MINIMUM), content.body())
    return parse(frame[4:]).tail


@given(st.integers(0, 200), st.integers(1, 255))
def test_one_wrong_byte_is_noticed(at, difference):
    tail = bytearray(tail_of(wire.Single(b"payload" * 30)))
    tail[6 + at] ^= difference  # behind the checksum
    entry = wire.ReceivedEntry(None, 1, {"message_id": {"ledger_id": 7, "entry_id": 8}}, bytes(tail))
    with pytest.raises(wire.CorruptEntry, match="7:8"):
        entry.messages()


@given(st.binary(max_size=100))
def test_an_entry_of_garbage_is_refused_when_its_messages_are_asked_for(tail):
    entry = wire.ReceivedEntry(None, 1, {"message_id": {"ledger_id": 7, "entry_id": 8}}, tail)
    if entry.fault is not None:
        with pytest.raises(wire.CorruptEntry):
            entry.messages()
        assert entry.permits == 1


def test_a_batch_that_claims_more_messages_than_it_has_is_refused():
    for claimed in (3, 2**31 - 1):
        with pytest.raises(wire.CorruptEntry):
            entry_of(batch_of(b"one", b"two"), num_messages_in_batch=claimed).messages()


@given(st.binary(max_size=200))
def test_a_batch_of_garbage_is_read_or_refused(payload):
    with suppress(wire.CorruptEntry):
        entry_of(wire.Single(payload), num_messages_in_batch=3).messages()


def test_metadata_that_a_broker_adds_before_an_entry_are_not_part_of_it():
    added = b"\x08\x01\x10\x29"  # the broker's time and the message's index in the topic
    tail = b"\x0e\x02" + len(added).to_bytes(4, "big") + added + tail_of(wire.Single(b"x"))
    entry = wire.ReceivedEntry(None, 1, {"message_id": {"ledger_id": 7, "entry_id": 8}}, tail)
    assert [message.payload for message in entry.messages()] == [b"x"]


def test_an_entry_without_a_checksum_is_read():
    tail = tail_of(wire.Single(b"x"))[6:]
    metadata, payload = split_entry(tail)
    assert (metadata["sequence_id"], payload) == (5, b"x")


def feed(reader: FrameReader, data: bytes) -> list[bytes]:
    """Feed the bytes as a connection does: as many at a time as there is room for."""
    found = []
    while data:
        with reader.space() as space:
            size = min(len(space), len(data))
            space[:size] = data[:size]
        data = data[size:]
        found += reader.frames(size)
    return found


@given(st.lists(st.binary(min_size=4, max_size=400_000), max_size=5), st.integers(1, 300_000))
def test_frames_are_cut_wherever_the_stream_was(bodies, step):
    stream = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
    reader = FrameReader(500_000)
    found = []
    for at in range(0, len(stream), step):
        found += feed(reader, stream[at : at + step])
    assert found == bodies


@pytest.mark.parametrize("size", [0, 3, 5_000_001, 2**31, 2**32 - 1])
def test_a_frame_of_an_impossible_size_is_refused_before_memory_is_taken_for_it(size):
    reader = FrameReader(5_000_000)
    with traced():
        with pytest.raises(wire.ProtocolError):
            feed(reader, size.to_bytes(4, "big") + b"x" * 100)
        assert tracemalloc.get_traced_memory()[1] < 100_000


def test_a_large_frames_memory_is_given_back():
    reader = FrameReader(5_000_000)
    assert feed(reader, (4_000_000).to_bytes(4, "big") + bytes(4_000_000)) == [bytes(4_000_000)]
    feed(reader, command("ping"))
    assert len(reader._buffer) < 1_000_000


@given(st.binary(max_size=200))
def test_a_frame_of_garbage_is_read_or_refused(data):
    with suppress(wire.ProtocolError):
        parse(data)


@given(st.binary(min_size=1, max_size=200), st.integers(0, 2**32 - 1))
def test_a_frame_whose_command_is_longer_than_itself_is_refused(data, size):
    size = max(size, len(data) + 1)
    with pytest.raises(wire.ProtocolError):
        parse(size.to_bytes(4, "big") + data)
