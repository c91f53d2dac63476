"""A group's acknowledgements: gaps, overlaps, reservations of prepared transactions, and whose they are."""

import sqlite3

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from txnbridge_embedded.client import schema
from txnbridge_embedded.client.schema import OFFSET_BITS
from txnbridge_embedded.read import group_assignments
from txnbridge_embedded.write import acks
from txnbridge_embedded.write.acks import AckContext

from txnbridge.errors import Conflict

GROUP, PARTITION_ID = 1, 7
PARTITION = ("orders", 0)
ME = AckContext(GROUP, "shipping", "partition", "me", {PARTITION: (PARTITION_ID, 3)})
SHARED = AckContext(GROUP, "shipping", "message", "me", {PARTITION: (PARTITION_ID, 0)})


@pytest.fixture(autouse=True)
def _closed():
    """Close the connections that a test has opened at its end."""
    yield
    while opened:
        opened.pop().close()


opened: list[sqlite3.Connection] = []


def empty_file():
    connection = sqlite3.connect(":memory:", isolation_level=None)
    opened.append(connection)
    schema.create(connection)
    return connection


def file(stored, first=0, start=0):
    """A file with one partition that holds messages at the given offsets, given to `me` with epoch 3."""
    connection = empty_file()
    connection.execute("INSERT INTO topics(name, created_at) VALUES ('orders', 0)")
    end = max(stored, default=-1) + 1
    connection.execute(
        "INSERT INTO partitions(id, topic_id, number, first, next) VALUES (?, 1, 0, ?, ?)", (PARTITION_ID, first, end)
    )
    connection.executemany(
        "INSERT INTO messages VALUES (?, 0, NULL, NULL, NULL)",
        ((PARTITION_ID << OFFSET_BITS | offset,) for offset in stored),
    )
    connection.execute("INSERT INTO groups(id, name, sharing) VALUES (?, 'shipping', 'partition')", (GROUP,))
    connection.execute("INSERT INTO assignments VALUES (?, ?, 'me', 3, NULL, NULL)", (GROUP, PARTITION_ID))
    connection.execute("INSERT INTO positions VALUES (?, ?, ?, 0)", (GROUP, PARTITION_ID, start))
    return connection


@pytest.fixture
def connection():
    return file(range(10))


def ack(connection, *offsets, number=None, context=ME):
    acks.apply_acks(connection, context, {PARTITION: [(offset,) for offset in offsets]}, number)


def reached(connection):
    return connection.execute("SELECT next FROM positions").fetchone()[0]


def rows(connection, table):
    return connection.execute(f"SELECT first, last FROM {table} ORDER BY first").fetchall()


def test_a_message_that_retention_removed_is_not_acknowledged_with_the_one_behind_it():
    connection = file(range(5, 10), first=5)
    ack(connection, 5)
    assert (reached(connection), rows(connection, "acks")) == (0, [(5, 5)])


def test_a_delivered_message_that_retention_took_away_meanwhile_can_still_be_acknowledged():
    connection = file(range(5, 10), first=5, start=3)
    ack(connection, 3, 4)
    assert reached(connection) == 5


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE assignments SET member = 'other', epoch = 4",
        "UPDATE assignments SET epoch = 4",  # it went away and came back
        "UPDATE assignments SET member = NULL",
        "DELETE FROM assignments",
    ],
)
def test_an_acknowledgement_from_an_assignment_that_has_ended_is_refused(connection, change):
    connection.execute(change)
    with pytest.raises(Conflict, match="revoked from this reader"):
        ack(connection, 0)


def test_an_acknowledgement_of_a_partition_that_was_never_assigned_is_refused(connection):
    with pytest.raises(Conflict, match="orders\\[1\\]"):
        acks.apply_acks(connection, ME, {("orders", 1): [(0,)]})


def test_an_acknowledgement_for_a_deleted_topic_is_refused(connection):
    ack(connection, 3)
    ack(connection, 5, number=1)
    acks.forget_partitions(connection, [PARTITION_ID])
    with pytest.raises(Conflict):
        ack(connection, 0)
    acks.commit_pending(connection, 1)
    for table in ("assignments", "positions", "acks", "pending_acks"):
        assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)


def test_a_message_given_back_is_marked_until_it_is_acknowledged(connection):
    ack(connection, 1, 2, number=5)
    acks.abort_pending(connection, 5)
    assert connection.execute("SELECT rewinds FROM positions").fetchone() == (1,)
    assert connection.execute("SELECT first, last, number FROM pending_acks").fetchall() == [(1, 2, -1)]
    ack(connection, 1, 2)
    ack(connection, 0)
    assert (reached(connection), rows(connection, "pending_acks")) == (3, [])


def test_the_groups_of_a_prepared_transaction_are_named(connection):
    ack(connection, 1, 3, number=5)
    assert acks.groups_of(connection, 5) == ["shipping"]
    assert acks.groups_of(connection, 6) == []


def lend(connection, offset, member, until=10**15):
    connection.execute(
        "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?, 1)", (GROUP, PARTITION_ID, offset, member, until)
    )


def leases(connection):
    return connection.execute("SELECT offset, member, until FROM leases ORDER BY offset").fetchall()


def test_a_shared_message_is_acknowledged_by_whoever_holds_its_lease_even_if_that_has_run_out(connection):
    lend(connection, 0, "me", until=1)
    lend(connection, 2, "me")
    ack(connection, 0, 2, context=SHARED)
    assert (reached(connection), rows(connection, "acks"), leases(connection)) == (1, [(2, 2)], [])


def test_a_shared_message_is_not_acknowledged_without_its_lease(connection):
    lend(connection, 0, "me")
    lend(connection, 1, "other")
    for offsets in [(1,), (0, 1), (2,)]:
        with pytest.raises(Conflict, match="to another reader"):
            ack(connection, *offsets, context=SHARED)


def test_a_reserved_shared_message_is_lent_to_nobody_until_its_transaction_is_aborted(connection):
    lend(connection, 0, "me")
    ack(connection, 0, number=4, context=SHARED)
    assert leases(connection) == [(0, None, acks.NO_EXPIRY)]
    acks.abort_pending(connection, 4)
    assert leases(connection) == [(0, None, 0)]


LEASE = 1000


def group_of(partitions):
    """A file with a topic and a group that nobody has joined."""
    connection = empty_file()
    connection.execute("INSERT INTO topics(name, created_at) VALUES ('orders', 0)")
    for number in range(partitions):
        connection.execute("INSERT INTO partitions(topic_id, number) VALUES (1, ?)", (number,))
    connection.execute("INSERT INTO groups(id, name, sharing) VALUES (?, 'shipping', 'partition')", (GROUP,))
    return connection


def join(connection, name, now, expires_at=10**9):
    connection.execute("INSERT INTO members VALUES (?, ?, '[\"orders\"]', '', ?, ?)", (name, GROUP, expires_at, now))
    group_assignments.reassign(connection, GROUP, now, LEASE)


def owners(connection):
    held = group_assignments.read_assignments(connection, GROUP)
    return {id: (row.member, row.wanted) for id, row in sorted(held.items())}


def test_an_owner_has_the_time_of_one_lease_however_often_members_come_meanwhile():
    connection = group_of(4)
    join(connection, "a", 0)
    join(connection, "b", 100)
    assert owners(connection) == {1: ("a", None), 2: ("a", None), 3: ("a", "b"), 4: ("a", "b")}
    join(connection, "c", 900)
    assert sorted(wanted for _, wanted in owners(connection).values() if wanted) == ["b", "c"]
    group_assignments.reassign(connection, GROUP, 1099, LEASE)
    assert {owner for owner, _ in owners(connection).values()} == {"a"}
    group_assignments.reassign(connection, GROUP, 1100, LEASE)
    assert sorted(owner for owner, _ in owners(connection).values()) == ["a", "a", "b", "c"]


def test_a_move_is_called_off_when_the_member_that_wanted_the_partition_is_gone():
    connection = group_of(2)
    join(connection, "a", 0)
    join(connection, "b", 100, expires_at=500)
    assert owners(connection) == {1: ("a", None), 2: ("a", "b")}
    group_assignments.reassign(connection, GROUP, 501, LEASE)
    assert owners(connection) == {1: ("a", None), 2: ("a", None)}
    assert [row.epoch for row in group_assignments.read_assignments(connection, GROUP).values()] == [1, 1]


def test_a_partition_of_a_releasing_or_dead_member_goes_to_the_member_that_should_have_it():
    connection = group_of(4)
    join(connection, "a", 0)
    join(connection, "b", 100)
    group_assignments.release(connection, GROUP, "a", [3])
    group_assignments.reassign(connection, GROUP, 200, LEASE)
    assert owners(connection) == {1: ("a", None), 2: ("a", None), 3: ("b", None), 4: ("a", "b")}
    connection.execute("UPDATE members SET expires_at = 300 WHERE id = 'a'")
    group_assignments.reassign(connection, GROUP, 301, LEASE)
    assert {owner for owner, _ in owners(connection).values()} == {"b"}
    assert [row.epoch for row in group_assignments.read_assignments(connection, GROUP).values()] == [2, 2, 2, 2]


def test_a_member_whose_lease_ran_out_while_all_waited_for_the_file_is_not_taken_for_dead():
    connection = group_of(1)
    join(connection, "a", 0, expires_at=500)
    group_assignments.reassign(connection, GROUP, 499, LEASE)  # asked at 499, although the lock may have come at 700
    assert owners(connection) == {1: ("a", None)}


class Acknowledging(RuleBasedStateMachine):
    """Any sequence of acknowledgements leaves exactly what a set of offsets would, and refuses exactly the overlaps."""

    @initialize(stored=st.sets(st.integers(0, 30), min_size=1))
    def begin(self, stored):
        self.stored = sorted(stored)
        self.connection = file(self.stored)
        self.acked: set[int] = set()
        self.reserved: dict[int, set[int]] = {}
        self.numbers = 0

    def _taken(self):
        return self.acked.union(*self.reserved.values())

    def _some(self, data):
        return set(data.draw(st.lists(st.sampled_from(self.stored), min_size=1, max_size=6)))

    @rule(data=st.data())
    def acknowledge(self, data):
        offsets = self._some(data)
        if offsets & self._taken():
            with pytest.raises(Conflict):
                ack(self.connection, *offsets)
        else:
            ack(self.connection, *offsets)
            self.acked |= offsets

    @rule(data=st.data())
    def reserve(self, data):
        offsets = self._some(data)
        self.numbers += 1
        if offsets & self._taken():
            with pytest.raises(Conflict):
                ack(self.connection, *offsets, number=self.numbers)
        else:
            ack(self.connection, *offsets, number=self.numbers)
            self.reserved[self.numbers] = offsets

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), committed=st.booleans())
    def decide(self, data, committed):
        number = data.draw(st.sampled_from(sorted(self.reserved)))
        offsets = self.reserved.pop(number)
        if committed:
            acks.commit_pending(self.connection, number)
            self.acked |= offsets
        else:
            acks.abort_pending(self.connection, number)

    def teardown(self):
        opened.remove(self.connection)
        self.connection.close()

    @invariant()
    def the_file_says_what_the_sets_say(self):
        ranges = rows(self.connection, "acks")
        position = reached(self.connection)
        found = {o for o in self.stored if o < position or any(first <= o <= last for first, last in ranges)}
        assert found == self.acked
        unacked = [o for o in self.stored if o not in self.acked]
        below = [o for o in self.stored if not unacked or o < unacked[0]]
        assert position == (below[-1] + 1 if below else 0)
        assert all(
            last + 1 < first for (_, last), (first, _) in zip([(0, position - 1), *ranges], ranges, strict=False)
        )
        live = self.connection.execute("SELECT first, last FROM pending_acks WHERE number > 0").fetchall()
        assert {o for o in self.stored if any(a <= o <= b for a, b in live)} == set().union(*self.reserved.values())


TestAcknowledging = Acknowledging.TestCase
TestAcknowledging.settings = settings(stateful_step_count=25)
