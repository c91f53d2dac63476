"""Plain transactions: all or nothing, whatever happens on the way."""

import itertools
import time
from collections import Counter
from contextlib import contextmanager, nullcontext

import pytest
from txnbridge_embedded.client import files
from txnbridge_embedded.client.schema import MAX_OFFSET
from txnbridge_embedded.client.store import CommitUnclear
from txnbridge_embedded.settings import Timing
from txnbridge_embedded.write import writer as writer_module
from txnbridge_embedded.write.staged_messages import murmur2, partition_of

from tests.embedded import kit
from tests.embedded.kit import begin, busy, commit, execute, offsets, open_writer, read, rows, send, token_of, values
from tests.failing import fail_call
from txnbridge import errors
from txnbridge.spi import Deadline, TokenState


def status(broker, token):
    return broker.status(token, None, Deadline(5))


def test_a_message_comes_back_as_it_was_sent(broker):
    broker.admin.create_topic("orders", 2, Deadline(5))
    writer = open_writer(broker)
    begin(writer)
    headers = (("a", b"1"), ("b", bytes(range(256))), ("a", b""), ("h\udc80 \x00", "ü".encode()))
    writer.send("orders", b"\x00\xff", b"key\x00", headers, 1, 1234567)
    writer.send("orders", None, b"", None, 1, None)
    writer.send("orders", b"", None, (), 1, 0)
    before = time.time_ns() // 1_000_000
    writer.commit(Deadline(5))
    first, second, third = read(broker, "orders")
    assert (first.value, first.key, first.headers.raw) == (b"\x00\xff", b"key\x00", headers)
    assert (first.topic, first.partition, first.position, first.deliveries) == ("orders", 1, (0,), 1)
    assert first.timestamp == 1234567
    assert (second.value, second.key, second.headers.raw) == (None, b"", ())
    assert before <= second.timestamp <= time.time_ns() // 1_000_000
    assert (third.value, third.key, third.timestamp) == (b"", None, 0)


def test_columns_stay_in_step_when_messages_differ(broker):
    writer = open_writer(broker)
    begin(writer)
    writer.send_many("orders", [b"1", (b"2", b"key"), b"3", (b"4", None, {"h": b"x"}), None])
    writer.send("orders", b"6", None, None, 0, 77)
    writer.send_many("orders", [b"7", b"8"])
    writer.commit(Deadline(5))
    found = read(broker, "orders")
    assert [m.value for m in found] == [b"1", b"2", b"3", b"4", None, b"6", b"7", b"8"]
    assert [m.key for m in found] == [None, b"key", None, None, None, None, None, None]
    assert [m.headers.raw for m in found] == [(), (), (), (("h", b"x"),), (), (), (), ()]
    assert [m.timestamp == 77 for m in found] == [False] * 5 + [True, False, False]


@pytest.mark.parametrize(
    ("key", "hashed"),
    [  # from the tests of Kafka's Java client
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_a_key_hashes_as_in_kafkas_java_client(key, hashed):
    assert murmur2(key) == hashed % (1 << 32)
    assert partition_of(key, 7) == (hashed & 0x7FFF_FFFF) % 7


def test_messages_without_a_key_share_a_partition_for_a_transaction_and_then_take_the_next(broker):
    broker.admin.create_topic("orders", 3, Deadline(5))
    writer = open_writer(broker)
    for number in range(6):
        commit(writer, "orders", *[b"%d" % number] * 4)
    where = Counter((m.value, m.partition) for m in read(broker, "orders"))
    assert set(where.values()) == {4}
    assert Counter(partition for _, partition in where) == {0: 2, 1: 2, 2: 2}


def test_each_send_many_without_keys_takes_one_partition(broker):
    broker.admin.create_topic("orders", 2, Deadline(5))
    writer = open_writer(broker)
    begin(writer)
    writer.send_many("orders", [b"a"] * 3)
    writer.send_many("orders", [b"b"] * 3)
    writer.commit(Deadline(5))
    where = Counter((m.value, m.partition) for m in read(broker, "orders"))
    assert sorted(where.values()) == [3, 3]
    assert {partition for _, partition in where} == {0, 1}


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (("orders", b"x" * 1001, None, None, None, None), errors.InvalidOption),
        (("orders", b"x" * 500, b"k" * 501, None, None, None), errors.InvalidOption),
        (("orders", b"", None, [("h", b"x" * 1001)], None, None), errors.InvalidOption),
        (("orders", b"", None, None, 1, None), errors.NotFound),
        (("orders", b"", None, None, -1, None), errors.NotFound),
        (("orders", b"", None, None, None, -1), errors.InvalidOption),
        (("orders", b"", None, None, None, 1 << 63), errors.InvalidOption),
        (("nowhere", b"", None, None, None, None), errors.NotFound),
        (("nowhere\udc80", b"", None, None, None, None), errors.InvalidOption),
    ],
)
def test_a_message_that_cannot_be_sent_changes_no_transaction(opened, message, error):
    opened().admin.create_topic("orders", 1, Deadline(5))
    broker = opened(create_topics=0, max_message_bytes=1000)
    writer = open_writer(broker)
    begin(writer, "orders", b"before")
    with pytest.raises(error):
        writer.send(*message)
    send(writer, "orders", b"after")
    writer.commit(Deadline(5))
    assert values(broker, "orders") == [b"before", b"after"]


def test_messages_that_send_many_took_before_an_error_are_committed(opened):
    broker = opened(max_message_bytes=100)
    writer = open_writer(broker)
    begin(writer)
    with pytest.raises(errors.InvalidOption):
        writer.send_many("orders", [b"1", b"2", b"x" * 101, b"3"])
    with pytest.raises(ZeroDivisionError):
        writer.send_many("orders", (b"%d" % (8 // left) for left in (2, 1, 0)))
    writer.commit(Deadline(5))
    assert values(broker, "orders")[:2] == [b"1", b"2"]


def test_large_generated_messages_are_taken_few_at_a_time(opened):
    broker = opened(spill_bytes=1 << 20)
    writer = open_writer(broker)
    begin(writer)
    drawn = stored = worst = 0

    def generate():
        nonlocal drawn, stored, worst
        for _ in range(200):
            drawn += 1
            stored = rows(broker, "SELECT count(*) FROM messages")[0][0]
            worst = max(worst, drawn - stored)
            yield bytes(100_000)

    writer.send_many("orders", generate())
    assert drawn == 200
    assert worst <= 32  # 3.2 MB in memory, not 20
    writer.abort(Deadline(5))


def test_a_topic_that_grows_gets_messages_in_its_new_partitions(opened):
    broker = opened(timing=Timing(topic_age=0))
    commit(writer := open_writer(broker), "orders", b"1")
    broker.admin.grow_topic("orders", 2, Deadline(5))
    for _ in range(2):
        commit(writer, "orders", b"2")
    assert {m.partition for m in read(broker, "orders")} == {0, 1}


@pytest.fixture
def small(opened):
    """A broker that moves a transaction into the file after some ten messages."""
    return opened(spill_bytes=1000)


LARGE = [b"%03d" % number for number in range(200)]


def test_a_large_transaction_that_is_aborted_leaves_nothing_and_no_offset_is_used_again(small):
    writer = open_writer(small)
    begin(writer, "orders", *LARGE)
    writer.abort(Deadline(5))
    assert rows(small, "SELECT * FROM messages") == rows(small, "SELECT * FROM transactions") == []
    commit(writer, "orders", b"marker")
    assert values(small, "orders") == [b"marker"]
    assert offsets(small, "orders")[0] >= 100


def test_an_interleaved_abort_removes_its_own_messages_only(small):
    one, other = open_writer(small), open_writer(small)
    begin(one)
    begin(other)
    for number in range(100):
        send(one, "orders", b"one %d" % number)
        send(other, "orders", b"other %d" % number)
    one.abort(Deadline(5))
    other.commit(Deadline(5))
    assert values(small, "orders") == [b"other %d" % number for number in range(100)]


def test_an_abort_is_certain_also_while_the_file_cannot_be_written(opened, clock):
    broker, other = opened(), opened()
    writer = open_writer(broker)
    begin(writer, "orders", b"1", timeout=60)
    writer.flush(Deadline(5))
    with busy(other):
        writer.abort(Deadline(0.1))
    commit(writer, "orders", b"behind")
    clock.ahead = 3_600_000
    assert values(other, "orders") == [b"behind"]  # what was left of it was removed at its deadline


def test_a_partition_that_has_given_all_its_offsets_takes_nothing_more(broker):
    writer = open_writer(broker)
    commit(writer, "orders", b"0")
    execute(broker, "UPDATE partitions SET next = ?", MAX_OFFSET - 1)
    commit(writer, "orders", b"last")
    with pytest.raises(errors.DeliveryFailed, match="all its"):
        commit(writer, "orders", b"one too many")
    assert offsets(broker, "orders")[-1] == MAX_OFFSET - 1


def test_after_a_part_could_not_be_stored_the_rest_is_never_committed(broker):
    writer = open_writer(broker)
    begin(writer, "orders", b"1")
    failing(broker.store, happens=False)
    with pytest.raises(errors.DeliveryFailed):
        writer.flush(Deadline(5))
    send(writer, "orders", b"2")
    with pytest.raises(errors.DeliveryFailed):
        writer.commit(Deadline(5))
    commit(writer, "orders", b"marker")
    assert values(broker, "orders") == [b"marker"]


def test_a_reader_ends_a_transaction_that_is_past_its_deadline(opened, clock):
    first, second = opened(), opened()
    writer = open_writer(first)
    begin(writer, "orders", b"late", timeout=60)
    writer.flush(Deadline(5))
    commit(open_writer(second), "orders", b"behind")
    clock.ahead = 3_600_000
    assert values(second, "orders") == [b"behind"]  # a reader that is held back by it
    assert rows(second, "SELECT * FROM transactions") == []
    with pytest.raises(errors.TransactionTimedOut):
        writer.commit(Deadline(5))
    assert values(second, "orders") == [b"behind"]


def test_an_id_is_opened_by_its_first_preparing_writer_and_refused_to_one_of_an_older_owner(opened):
    first = opened()
    old = open_writer(first, "billing")
    kit.open_preparing(opened(), "billing", "elsewhere").close()
    with pytest.raises(errors.Fenced, match="elsewhere") as caught:
        commit(old, "orders", b"1")
    assert caught.value.newer == "elsewhere"
    with pytest.raises(errors.Fenced, match="elsewhere"):
        kit.open_preparing(first, "billing")


def test_calls_that_share_the_connection_end_at_their_deadline(broker):
    with broker.session(Deadline(5)), pytest.raises(errors.DeadlineExceeded, match="other calls"):
        broker.admin.topics(Deadline(0.05))
    assert broker.admin.topics(Deadline(5)) == []


def give_up(broker, how):
    """Take all writers for dead, as others do after a long silence."""
    execute(broker, how)


@pytest.mark.parametrize("how", ["UPDATE writers SET retired = 1", "DELETE FROM writers"])
def test_a_writer_that_was_taken_for_dead_fails_one_transaction_and_goes_on(broker, how):
    writer = open_writer(broker, "billing")
    begin(writer, "orders", b"1")
    give_up(broker, how)
    with pytest.raises(errors.TransactionAborted, match="was retired or deleted"):
        writer.commit(Deadline(5))
    commit(writer, "orders", b"marker")
    commit(writer, "orders", b"another")
    assert values(broker, "orders") == [b"marker", b"another"]


def test_a_writer_that_was_taken_for_dead_does_not_come_back_once_its_id_has_a_newer_owner(opened):
    broker = opened()
    writer = open_writer(broker, "billing")
    begin(writer)
    give_up(broker, "DELETE FROM writers")
    with pytest.raises(errors.TransactionAborted, match="was retired or deleted"):
        writer.commit(Deadline(5))
    open_writer(opened(), "billing", "elsewhere")
    with pytest.raises(errors.Fenced, match="elsewhere"):
        begin(writer)


def test_status_tells_that_an_open_transaction_was_committed(broker):
    writer = open_writer(broker)
    token = token_of(broker, writer, begin(writer, "orders", b"1"))
    found = status(broker, token)
    assert (found.state, found.permanent) == (TokenState.UNKNOWN, False)
    assert "open" in found.reason
    writer.commit(Deadline(5))
    assert status(broker, token).state is TokenState.COMMITTED


def test_status_of_an_aborted_transaction_stays_aborted_when_the_writer_goes_on(broker):
    writer = open_writer(broker)
    token = token_of(broker, writer, begin(writer))
    writer.abort(Deadline(5))
    for _ in range(3):
        commit(writer, "orders", b"1")
    assert status(broker, token).state is TokenState.ABORTED


@pytest.mark.parametrize(("ahead", "error"), [(0, errors.TransactionAborted), (3_600_000, errors.TransactionTimedOut)])
def test_status_that_says_aborted_by_the_clock_holds_when_the_clock_is_set_right(opened, clock, ahead, error):
    broker = opened()
    writer = open_writer(broker)
    token = token_of(broker, writer, begin(writer, "orders", b"1", timeout=60))
    clock.ahead = 3_600_000
    assert status(opened(), token).state is TokenState.ABORTED
    clock.ahead = ahead
    with pytest.raises(error):
        writer.commit(Deadline(5))
    assert status(broker, token).state is TokenState.ABORTED
    commit(writer, "orders", b"marker")
    assert values(broker, "orders") == [b"marker"]


def test_status_says_nothing_final_while_the_file_is_being_written(opened, clock):
    broker, other = opened(), opened()
    writer = open_writer(broker)
    token = token_of(broker, writer, begin(writer, timeout=60))
    clock.ahead = 3_600_000
    with busy(other):
        assert broker.status(token, None, Deadline(0.05)).state is TokenState.UNKNOWN
    assert status(broker, token).state is TokenState.ABORTED


def test_status_of_a_transaction_whose_id_was_opened_anew_is_aborted(opened):
    broker = opened()
    writer = open_writer(broker, "billing")
    token = token_of(broker, writer, begin(writer, timeout=60))
    open_writer(opened(), "billing")
    assert status(broker, token).state is TokenState.ABORTED


def test_a_writer_that_closes_aborts_what_it_stored_and_without_a_token_deletes_its_record(opened):
    broker = opened()
    writer = open_writer(broker)
    commit(writer, "orders", b"1")
    begin(writer, "orders", b"2")
    writer.flush(Deadline(5))
    writer.close()
    assert (values(broker, "orders"), rows(broker, "SELECT * FROM undecided")) == ([b"1"], [])
    broker.close(Deadline(5))
    assert rows(opened(), "SELECT * FROM writers") == []


def failing(store, *, happens: bool, error: BaseException | None = None, number: int = 0, then=lambda: None):
    """Let the commit of a store with this number, from now on, fail, as if SQLite failed while it commits."""
    real, numbers = store._commit, itertools.count()

    def commit(connection, what):
        if next(numbers) < number:
            return real(connection, what)
        store._commit = real
        if happens:
            real(connection, what)
        then()
        raise error or CommitUnclear("the disk refuses")

    store._commit = commit


def test_a_topic_whose_creation_failed_gives_no_message_to_the_next_topic(opened):
    """The ids of a topic that was not stored are given to the next one, perhaps within a second."""
    broker, other = opened(), opened()
    writer = open_writer(broker)
    failing(broker.store, happens=False, error=errors.StorageFailed("the disk is full"))
    with pytest.raises(errors.StorageFailed):
        begin(writer, "orders", b"1")
    writer.abort(Deadline(5))
    commit(open_writer(other), "letters", b"2")
    commit(writer, "orders", b"1")
    assert (values(other, "orders"), values(other, "letters")) == ([b"1"], [b"2"])


@contextmanager
def failing_and_gone(store, happens):
    """Let the next commit of a store fail, behind which its file is away until the block ends."""
    with pytest.MonkeyPatch.context() as patch:
        failing(store, happens=happens, then=lambda: patch.setattr(files, "in_place", lambda *_: False))
        yield


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("happens", [True, False])
def test_a_commit_that_failed_counts_as_committed_if_it_happened_and_as_aborted_if_not(small, large, happens):
    sent = LARGE if large else [b"1"]
    writer = open_writer(small)
    transaction = begin(writer, "orders", *sent)
    failing(small.store, happens=happens)
    with nullcontext() if happens else pytest.raises(errors.DeliveryFailed, match="the disk refuses"):
        writer.commit(Deadline(5))
    state = status(small, token_of(small, writer, transaction)).state
    assert state is (TokenState.COMMITTED if happens else TokenState.ABORTED)
    stored = sent if happens else []
    assert values(small, "orders") == stored
    commit(writer, "orders", b"marker")
    assert values(small, "orders") == [*stored, b"marker"]


@pytest.mark.parametrize("happens", [True, False])
def test_an_outcome_is_unknown_until_the_file_can_tell_it(broker, happens):
    writer = open_writer(broker)
    transaction = begin(writer, "orders", b"1")
    with failing_and_gone(broker.store, happens), pytest.raises(errors.OutcomeUnknown):
        writer.commit(Deadline(5))
    token = token_of(broker, writer, transaction)
    assert status(broker, token).state is (TokenState.COMMITTED if happens else TokenState.UNKNOWN)
    writer.reopen(Deadline(5))
    assert status(broker, token).state is (TokenState.COMMITTED if happens else TokenState.ABORTED)
    commit(writer, "orders", b"marker")
    assert values(broker, "orders") == ([b"1", b"marker"] if happens else [b"marker"])


@pytest.mark.parametrize(("step", "happens"), [("store", True), ("_commit", False), ("_commit", True)])
def test_an_interrupted_commit_leaves_the_file_unlocked_and_the_outcome_to_be_asked(broker, monkeypatch, step, happens):
    writer = open_writer(broker)
    transaction = begin(writer, "orders", b"1")
    with monkeypatch.context() as patch:
        fail_call(patch, writer_module if step == "store" else broker.store, step, KeyboardInterrupt, happens=happens)
        with pytest.raises(KeyboardInterrupt):
            writer.commit(Deadline(5))
    token = token_of(broker, writer, transaction)
    commit(open_writer(broker), "orders", b"somebody else")
    stored = step == "_commit" and happens
    for undone in (TokenState.UNKNOWN, TokenState.ABORTED):
        assert status(broker, token).state is (TokenState.COMMITTED if stored else undone)
        writer.reopen(Deadline(5))
    commit(writer, "orders", b"marker")
    assert values(broker, "orders") == [*[b"1"] * stored, b"somebody else", b"marker"]


def test_a_topic_that_another_process_deletes_meanwhile_aborts_the_whole_transaction(opened):
    broker, other = opened(), opened()
    writer = open_writer(broker)
    commit(writer, "orders", b"0")
    begin(writer, "audit", b"1")
    send(writer, "orders", b"1")
    other.admin.delete_topic("orders", Deadline(5))
    with pytest.raises(errors.DeliveryFailed, match="deleted"):
        writer.commit(Deadline(5))
    assert values(broker, "audit") == []
    begin(writer)
    send(writer, "orders", b"2")  # the new topic of this name, at once
    writer.commit(Deadline(5))
    assert values(broker, "orders") == [b"2"]
