"""Acknowledging in transactions: what holds, what conflicts, what comes again, and what a naive reader gets wrong."""

import json
import time
import urllib.request
from contextlib import ExitStack, nullcontext, suppress

import pytest
from txnbridge_conformance.observing import send, take
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.client import PulsarClient
from txnbridge_pulsar.client.deadline import ClientDeadline
from txnbridge_pulsar.client.format.ids import individual_ack_fields
from txnbridge_pulsar.outcome.outcome import end
from txnbridge_pulsar.settings import Timing

from tests.core.reading_kit import by_partition, values
from tests.pulsar import client_kit
from tests.pulsar.client_kit import acknowledge, admin, batch_of, begin, path_of, payloads, receive, service
from tests.pulsar.kit import SOON
from tests.pulsar.reading_kit import Member, write, write_chunks
from tests.pulsar.writing_kit import concrete, connect_to, new_topic
from txnbridge.errors import Conflict, OutcomeUnknown, TransactionAborted
from txnbridge.spi import Deadline, Message

ALL_SHARINGS = pytest.mark.parametrize("sharing", ["partition", "message", "key"])
BOTH_SHARED = pytest.mark.parametrize("sharing", ["message", "key"])
BOTH_ENDS = pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])


def has_left(client, member, topic, *contents):
    """Check that a group still gets these contents, and no others, before a marker message."""
    write(client, topic, b"marker")
    assert sorted(values(member.take(len(contents) + 1))) == sorted([*contents, b"marker"])


def begun(client, topic, member, *contents, count=1, **given):
    """Return a reader of these messages, the first of them, and a transaction that may acknowledge them."""
    write(client, topic, *contents)
    reader = member(topic, **given)
    return reader, reader.take(count), reader.begin((topic, 0))


def go_back(member, messages):
    """Go back to these messages, as the core does behind an abort."""
    if member.sharing == "partition":
        member.seek({partition: min(positions) for partition, positions in by_partition(messages).items()})
    else:
        member.nack(by_partition(messages))


@ALL_SHARINGS
def test_a_message_that_a_committed_transaction_acknowledged_never_comes_again(client, topic, member, sharing):
    write(client, topic, b"0", batch_of(b"1", b"2", b"3"), b"4")
    reader = member(topic, sharing=sharing)
    found = {m.value: m for m in reader.take(5)}
    reader.pass_on([found[b"4"], found[b"2"]])
    reader.pass_on([found[b"3"]])
    reader.leave()
    has_left(client, member(topic, sharing=sharing), topic, b"0", b"1")


@ALL_SHARINGS
def test_a_message_that_an_aborted_transaction_acknowledged_comes_again(client, topic, member, sharing):
    write(client, topic, b"0", batch_of(b"1", b"2", b"3"), b"4")
    reader = member(topic, sharing=sharing)
    found = {m.value: m for m in reader.take(5)}
    reader.pass_on([found[b"1"]])
    held = [found[b"0"], found[b"2"]]
    txn = reader.begin((topic, 0))
    reader.ack(txn, held)
    reader.end(txn, commit=False)
    go_back(reader, held)
    if sharing == "partition":  # everything from there on, in order
        assert values(reader.take(4)) == [b"0", b"2", b"3", b"4"]
        has_left(client, reader, topic)
    else:  # and the rest of an entry with its part
        has_left(client, reader, topic, b"0", b"2", b"3")


@pytest.mark.full
def test_without_single_acknowledgements_a_broker_that_is_killed_keeps_those_of_transactions(start_pulsar):
    """The log of what transactions acknowledge keeps them, until all of their entry is acknowledged."""
    broker = start_pulsar(settings={"acknowledgmentAtBatchIndexLevelEnabled": "false"})
    topics = {sharing: client_kit.fresh_topic() for sharing in ("partition", "message", "key")}
    open_ones = []
    with ExitStack() as left:
        client = left.enter_context(PulsarClient(service(broker)))
        for sharing, topic in topics.items():
            write(client, topic, batch_of(b"0", b"1", b"2", b"3", b"4"))
            reader = Member(broker.url, topic, sharing=sharing)
            left.callback(reader.leave)
            found = {m.value: m for m in reader.take(5)}
            reader.pass_on([found[b"1"]])
            reader.pass_on([found[b"2"]])
            open_ones.append(reader.begin((topic, 0)))
            reader.ack(open_ones[-1], [found[b"3"]])
    for round in range(2):
        broker.restart()
        with PulsarClient(service(broker)) as client:
            for txn in open_ones if round == 0 else ():
                client.transactions.end(txn, True, SOON)
            for sharing, topic in topics.items():
                write(client, topic, b"marker")
                reader = Member(broker.url, topic, sharing=sharing)
                assert sorted(values(reader.take(3 + round))) == [b"0", b"4", *[b"marker"] * (1 + round)]
                reader.leave()


def test_acknowledgements_over_many_partitions_are_one_atom(pulsar_broker, client, topic, member):
    admin(pulsar_broker, "PUT", f"{path_of(topic)}/partitions", 3)
    for number in range(9):
        write(client, wire.partition_name(topic, number % 3), b"%d" % number)
    reader = member(topic)
    found = reader.take(9)
    txn = reader.begin(*by_partition(found))
    reader.ack(txn, found)
    reader.end(txn, commit=False)
    go_back(reader, found)
    again = reader.take(9)
    assert sorted(values(again)) == sorted(values(found))
    reader.pass_on(again)
    reader.leave()
    other = member(topic)
    for number in range(3):
        write(client, wire.partition_name(topic, number), b"marker")
    assert set(values(other.take(3))) == {b"marker"}


@pytest.mark.parametrize("sharing", ["partition", "message"])
def test_a_reader_whose_transaction_others_abort_goes_on_with_the_messages_it_holds(client, topic, member, sharing):
    """This happens to prepared transactions: no process tells the reader."""
    reader, first, txn = begun(client, topic, member, *map(b"%d".__mod__, range(6)), count=2, sharing=sharing)
    reader.ack(txn, first)
    in_hand = reader.take(2)
    reader.end(txn, commit=False)
    assert sorted(values(reader.take(4))) == [b"0", b"1", b"4", b"5"]
    reader.pass_on(in_hand)
    has_left(client, reader, topic)


@BOTH_ENDS
@pytest.mark.parametrize("first", ["older", "newer"])
def test_only_one_of_two_members_acknowledges_the_rest_of_an_entry(pulsar_broker, client, topic, member, first, commit):
    """A partition moves, and the older member, which has not heard of it, acknowledges the same part as the newer."""
    admin(pulsar_broker, "PUT", f"{path_of(topic)}/partitions", 2)
    for number in range(2):
        write(client, wire.partition_name(topic, number), batch_of(b"1", b"2"))
    older = member(topic)
    found = older.take(4)
    older.pass_on([m for m in found if m.value == b"1"])
    newer = member(topic)
    (again,) = newer.take(1)
    (held,) = [m for m in found if m.value == b"2" and m.partition == again.partition]
    begun = [(each, each.begin((topic, again.partition)), its) for each, its in ((older, held), (newer, again))]
    (winner, kept, its), (loser, given_up, same) = begun if first == "older" else reversed(begun)
    winner.ack(kept, [its])
    with pytest.raises(Conflict):
        loser.ack(given_up, [same])
    loser.end(given_up, commit=False)
    winner.end(kept, commit)
    go_back(newer, [again])
    has_left(client, newer, wire.partition_name(topic, again.partition), *([] if commit else [b"2"]))


@BOTH_ENDS
def test_only_one_of_two_members_that_hold_a_shared_entry_acknowledges_its_last_part(client, topic, member, commit):
    """The entry then leaves the group, although neither member knows what the other one has committed."""
    write(client, topic, batch_of(b"1", b"2", b"3"))
    older, newer = (member(topic, sharing="message") for _ in range(2))
    first, *held = older.take(3)
    txn = older.begin((topic, 0))
    older.ack(txn, [first])
    older.end(txn, commit=False)  # the broker delivers all of the entry again, and the older member is not told
    again = newer.take(3)
    older.pass_on(held[:1])
    kept = newer.begin((topic, 0))
    newer.ack(kept, again[:1])
    txn = older.begin((topic, 0))
    sent = older.ack(txn, held[1:])
    with pytest.raises(Conflict):
        newer.ack(kept, again[2:])
    newer.end(kept, commit=False)
    older.end(txn, commit)
    if commit:
        sent.acknowledge_committed_entries()
    newer.nack(by_partition(again))
    rest = newer.take(1 if commit else 2)
    assert sorted(values(rest)) == [b"1", b"3"][: len(rest)]
    newer.pass_on(rest).acknowledge_committed_entries()
    assert not newer.until(lambda: newer.partition(topic).consumer.progress(SOON)[1][:2] >= first.position[:2])


def is_held_back(broker, topic):
    """Return whether the broker holds keys back from their new members."""
    [group] = admin(broker, "GET", f"{path_of(topic)}/stats")["subscriptions"].values()
    return any(consumer["drainingHashesCount"] for consumer in group["consumers"])


@pytest.mark.parametrize("holder", ["a member that has left", "the member with the rest"])
def test_an_aborted_part_of_an_entry_comes_again_although_its_key_has_moved(
    pulsar_broker, client, topic, member, holder
):
    """A broker sends nothing of a key to its new member as long as another one has an entry of it, in its view."""
    write(client, topic, batch_of(b"1", b"2", b"3"))
    first = older = member(topic, sharing="key")
    aborted, *rest = older.take(3)
    txn = older.begin((topic, 0))
    sent = older.ack(txn, [aborted])
    if holder == "a member that has left":
        older.leave()
        first = member(topic, sharing="key")
        rest = first.take(2)
    first.pass_on(rest).acknowledge_committed_entries()
    members = [first]
    while not is_held_back(pulsar_broker, topic):
        members.append(member(topic, sharing="key"))
    sent.drop_rest_of_entries()
    client.transactions.end(txn, False, SOON)
    if first is older:
        first.nack(by_partition([aborted]))
    write(client, topic, b"later")
    left, deadline = {b"1", b"later"}, Deadline(SOON)
    while left:
        left -= {value for each in members for value in values(each.poll())}
        deadline.check(f"{left}")


def test_a_member_that_waits_holds_no_key_back_although_the_broker_takes_an_entry_for_its_own(
    pulsar_broker, client, topic, member
):
    """The member has not learnt that its transactions with parts of the entry were committed."""
    batch = wire.MessageBatch()
    for content in (b"1", b"2"):
        batch.append(content, "key")
    write(client, topic, batch)
    timing = Timing(idle_check_seconds=0.5)
    members = [member(topic, sharing="key", timing=timing)]
    for message in members[0].take(2):
        members[0].pass_on([message])
    while not is_held_back(pulsar_broker, topic):
        members.append(member(topic, sharing="key", timing=timing))
    write(client, topic, wire.Single(b"later", "key"))
    found: list[bytes] = []
    deadline = Deadline(SOON)
    while not found:
        found = [value for each in members for value in values(each.poll())]
        deadline.check("the next message of the key")
    assert found == [b"later"]


@pytest.mark.parametrize("others", [0, 1])
def test_entries_of_an_aborted_transaction_come_again_to_one_member(client, topic, member, others):
    """The broker delivers them again at once, so a request for them would give them to one more member. With a message
    among them that another transaction holds, the broker refuses them all at first.
    """
    contents = [b"%d" % number for number in range(100)]
    write(client, topic, *contents)
    older = member(topic, sharing="message")
    found: list[Message] = []
    while len(found) < len(contents):
        found += older.poll()
    other, txn, consumer = older.begin((topic, 0)), older.begin((topic, 0)), older.partition(topic).consumer
    for message in found[:others]:
        ledger, entry, _ = message.position
        consumer.start_acknowledge([wire.MessageId(ledger, entry)], other, timeout=SOON)[0].result(SOON)
    sent = older.reader.ack_context().acknowledge(txn, by_partition(found), Deadline(SOON))
    with pytest.raises(Conflict) if others else nullcontext():
        sent.settle(Deadline(SOON))
    sent.drop_rest_of_entries()
    older.end(txn, commit=False)
    deadline = Deadline(SOON)
    while consumer.arrived < 2 * len(contents) - others:
        deadline.check("they come again")
    newer = member(topic, sharing="message")
    newer.has(1)
    newer.poll()  # so that the broker may deliver to it
    older.nack(by_partition(found))
    older.pass_on(older.take(len(contents) - others))
    older.leave()
    has_left(client, newer, topic)


def test_an_entry_whose_extra_index_was_not_acknowledged_leaves_when_it_comes_again(monkeypatch, client, topic, member):
    def acknowledged(reader):
        return reader.partition(topic).consumer.progress(SOON)[1][:2]

    write(client, topic, batch_of(b"1", b"2"))
    reader = member(topic)
    with monkeypatch.context() as lost:
        lost.setattr(wire.PulsarConsumer, "_acknowledge_extra_index", lambda *_: None)
        found = reader.take(2)
        for each in found:
            reader.pass_on([each])
    assert acknowledged(reader) < found[0].position[:2]
    reader.leave()
    reader = member(topic)
    has_left(client, reader, topic)
    assert not reader.until(lambda: acknowledged(reader) == found[0].position[:2])


@pytest.mark.full
def test_without_indexes_in_the_cursor_entries_that_are_acknowledged_one_by_one_leave_the_backlog(start_pulsar):
    broker = start_pulsar(settings={"acknowledgmentAtBatchIndexLevelEnabled": "false"})
    with connect_to(broker.url, broker.admin_url) as bridge:
        name = new_topic(bridge)
        topic = concrete(name)

        def backlog():
            return admin(broker, "GET", f"{path_of(topic)}/stats")["subscriptions"]["group"]["msgBacklog"]

        def pass_on(*counts, commit=True):
            for count in counts:
                with suppress(KeyError), bridge.transaction() as txn:
                    for message in take(consumer, count):
                        txn.ack(message)
                    if not commit:
                        raise KeyError

        with PulsarClient(service(broker)) as client, bridge.consumer(name, "group") as consumer:
            write(client, topic, batch_of(b"1", b"2", b"3", b"4", b"5", b"6"))
            pass_on(6, commit=False)
            pass_on(2, 3)
            assert backlog()
            for left in (1, 6):  # in the last of several transactions, and in a single one
                pass_on(left)
                until = time.monotonic() + SOON
                while backlog():
                    assert time.monotonic() < until
                    time.sleep(0.2)
                write(client, topic, batch_of(b"1", b"2", b"3", b"4", b"5", b"6"))


@BOTH_ENDS
def test_the_next_member_waits_for_what_is_held_before_it_in_order(pulsar_broker, client, topic, member, commit):
    reader, held, txn = begun(client, topic, member, batch_of(b"1", b"2"), b"3", admin_url=pulsar_broker.admin_url)
    reader.ack(txn, held)
    reader.leave()
    other = member(topic, admin_url=pulsar_broker.admin_url)
    cursor = other.partition(topic)
    assert other.until(lambda: cursor.waits_until is not None and cursor.waiting) == []
    other.end(txn, commit)
    assert values(other.take(2 if commit else 3)) == [b"1", b"2", b"3"][commit:]
    has_left(client, other, topic)


def test_a_member_waits_no_longer_for_a_prepared_transaction_than_for_others(pulsar_broker, client, topic, member):
    reader, held, txn = begun(client, topic, member, b"1", b"2", admin_url=pulsar_broker.admin_url)
    reader.ack(txn, held)
    reader.leave()
    # It waits for its timeout and this delay: half a second.
    other = member(topic, admin_url=pulsar_broker.admin_url, timing=Timing(timeout_delay_seconds=0.5 - SOON))
    assert values(other.take(1)) == [b"2"]
    other.end(txn, False)
    assert values(other.take(1)) == [b"1"]


@pytest.mark.full
@BOTH_SHARED
def test_a_member_gets_messages_however_often_it_has_aborted_parts_of_entries(start_pulsar, monkeypatch, sharing):
    """The broker counts what it delivers again as unacknowledged once more, and stops at a number (hazard H161)."""
    broker = start_pulsar(settings={"maxUnackedMessagesPerConsumer": "20"})
    monkeypatch.setattr("txnbridge_pulsar.read.reader.MAX_OVERCOUNT", 4)
    with connect_to(broker.url, broker.admin_url) as bridge:
        topic = new_topic(bridge)
        contents = [b"%d" % number for number in range(10)]
        with bridge.consumer(topic, "group", sharing=sharing) as consumer:
            send(bridge, topic, *contents)
            for _ in range(8):
                with suppress(KeyError), bridge.transaction() as txn:
                    txn.ack(take(consumer, 5))
                    raise KeyError
            with bridge.transaction() as txn:
                txn.ack(take(consumer, 10))
            send(bridge, topic, *contents)
            assert sorted(values(take(consumer, 10))) == contents


def test_a_message_in_chunks_is_acknowledged_with_all_of_them(client, topic, member):
    write_chunks(client, topic, [b"a" * 10, b"b" * 10, b"c"])
    write(client, topic, b"alone")
    reader = member(topic)
    found = reader.take(2)
    assert values(found) == [b"a" * 10 + b"b" * 10 + b"c", b"alone"]
    reader.pass_on(found)
    reader.leave()
    has_left(client, member(topic), topic)


@pytest.mark.parametrize("by_abort", [True, False], ids=["by an abort", "by a nack"])
def test_a_member_that_gives_back_a_part_of_an_entry_gives_up_the_rest(open_bridge, by_abort):
    """The broker delivers the entry whole to another member, and may let both commit the same messages."""
    a, b = open_bridge(), open_bridge()
    topic = new_topic(a)
    send(a, topic, *[b"%d" % number for number in range(10)])
    first = a.consumer(topic, "group", sharing="message")
    ours = take(first, 10)
    second = b.consumer(topic, "group", sharing="message")
    if by_abort:
        with a.transaction() as txn:
            txn.ack(ours[0])
            txn.abort()
    else:
        first.nack(ours[0])
    theirs = take(second, 10)
    with pytest.raises(Conflict), a.transaction() as txn:
        txn.ack(ours[5:])
    for part in (theirs[:5], theirs[5:]):
        with b.transaction() as txn:
            txn.ack(part)
    send(a, topic, b"marker")
    second.close()
    assert values(take(first, 1)) == [b"marker"]


def lose_answers(patched, commit):
    """Let transactions end so, whatever is asked for, and their writers get no answer."""

    def answers_nothing(cluster, number, *asked):
        end(cluster, number, commit, (), Deadline(SOON))
        raise OutcomeUnknown("the answer was lost")

    patched.setattr("txnbridge_pulsar.write.writer.end", answers_nothing)


@pytest.mark.parametrize("commit", [False, True])
def test_while_an_outcome_is_unknown_the_rest_of_an_entry_is_given_up(open_bridge, monkeypatch, commit):
    """Another process may abort the transaction, and then the broker delivers the entry whole to another member."""
    a, b = open_bridge(), open_bridge()
    topic = new_topic(a)
    send(a, topic, *[b"%d" % number for number in range(10)])
    first = a.consumer(topic, "group", sharing="message")
    ours = take(first, 10)
    second = b.consumer(topic, "group", sharing="message")

    refused = nullcontext() if commit else pytest.raises(TransactionAborted, match="answer was lost")
    with monkeypatch.context() as patched, refused, a.transaction() as txn:
        txn.ack(ours[:3])
        lose_answers(patched, commit)
    theirs = [] if commit else take(second, 10)
    with pytest.raises(Conflict), a.transaction() as txn:
        txn.ack(ours[3:])
    if commit:
        second.close()
        assert sorted(values(take(first, 7))) == sorted(values(ours[3:]))
    else:
        with b.transaction() as txn:
            txn.ack(theirs)


@BOTH_SHARED
def test_an_entry_leaves_the_group_although_the_commit_of_its_last_part_was_not_answered(
    open_bridge, pulsar_broker, monkeypatch, sharing
):
    """Else it stays in the backlog, and a key-shared group gets nothing of its key once that moves (hazard H160)."""
    bridge = open_bridge()
    topic = new_topic(bridge)
    send(bridge, topic, *[b"%d" % number for number in range(10)])
    with bridge.consumer(topic, "group", sharing=sharing) as consumer:
        found = take(consumer, 10)
        with bridge.transaction() as txn:
            txn.ack(found[:4])
        with monkeypatch.context() as patched, bridge.transaction() as txn:
            txn.ack(found[4:])
            lose_answers(patched, True)
        finish(pulsar_broker, topic, consumer)


def finish(broker, topic, consumer):
    """Poll, and get nothing, until the group has nothing left in its backlog."""
    until = time.monotonic() + 2 * SOON
    while admin(broker, "GET", f"{path_of(concrete(topic))}/stats")["subscriptions"]["group"]["msgBacklog"]:
        assert not consumer.poll(1, 0.2) and time.monotonic() < until


@BOTH_ENDS
def test_a_prepared_transaction_of_a_shared_group_acknowledges_a_part_of_an_entry(open_bridge, pulsar_broker, commit):
    bridge = open_bridge()
    topic = new_topic(bridge)
    send(bridge, topic, *[b"%d" % number for number in range(10)])
    with bridge.consumer(topic, "group", sharing="message") as consumer:
        found = take(consumer, 10)
        with bridge.transaction(prepare=True) as prepared:
            prepared.ack(found[:4])
        with bridge.transaction() as txn:
            txn.ack(found[4:])
        (bridge.commit if commit else bridge.abort)(str(prepared.token))
        again = [] if commit else take(consumer, 4)
        if again:
            with bridge.transaction() as txn:
                txn.ack(again)
        assert sorted(values(again)) == ([] if commit else values(found[:4]))
        finish(pulsar_broker, topic, consumer)


@BOTH_SHARED
def test_a_part_of_an_entry_that_was_given_up_comes_again_to_the_same_member(client, topic, member, sharing):
    write(client, topic, batch_of(*(b"%d" % number for number in range(6))))
    reader = member(topic, sharing=sharing)
    first = reader.take(4)  # and two that wait
    reader.nack(by_partition(first[1:2]))
    again = reader.take(6)
    assert values(again) == [b"%d" % number for number in range(6)]
    txn = reader.begin((topic, 0))
    sent = reader.ack(txn, again[2:4])
    sent.drop_rest_of_entries()
    reader.end(txn, commit=False)
    reader.nack(by_partition(again[2:4]))
    last = reader.take(6)
    assert values(last) == values(again)
    reader.pass_on(last[:2])
    has_left(client, reader, topic)


@BOTH_SHARED
def test_a_message_in_chunks_that_is_given_back_comes_again(client, topic, member, sharing):
    write_chunks(client, topic, [b"a" * 10, b"b" * 10, b"c"])
    reader = member(topic, sharing=sharing)
    found = reader.take(1)
    reader.nack(by_partition(found))
    assert values(reader.take(1)) == values(found)


def test_a_message_that_another_transaction_holds_is_a_conflict(client, topic, member):
    write(client, topic, b"1", b"2")
    reader = member(topic)
    found = reader.take(2)
    thief = begin(client, group=(topic, "group"))
    consumer = reader.partition(topic).consumer
    acknowledge(consumer, [wire.MessageId(*found[0].position[:2])], thief)
    txn = reader.begin((topic, 0))
    sent = reader.ack_context().acknowledge(txn, by_partition(found), Deadline(SOON))
    with pytest.raises(Conflict, match="another transaction"):
        sent.settle(Deadline(SOON))
    reader.end(txn, commit=False)
    client.transactions.end(thief, False, SOON)
    go_back(reader, found)
    assert values(reader.take(2)) == [b"1", b"2"]


@BOTH_SHARED
def test_messages_refused_together_with_a_conflict_come_again(client, topic, member, sharing):
    """The broker takes none of a command's positions, so no abort brings them back by itself."""
    write(client, topic, b"1", b"2")
    reader = member(topic, sharing=sharing)
    found = {m.value: m for m in reader.take(2)}
    stolen = wire.MessageId(*found[b"1"].position[:2])
    acknowledge(reader.partition(topic).consumer, [stolen])
    txn = reader.begin((topic, 0))
    with pytest.raises(Conflict):
        reader.ack(txn, list(found.values()))
    reader.end(txn, commit=False)
    go_back(reader, list(found.values()))
    has_left(client, reader, topic, b"2")


def test_messages_that_were_given_back_cannot_be_acknowledged(client, topic, member):
    reader, found, txn = begun(client, topic, member, b"1", sharing="message")
    reader.nack(by_partition(found))
    with pytest.raises(Conflict, match="no longer with this reader"):
        reader.ack(txn, found)
    reader.end(txn, commit=False)


def test_a_delivery_cannot_be_acknowledged_after_its_partition_left(client, topic, member):
    reader, found, txn = begun(client, topic, member, b"1")
    reader.cut()
    with pytest.raises(Conflict):
        reader.ack(txn, found)
    reader.until(lambda: ("lost", (topic, 0)) in reader.listener.told)
    assert values(reader.take(1)) == [b"1"]
    reader.end(txn, commit=False)


def test_acknowledgements_whose_answer_is_lost_are_a_conflict_and_come_again(client, topic, member):
    reader, found, txn = begun(client, topic, member, b"1")
    sent = reader.ack_context().acknowledge(txn, by_partition(found), Deadline(SOON))
    sent._sent[0].answers.append(_Lost())
    with pytest.raises(Conflict, match="connection"):
        sent.settle(Deadline(SOON))
    reader.end(txn, commit=False)
    go_back(reader, found)
    assert values(reader.take(1)) == [b"1"]


def test_a_writer_learns_that_a_partition_left_behind_its_acknowledgements(client, topic, member):
    reader, found, txn = begun(client, topic, member, b"1")
    sent = reader.ack(txn, found)
    assert not sent.has_lost_partition
    reader.cut()
    reader.until(lambda: ("lost", (topic, 0)) in reader.listener.told)
    assert sent.has_lost_partition
    reader.end(txn, commit=False)


class _Lost:
    def result(self, timeout):
        raise wire.BrokerConnectionLost("the connection is closed")


def send_ack(consumer, type, positions, txn):
    """Acknowledge as a client does that keeps no account of what it has received."""
    consumer._acknowledge(type, positions, txn, ClientDeadline(SOON)).result(SOON)


class Naive:
    """Acknowledges on a bare consumer as the protocol seems to ask for; each part can be left out or done wrongly."""

    def __init__(self, client, topic, type=wire.SubscriptionType.SHARED):
        self.client, self.topic = client, topic
        self.consumer = client.subscribe(topic, "group", timeout=SOON, type=type, start=wire.EARLIEST)

    def take(self, count):
        return [message for entry in receive(self.consumer, count) for message in entry.messages()]

    def acknowledge(self, messages, commit=True, added=True, ids=None, cumulative=False):
        txn = self.client.transactions.begin(60_000, SOON)
        if added:
            self.client.transactions.register(txn, SOON, subscriptions=[(self.topic, "group")])
        ids = [message.id for message in messages] if ids is None else ids
        try:
            if cumulative:
                (id,) = ids
                up_to = [{"ledger_id": id.ledger, "entry_id": id.entry}]
                send_ack(self.consumer, 1, up_to, txn)
            else:
                acknowledge(self.consumer, ids, txn)
        except wire.TransactionConflict:
            self.client.transactions.end(txn, False, SOON)
            raise
        self.client.transactions.end(txn, commit, SOON)
        return txn

    def close(self):
        self.consumer.close(SOON)


def left_over(client, topic):
    """Return the messages that the next consumer of the group gets before a marker message."""
    write(client, topic, b"marker")
    consumer = client.subscribe(topic, "group", timeout=SOON, type=wire.SubscriptionType.SHARED, start=wire.EARLIEST)
    found = []
    while b"marker" not in found:
        found += payloads(receive(consumer, 1))
    consumer.close(SOON)
    return [value for value in found if value != b"marker"]


def test_an_acknowledgement_of_an_unregistered_subscription_hangs_after_a_commit(pulsar_broker, client, topic, member):
    write(client, topic, b"1")
    naive = Naive(client, topic)
    found = naive.take(1)
    txn = naive.acknowledge(found, added=False)  # the broker says yes to everything
    with pytest.raises(wire.TransactionConflict):
        naive.acknowledge(found)
    naive.close()
    assert left_over(client, topic) == []
    assert pending(pulsar_broker, topic) == 1
    client.transactions.end_on_subscription(txn, topic, "group", False, SOON)
    # Ours says what to name, so what it acknowledged is ended with the transaction.
    reader = member(topic, sharing="message")
    again = [m for m in reader.take(2) if m.value == b"1"]
    reader.pass_on(again)
    reader.leave()
    assert pending(pulsar_broker, topic) == 0


def pending(broker, topic):
    """How many transactions hold acknowledgements of the group."""
    path = topic.replace("persistent://", "")
    with urllib.request.urlopen(
        f"{broker.admin_url}/admin/v3/transactions/pendingAckStats/{path}/group", timeout=SOON
    ) as answer:
        return json.load(answer)["ongoingTxnSize"]


def test_a_cumulative_acknowledgement_on_a_shared_subscription_does_nothing(client, topic, member):
    write(client, topic, b"1", b"2")
    naive = Naive(client, topic)
    found = naive.take(2)
    naive.acknowledge(found, ids=[found[-1].id], cumulative=True)  # "yes"
    naive.close()
    assert left_over(client, topic) == [b"1", b"2"]
    reader = member(topic, sharing="message")
    reader.pass_on([m for m in reader.take(3) if m.value != b"marker"])
    reader.leave()
    assert left_over(client, topic) == []


def test_acknowledging_a_batch_whole_for_one_of_its_messages_loses_the_others(client, topic, member):
    write(client, topic, batch_of(b"1", b"2", b"3"))
    naive = Naive(client, topic)
    found = naive.take(3)
    naive.acknowledge(found[:1], ids=[wire.MessageId(*found[0].id[:2])])
    naive.close()
    assert left_over(client, topic) == []  # two are lost
    write(client, topic, batch_of(b"1", b"2", b"3"))
    reader = member(topic, sharing="message")
    reader.pass_on([m for m in reader.take(4) if m.value == b"1"])
    reader.leave()
    assert left_over(client, topic) == [b"2", b"3"]


def test_an_acknowledgement_that_is_repeated_in_its_transaction_conflicts_with_itself(client, topic, member):
    """A lost answer cannot be had by asking again, so our writer gives the transaction up."""
    write(client, topic, b"1")
    naive = Naive(client, topic)
    found = naive.take(1)
    txn = begin(client, group=(topic, "group"))
    acknowledge(naive.consumer, [found[0].id], txn)
    with pytest.raises(wire.TransactionConflict):
        acknowledge(naive.consumer, [found[0].id], txn)
    client.transactions.end(txn, True, SOON)
    naive.close()
    assert left_over(client, topic) == []


@pytest.mark.parametrize("type", [wire.SubscriptionType.FAILOVER, wire.SubscriptionType.SHARED])
@pytest.mark.parametrize("size", [2, 64, 100])
def test_two_naive_transactions_acknowledge_the_rest_of_an_entry(client, topic, size, type):
    write(client, topic, batch_of(*(b"%d" % number for number in range(size))))
    naive = Naive(client, topic, type)
    *others, last = naive.take(size)

    def acknowledge(txn, messages):
        client.transactions.register(txn, SOON, subscriptions=[(topic, "group")])
        send_ack(naive.consumer, 0, individual_ack_fields([m.id for m in messages]), txn)

    passed, *both = [client.transactions.begin(60_000, SOON) for _ in range(3)]
    acknowledge(passed, others)
    client.transactions.end(passed, True, SOON)
    for txn in both:
        acknowledge(txn, [last])
    for txn in both:
        client.transactions.end(txn, True, SOON)


def test_a_plain_acknowledgement_of_what_a_transaction_holds_wins_over_its_abort(client, topic, member):
    write(client, topic, b"1")
    naive = Naive(client, topic)
    found = naive.take(1)
    txn = begin(client, group=(topic, "group"))
    acknowledge(naive.consumer, [found[0].id], txn)
    acknowledge(naive.consumer, [found[0].id])
    client.transactions.end(txn, False, SOON)
    naive.close()
    assert left_over(client, topic) == []  # aborted, and lost all the same
    write(client, topic, b"2")
    reader = member(topic, sharing="message")
    (held,) = [m for m in reader.take(2) if m.value == b"2"]
    txn = reader.begin((topic, 0))
    reader.ack(txn, [held])
    with pytest.raises(Conflict):
        reader.ack(txn, [held])  # ours has let it go
    reader.end(txn, commit=False)
    reader.leave()
    assert b"2" in left_over(client, topic)


def test_a_reader_without_a_memory_of_what_it_has_in_hand_is_given_it_twice(client, topic, member):
    """Brokers deliver everything anew that is not acknowledged, whenever a transaction on the subscription aborts."""
    contents = [b"%d" % number for number in range(4)]
    write(client, topic, *contents)
    naive = Naive(client, topic, wire.SubscriptionType.FAILOVER)
    found = naive.take(4)
    naive.acknowledge(found[:1], commit=False)
    assert payloads(receive(naive.consumer, 4)) == contents
    naive.close()
    reader = member(topic)
    ours = reader.take(4)
    txn = reader.begin((topic, 0))
    reader.ack(txn, ours[:1])
    reader.end(txn, commit=False)
    assert values(reader.take(1)) == [b"0"]
    write(client, topic, b"marker")
    assert values(reader.take(1)) == [b"marker"]


@pytest.mark.parametrize("group", [None, "group"], ids=["alone", "group"])
def test_a_place_in_an_open_transaction_is_not_the_end_of_a_topic(client, topic, member, group):
    """A message in an open transaction can be read by nobody yet, and a reader that begins behind it loses it."""
    write(client, topic, b"old")
    txn = begin(client, topic)
    producer = client.create_producer(topic, timeout=SOON, transactions=True)
    producer.send(wire.Single(b"undecided"), txn, timeout=SOON).result(SOON)
    naive = client.read(topic, timeout=SOON, start=wire.LATEST)
    ours = member(topic, group, start="latest")
    client.transactions.end(txn, True, SOON)
    write(client, topic, b"new")
    assert payloads(receive(naive, 1)) == [b"new"]
    assert values(ours.take(2)) == [b"undecided", b"new"]
