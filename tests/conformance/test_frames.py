"""Tests of the frame splitter: it changes no byte, and no stream makes it wait, fail or grow."""

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from txnbridge_conformance.faults import _protocols
from txnbridge_conformance.faults._protocols import FrameSplitter, KafkaConversation, PulsarConversation, StreamPiece

from tests.brokers.pulsar_kit import encode

HEAD = 8
GIANT = 2**31 - 1
# The longest head, for heads that contain their length.
LONGEST = 5 * 1024 * 1024 + 10 * 1024


def frame(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


def sized_head(content: bytes) -> bytes:
    return struct.pack(">i", len(content)) + content


def pieces(chunks: list[bytes], head_size: int | None = HEAD) -> list[StreamPiece]:
    splitter = FrameSplitter(head_size)
    return [piece for chunk in chunks for piece in splitter.feed(chunk)] + list(splitter.flush())


def cut_up(data: bytes, sizes: list[int]) -> list[bytes]:
    chunks = []
    for size in sizes:
        chunks.append(data[:size])
        data = data[size:]
    return [*chunks, data]


sizes = st.lists(st.integers(1, 20))
fixed = st.binary(min_size=HEAD, max_size=50).map(lambda body: (body[:HEAD], body[HEAD:]))
sized = st.tuples(st.binary(max_size=30).map(sized_head), st.binary(max_size=30))
# A size of heads, and frames with such heads.
framings = st.one_of(st.tuples(st.just(HEAD), st.lists(fixed)), st.tuples(st.none(), st.lists(sized)))


@given(framings, sizes)
def test_every_frame_begins_a_piece_however_the_stream_is_cut(framing, sizes):
    head_size, frames = framing
    bodies = [head + rest for head, rest in frames]
    stream = b"".join(map(frame, bodies))
    found = pieces(cut_up(stream, sizes), head_size)
    assert [piece.head for piece in found if piece.head is not None] == [head for head, _ in frames]
    assert b"".join(piece.data for piece in found) == stream
    # A frame consists of a piece with a head and the following pieces without one.
    whole: list[bytes] = []
    for piece in found:
        if piece.head is None:
            whole[-1] += piece.data
        else:
            whole.append(piece.data)
    assert whole == list(map(frame, bodies))


@given(st.binary(max_size=200), sizes, st.sampled_from([HEAD, None]))
def test_garbage_comes_out_as_it_went_in(garbage, sizes, head_size):
    assert b"".join(piece.data for piece in pieces(cut_up(garbage, sizes), head_size)) == garbage


@given(framings, st.integers(0, 60))
def test_a_stream_that_ends_anywhere_comes_out_whole(framing, end):
    head_size, frames = framing
    stream = b"".join(frame(head + rest) for head, rest in frames)[:end]
    assert b"".join(piece.data for piece in pieces([stream], head_size)) == stream


@pytest.mark.parametrize("length", [-(2**31), -1, 0, HEAD - 1])
def test_after_a_length_that_no_frame_has_all_passes_as_it_comes(length):
    lost = struct.pack(">i", length)
    stream = frame(b"12345678") + lost + frame(b"87654321")
    assert [piece.head for piece in pieces([stream])] == [b"12345678", None, None]
    splitter = FrameSplitter(HEAD)
    list(splitter.feed(lost))
    assert list(splitter.feed(b"x")) == [StreamPiece(b"x")]


@pytest.mark.parametrize(("length", "head"), [(3, 0), (4, 1), (100, 97), (100, 2**32 - 1), (GIANT, LONGEST - 3)])
def test_after_a_head_that_no_frame_has_all_passes_as_it_comes(length, head):
    stream = frame(sized_head(b"good")) + struct.pack(">iI", length, head) + frame(sized_head(b"lost"))
    assert [piece.head for piece in pieces([stream], None)] == [sized_head(b"good"), None, None]


def test_a_head_is_waited_for_in_no_more_memory_than_the_bytes_that_came():
    splitter = FrameSplitter(None)
    size = LONGEST - 4
    tracemalloc.start()
    try:
        assert not list(splitter.feed(struct.pack(">iI", GIANT, size)))
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()
    chunk = bytes(1 << 16)
    sent = 0
    while sent + len(chunk) < size:
        assert not list(splitter.feed(chunk))
        sent += len(chunk)
    (whole,) = splitter.feed(bytes(size - sent))
    assert whole.head is not None and len(whole.head) == LONGEST


@pytest.mark.parametrize(("head_size", "head"), [(HEAD, b"12345678"), (None, b"\0\0\0\x04abcd")])
def test_a_giant_length_costs_no_memory_and_no_byte_waits(head_size, head):
    splitter = FrameSplitter(head_size)
    chunk = bytes(1 << 16)
    tracemalloc.start()
    try:
        (first,) = splitter.feed(struct.pack(">i", GIANT) + head)
        assert first.head == head
        for _ in range(1000):
            assert [piece.data for piece in splitter.feed(chunk)] == [chunk]
        assert tracemalloc.get_traced_memory()[1] < 10 * len(chunk)
    finally:
        tracemalloc.stop()


def request(kind: int, correlation_id: int) -> bytes:
    return struct.pack(">hhi", kind, 1, correlation_id)


def answer(correlation_id: int) -> bytes:
    return struct.pack(">i", correlation_id)


def test_an_answer_belongs_to_the_request_of_its_number_whatever_was_not_answered_or_not_asked():
    conversation = KafkaConversation()
    first, unanswered, last = (conversation.request(request(kind, at)) for at, kind in enumerate((26, 0, 26)))
    assert (first.kind, first.version, first.correlation_id) == (26, 1, 0)
    assert conversation.answer(answer(7)) is None
    assert conversation.answer(answer(0)) is first
    assert first.answered.is_set() and not last.answered.is_set()
    assert conversation.answer(answer(2)) is last
    assert not unanswered.answered.is_set()


@pytest.mark.parametrize("protocol", [KafkaConversation, PulsarConversation])
@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=50))))
def test_no_heads_in_any_order_are_an_error(protocol, heads):
    conversation = protocol()
    for is_request, head in heads:
        way = "request" if is_request else "answer"
        size = getattr(protocol, f"{way}_head")
        getattr(conversation, way)(head.ljust(size or 0)[:size])


def command(kind: int, *fields: tuple[int, _protocols.Value]) -> bytes:
    return sized_head(encode([(1, kind), (kind, encode(fields))]))


@pytest.mark.parametrize(
    ("asked", "answered", "number"),
    [
        (command(56, (1, 9), (2, 0), (3, 0), (4, 0)), command(57, (1, 9), (2, 0), (3, 0)), 9),  # END_TXN
        (command(56, (1, 9)), command(14, (1, 9), (2, 22), (3, b"not allowed")), 9),  # refused
        (command(23, (1, b"topic"), (2, 8), (3, 0)), command(24, (1, b"pulsar://a:1"), (3, 1), (4, 8)), 8),  # LOOKUP
        (command(5, (1, b"topic"), (2, 1), (3, 7)), command(17, (1, 7), (2, b"name")), 7),  # PRODUCER
        (command(4, (1, b"topic"), (2, b"sub"), (3, 0), (4, 1), (5, 6)), command(13, (1, 6)), 6),  # SUBSCRIBE
        (command(10, (1, 1), (2, 0), (3, b""), (8, 5)), command(38, (1, 1), (6, 5)), 5),  # ACK
        (command(6, (1, 2), (2, 4), (3, 1)), command(7, (1, 2), (2, 4), (3, b"id")), 4),  # SEND
        (command(6, (1, 2), (2, 4), (3, 1)), command(7, (1, 2), (2, 4), (4, 2**64 - 1)), 4),  # ... its highest id: none
        (command(6, (1, 2), (2, 4), (3, 5), (6, 8)), command(7, (1, 2), (2, 4), (4, 8)), 8),  # ... of a batch
        (
            command(6, (1, 2), (2, 4), (3, 5), (6, 8)),
            command(8, (1, 2), (2, 8), (3, 2), (4, b"why")),
            8,
        ),  # ... it failed
        (command(2, (1, b"me"), (4, 21)), command(3, (1, b"you"), (2, 21)), 0),  # CONNECT
        (command(18), command(19), 0),  # PING
    ],
)
def test_every_answer_of_pulsar_finds_its_request(asked, answered, number):
    conversation = PulsarConversation()
    other = conversation.request(command(62, (1, 1_000), (2, 0)))
    request = conversation.request(asked)
    assert request.correlation_id == number
    assert not request.answered.is_set()
    assert conversation.answer(answered) is request
    assert request.answered.is_set() and not other.answered.is_set()
    assert conversation.answer(answered) is not request


def test_a_receipt_belongs_to_the_message_of_its_producer_and_id():
    conversation = PulsarConversation()
    first, second = (conversation.request(command(6, (1, producer), (2, 0), (3, 1))) for producer in (1, 2))
    again = conversation.request(command(6, (1, 1), (2, 0), (3, 1)))
    receipts = [command(7, (1, producer), (2, 0), (3, b"id")) for producer in (1, 2, 1)]
    assert [conversation.answer(receipt) for receipt in receipts] == [first, second, again]


def test_a_frame_that_the_broker_sends_by_itself_is_an_answered_request():
    conversation = PulsarConversation()
    closing = conversation.request(command(15, (1, 1), (2, 3)))
    told = [
        conversation.answer(command(9, (1, 1), (2, b"id"))),
        conversation.answer(command(15, (1, 1), (2, 2**64 - 1))),
    ]
    assert [request.kind for request in told] == [9, 15]
    assert all(request.answered.is_set() for request in told)
    assert not closing.answered.is_set()


def test_the_answer_to_a_brokers_ping_is_not_taken_for_a_ping():
    conversation = PulsarConversation()
    conversation.answer(command(18))
    conversation.request(command(19))
    assert conversation.answer(command(19)).kind == 19


def test_requests_that_are_never_answered_are_forgotten(monkeypatch):
    monkeypatch.setattr(_protocols, "_MOST_PENDING", 10)
    conversation = PulsarConversation()
    for number in range(1000):
        conversation.request(command(56, (1, number)))
        conversation.request(command(6, (1, 1), (2, 1), (3, 1)))
    assert sum(map(len, conversation._pending.values())) <= 10 + 100


values = st.one_of(st.integers(0, 2**64 - 1), st.binary(max_size=200))
fields = st.lists(st.tuples(st.integers(1, 2**29 - 1), values))


@given(fields)
def test_a_message_comes_out_as_it_went_in(fields):
    assert list(_protocols.decode(encode(fields))) == fields


@given(fields, st.integers(0, 200))
def test_a_message_that_is_cut_gives_what_comes_before_the_cut(fields, end):
    found = list(_protocols.decode(encode(fields)[:end]))
    assert found == fields[: len(found)]


@given(st.binary(max_size=100))
def test_the_search_for_fields_takes_any_bytes_without_an_error(garbage):
    assert sum(len(value) for _, value in _protocols.decode(garbage) if isinstance(value, bytes)) <= len(garbage)


def test_numbers_of_all_sizes_are_passed_over():
    eight, four = b"\x09" + bytes(range(8)), b"\x15" + bytes(range(4))
    assert list(_protocols.decode(eight + four + encode([(3, -1)]))) == [
        (1, bytes(range(8))),
        (2, bytes(range(4))),
        (3, 2**64 - 1),
    ]
