"""Where frames begin: what comes out is what went in, and nothing makes the parser wait, fail or grow."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from txnbridge_conformance.faults._frames import KafkaConversation, Piece, Splitter

HEAD = 8
GIANT = 2**31 - 1


def frame(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


def pieces(chunks: list[bytes]) -> list[Piece]:
    splitter = Splitter(HEAD)
    return [piece for chunk in chunks for piece in splitter.feed(chunk)] + list(splitter.flush())


def cut_up(data: bytes, sizes: list[int]) -> list[bytes]:
    chunks = []
    for size in sizes:
        chunks.append(data[:size])
        data = data[size:]
    return [*chunks, data]


sizes = st.lists(st.integers(1, 20))


@given(st.lists(st.binary(min_size=HEAD, max_size=50)), sizes)
def test_every_frame_begins_a_piece_however_the_stream_is_cut(bodies, sizes):
    stream = b"".join(map(frame, bodies))
    found = pieces(cut_up(stream, sizes))
    assert [piece.head for piece in found if piece.head is not None] == [body[:HEAD] for body in bodies]
    assert b"".join(piece.data for piece in found) == stream
    # The bytes of one frame: its first piece, and those without a head that follow.
    whole: list[bytes] = []
    for piece in found:
        if piece.head is None:
            whole[-1] += piece.data
        else:
            whole.append(piece.data)
    assert whole == list(map(frame, bodies))


@given(st.binary(max_size=200), sizes)
def test_garbage_comes_out_as_it_went_in(garbage, sizes):
    assert b"".join(piece.data for piece in pieces(cut_up(garbage, sizes))) == garbage


@given(st.binary(min_size=HEAD, max_size=50), st.integers(0, 60))
def test_a_stream_that_ends_anywhere_comes_out_whole(body, end):
    stream = frame(body)[:end]
    assert b"".join(piece.data for piece in pieces([stream])) == stream


@pytest.mark.parametrize("length", [-(2**31), -1, 0, HEAD - 1])
def test_after_a_length_that_no_frame_has_all_passes_as_it_comes(length):
    lost = struct.pack(">i", length)
    stream = frame(b"12345678") + lost + frame(b"87654321")
    found = pieces([stream])
    assert [piece.head for piece in found] == [b"12345678", None, None]
    splitter = Splitter(HEAD)
    list(splitter.feed(lost))
    assert list(splitter.feed(b"x")) == [Piece(b"x")]


def test_a_giant_length_costs_no_memory_and_no_byte_waits():
    splitter = Splitter(HEAD)
    chunk = bytes(1 << 16)
    tracemalloc.start()
    try:
        (first,) = splitter.feed(struct.pack(">i", GIANT) + b"12345678")
        assert first.head == b"12345678"
        for _ in range(1000):
            assert [piece.data for piece in splitter.feed(chunk)] == [chunk]
        assert tracemalloc.get_traced_memory()[1] < 10 * len(chunk)
    finally:
        tracemalloc.stop()


def request(kind: int, correlation_id: int) -> bytes:
    return struct.pack(">hhi", kind, 1, correlation_id)


def answer(correlation_id: int) -> bytes:
    return struct.pack(">i", correlation_id)


def test_an_answer_belongs_to_the_request_of_its_number():
    conversation = KafkaConversation()
    first, second = conversation.request(request(26, 1)), conversation.request(request(0, 2))
    assert (first.kind, first.version, first.correlation_id) == (26, 1, 1)
    assert conversation.answer(answer(1)) is first
    assert first.answered.is_set() and not second.answered.is_set()
    assert conversation.answer(answer(2)) is second


def test_a_request_that_wanted_no_answer_is_passed_over():
    conversation = KafkaConversation()
    unanswered, last = conversation.request(request(0, 1)), conversation.request(request(26, 2))
    assert conversation.answer(answer(2)) is last
    assert not unanswered.answered.is_set()


def test_an_answer_to_nothing_is_nobodys_and_disturbs_none():
    conversation = KafkaConversation()
    asked = conversation.request(request(26, 1))
    assert conversation.answer(answer(7)) is None
    assert conversation.answer(answer(1)) is asked


@given(st.lists(st.tuples(st.booleans(), st.binary(min_size=8, max_size=8))))
def test_no_heads_in_any_order_are_an_error(heads):
    conversation = KafkaConversation()
    for is_request, head in heads:
        if is_request:
            conversation.request(head)
        else:
            conversation.answer(head[:4])
