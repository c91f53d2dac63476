"""Brokers that are broken on purpose: the embedded broker, each with one promise less.

Each is a backend of its own, found by its URL scheme through the plug-in mechanism. It passes everything on to the
embedded broker but for what it breaks, and names the tests that have to notice. `SOUND` breaks nothing.

This module is a plug-in: `txnbridge.plugins.register(broken)`.
"""

import random
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar
from unittest.mock import patch

from txnbridge_embedded.backend import EmbeddedBackend
from txnbridge_embedded.outcome import ending

from txnbridge import Conflict, Fenced, InvalidState, NotFound, OutcomeUnknown, TransactionAborted, TxnBridgeError, spi
from txnbridge.errors import UsageError
from txnbridge.spi import Backend, Begin, Capability, Deadline, Decision, Evidence, Identity, Outcome, Status


class Around:
    """Passes every call on to the wrapped object; `broker` is the broken broker to which it belongs."""

    def __init__(self, inner: Any, broker: Any = None) -> None:
        self.inner = inner
        self.broker = broker

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def around(**methods: Callable[..., Any]) -> type[Around]:
    """A wrapper with these methods, which are given the wrapped object, too."""

    def method(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *args, **named: function(self.inner, *args, **named)

    return type("Changed", (Around,), {name: method(function) for name, function in methods.items()})


class OneByOne(Around):
    """A writer that passes every message through `send`."""

    def send_many(self, topic: str, items: Iterable[Any]) -> None:
        for item in items:
            value, key, headers = (item, None, None) if isinstance(item, bytes) else spi.encode_item(item)
            self.send(topic, value, key, headers, None, None)


class Remembering(OneByOne):
    """A writer that remembers its calls, so that another writer can repeat them."""

    def begin(self, begin: Begin) -> None:
        self.begun = begin
        self.sent: list[Any] = []
        self.inner.begin(begin)

    def send(self, *message: Any) -> None:
        self.inner.send(*message)
        self.sent.append(message)

    def elsewhere(self, messages: Iterable[Any]) -> None:
        """Commit messages by a writer that no owner can fence."""
        deadline = Deadline(30)
        (writer,) = self.broker.inner.open_writers(anonymous(), 1, None, deadline)
        writer.begin(Begin(uuid.uuid4().hex, deadline, False, None))
        for message in messages:
            writer.send(*message)
        writer.commit(deadline)
        writer.close()


def anonymous() -> Identity:
    return Identity(uuid.uuid4().hex, False, "default", "nobody")


class Broken(Around):
    """A broker: what is not overridden is sound. `caught_by` names tests that must fail on it, the one that catches it
    in every run first; others may. `breaks_with` are the errors of ours that they may fail with.
    """

    caught_by: ClassVar[tuple[str, ...]] = ()
    breaks_with: ClassVar[tuple[type[TxnBridgeError], ...]] = ()
    Writer: type[Around] = Around
    Preparing: type[Around] = Around
    Publishing: type[Around] = Around
    Reading: type[Around] = Around
    Administering: type[Around] = Around
    Logging: type[Around] = Around
    Halving: type[Around] = Around

    def open_writers(self, identity: Any, *rest: Any) -> list[Any]:
        return [self.Writer(writer, self) for writer in self.inner.open_writers(identity, *rest)]

    def prepare_writer(self, *args: Any) -> Any:
        return self.Preparing(self.inner.prepare_writer(*args), self)

    def publisher(self, *args: Any) -> Any:
        return self.Publishing(self.inner.publisher(*args), self)

    def reader(self, *args: Any) -> Any:
        return self.Reading(self.inner.reader(*args), self)

    @property
    def admin(self) -> Any:
        return self.Administering(self.inner.admin, self)

    def decision_log(self, *args: Any) -> Any:
        return self.Logging(self.inner.decision_log(*args), self)

    def half_store(self) -> Any:
        return self.Halving(self.inner.half_store(), self)

    @staticmethod
    def opening(options: Mapping[str, Any], context: Any) -> tuple[Mapping[str, Any], Any]:
        """Return the options and the context with which the embedded broker is opened."""
        return options, context


class Sound(Broken):
    """Breaks nothing, and takes a password."""

    @staticmethod
    def opening(options: Mapping[str, Any], context: Any) -> tuple[Mapping[str, Any], Any]:
        return options, replace(context, client_options={})


class DeclaresTooLittle(Broken):
    """Keeps every promise, but declares two of them absent."""

    @property
    def capabilities(self) -> spi.Capabilities:
        missing = spi.absent("so it says")
        found: spi.Capabilities = self.inner.capabilities
        return found.but({Capability.TOMBSTONES: missing, Capability.TIMESTAMPS: missing})


BROKEN: list[type[Broken]] = []


def caught_by(*tests: str) -> Any:
    def register(broker: type[Broken]) -> type[Broken]:
        broker.caught_by = tests
        BROKEN.append(broker)
        return broker

    return register


@caught_by(
    "test_a_committed_message_is_read",
    "test_all_topics_and_partitions_of_a_committed_transaction_are_seen",
    "test_a_commit_inside_the_block_is_final",
    "test_threads_share_a_bridge_and_nothing_is_lost_or_doubled",
    "test_a_transaction_that_was_not_prepared_is_not_ended_by_its_token",
)
class CommitsNothing(Broken):
    class Writer(Remembering):
        def commit(self, deadline: Deadline) -> None:
            if any(is_marker(message) for message in self.sent):
                self.inner.commit(deadline)
            else:
                self.inner.abort(deadline)


def is_marker(message: Any) -> bool:
    return bool(message[1]) and message[1].startswith(b"marker ")


@caught_by(
    "test_an_exception_in_the_block_aborts_and_is_not_hidden",
    "test_raising_abort_leaves_the_block_quietly_and_aborts",
    "test_an_abort_inside_the_block_is_final",
    "test_no_topic_or_partition_of_an_aborted_transaction_is_seen",
    "test_transactions_of_one_bridge_at_the_same_time_are_apart",
    "test_no_message_of_an_open_transaction_is_seen[abort]",
    "test_no_message_of_an_abort_is_seen_wherever_its_process_dies",
    "test_a_group_moves_on_with_the_messages_of_its_transaction[abort]",
    "test_after_an_abort_its_messages_come_again_next_and_in_order",
    "test_a_publisher_does_not_wait_for_a_transaction",
    "test_a_transaction_left_unfinished_is_aborted_when_its_bridge_closes",
    "test_a_commit_whose_answer_was_lost_is_known_by_its_token[aborted]",
    "test_after_a_lost_answer_a_consumer_goes_on_where_the_truth_is[aborted]",
)
class ShowsWhatIsAborted(Broken):
    class Writer(Around):
        def abort(self, deadline: Deadline) -> None:
            with suppress(TxnBridgeError):
                self.inner.commit(deadline)


@caught_by("test_a_confirmed_commit_survives_the_death_of_its_process")
class SaysCommittedTooEarly(Broken):
    class Writer(Around):
        late: threading.Thread | None = None

        def commit(self, deadline: Deadline) -> None:
            def really() -> None:
                time.sleep(0.1)
                with suppress(TxnBridgeError):  # the false outcome is already returned
                    self.inner.commit(deadline)

            self.late = threading.Thread(target=really)
            self.late.start()

        def begin(self, begin: Begin) -> None:
            self._settle()
            self.inner.begin(begin)

        def close(self) -> None:
            self._settle()
            self.inner.close()

        def _settle(self) -> None:
            if self.late is not None:
                self.late.join()


@caught_by(
    "test_a_reader_sees_all_of_a_transaction_or_nothing", "test_a_plain_commit_is_whole_wherever_its_process_dies"
)
class CommitsInTwoSteps(Broken):
    class Writer(Remembering):
        def commit(self, deadline: Deadline) -> None:
            if len(self.sent) < 2 or any(is_marker(message) for message in self.sent):
                self.inner.commit(deadline)
                return
            half = len(self.sent) // 2
            self.inner.abort(deadline)
            self.elsewhere(self.sent[:half])
            time.sleep(0.15)
            self.broker.inner.events.emit("step:store", "before")
            self.elsewhere(self.sent[half:])


@caught_by(
    "test_no_message_of_an_open_transaction_is_seen",
    "test_opening_an_id_aborts_what_its_older_owner_left_open",
    "test_a_transaction_that_a_vanished_process_left_open_is_aborted_by_its_deadline",
    "test_an_open_transaction_is_listed_until_it_ends",
    "test_an_administrator_aborts_what_a_dead_process_left_open",
    "test_an_owner_cannot_end_a_transaction_that_an_administrator_aborted[commit]",
    "test_an_owner_cannot_end_a_transaction_that_an_administrator_aborted[send]",
    "test_opening_an_id_clears_what_is_left_and_spares_what_is_prepared_wherever_it_dies",
)
class ShowsWhatIsOpen(Broken):
    class Writer(Remembering):
        def send(self, *message: Any) -> None:
            super().send(*message)
            if not len(self.sent) % 100:  # large transactions only, so that other tests need not wait
                self.elsewhere(self.sent[-100:])


@caught_by("test_an_empty_transaction_commits")
class RefusesToCommitNothing(Broken):
    breaks_with = (TransactionAborted,)

    class Writer(Remembering):
        acked = False

        def ack(self, *args: Any) -> None:
            self.acked = True
            self.inner.ack(*args)

        def commit(self, deadline: Deadline) -> None:
            if not self.sent and not self.acked:
                raise TransactionAborted("there is nothing to commit")
            self.inner.commit(deadline)


@caught_by("test_a_transaction_tells_its_state_at_every_step")
class SaysAbortedOfWhatIsCommitted(Broken):
    breaks_with = (TransactionAborted,)

    class Writer(Around):
        def commit(self, deadline: Deadline) -> None:
            self.inner.commit(deadline)
            raise TransactionAborted("so it says")


@caught_by("test_a_message_that_cannot_be_sent_leaves_the_transaction_usable")
class SpoilsATransactionByARefusal(Broken):
    breaks_with = (Conflict,)

    class Writer(Around):
        def send(self, *message: Any) -> None:
            try:
                self.inner.send(*message)
            except TxnBridgeError as error:
                raise Conflict("spoiled") from error


@caught_by(
    "test_a_transaction_that_outlives_its_deadline_is_aborted",
    "test_a_transaction_that_a_vanished_process_left_open_is_aborted_by_its_deadline",
    "test_an_open_transaction_is_listed_until_it_ends",
)
class KnowsNoDeadline(Broken):
    Writer = around(begin=lambda inner, begin: inner.begin(replace(begin, deadline=Deadline(3600))))


@caught_by(
    "test_a_bridge_out_of_writers_makes_the_next_transaction_wait_no_longer_than_its_deadline",
    "test_all_topics_and_partitions_of_a_committed_transaction_are_seen",
    "test_a_group_moves_on_with_the_messages_of_its_transaction[commit]",
)
class LosesTheFirstMessage(Broken):
    class Writer(OneByOne):
        first = False

        def begin(self, begin: Begin) -> None:
            self.first = True
            self.inner.begin(begin)

        def send(self, *message: Any) -> None:
            if self.first and not is_marker(message):
                self.first = False
            else:
                self.inner.send(*message)


@caught_by(
    "test_a_committed_message_is_read",
    "test_threads_share_a_bridge_and_nothing_is_lost_or_doubled",
    "test_a_message_is_processed_once_while_members_come_and_go",
    "test_an_ended_transaction_refuses_messages_and_says_why",
    "test_a_processor_passes_every_message_on_once",
)
class StoresTwice(Broken):
    class Writer(OneByOne):
        def send(self, *message: Any) -> None:
            self.inner.send(*message)
            self.inner.send(*message)


def changing(change: Callable[..., Any]) -> type[Around]:
    """A writer that changes each message before it is sent."""

    class Changing(OneByOne):
        def send(self, *message: Any) -> None:
            self.inner.send(*change(*message))

    return Changing


def changing_headers(change: Callable[[Any], Any]) -> type[Around]:
    return changing(lambda topic, value, key, headers, *rest: (topic, value, key, change(headers or ()) or None, *rest))


@caught_by("test_a_large_value_arrives_whole")
class StopsAtZeroBytes(Broken):
    Writer = changing(
        lambda topic, value, *rest: (
            topic,
            value if is_marker((topic, value)) else value and value.split(b"\0")[0],
            *rest,
        )
    )


@caught_by("test_a_large_value_arrives_whole")
class CutsLargeValues(Broken):
    Writer = changing(lambda topic, value, *rest: (topic, value and value[:100_000], *rest))


@caught_by("test_an_empty_value_arrives_empty")
class MakesEmptyValuesNone(Broken):
    Writer = changing(lambda topic, value, *rest: (topic, value or None, *rest))


@caught_by("test_a_message_without_a_value_arrives_without_one")
class DropsTombstones(Broken):
    class Writer(OneByOne):
        def send(self, topic: Any, value: Any, *rest: Any) -> None:
            if value is not None:
                self.inner.send(topic, value, *rest)


@caught_by(
    "test_keys_arrive_as_bytes_and_no_key_as_none",
    "test_send_many_sends_what_send_does",
    "test_a_message_without_a_value_arrives_without_one",
    "test_a_codec_reads_what_it_wrote",
    "test_the_same_key_goes_to_the_same_partition",
)
class LosesKeys(Broken):
    Writer = changing(lambda topic, value, key, *rest: (topic, value, None, *rest))


@caught_by(
    "test_headers_arrive",
    "test_a_header_of_any_bytes_arrives",
    "test_a_repeated_header_arrives_as_often_and_in_order",
    "test_a_header_without_a_value_or_a_name_arrives",
    "test_send_many_sends_what_send_does",
    "test_closing_a_publisher_flushes_it",
    "test_a_processor_sets_poison_aside_with_its_reason",
)
class LosesHeaders(Broken):
    Writer = changing_headers(lambda headers: None)

    Publishing = Writer


@caught_by("test_a_header_of_any_bytes_arrives")
class ReadsHeadersAsText(Broken):
    Writer = changing_headers(
        lambda headers: [(name, each and each.decode(errors="replace").encode()) for name, each in headers]
    )


@caught_by("test_a_header_without_a_value_or_a_name_arrives")
class GivesEachHeaderAValue(Broken):
    Writer = changing_headers(lambda headers: [(name, found or b"") for name, found in headers])


@caught_by("test_a_repeated_header_arrives_as_often_and_in_order")
class KeepsOneHeaderOfAName(Broken):
    Writer = changing_headers(lambda headers: list(dict(headers).items()))


@caught_by(
    "test_a_timestamp_arrives_as_it_was_set",
    "test_a_new_group_may_start_at_a_time",
    "test_reading_goes_on_from_a_point_in_time",
)
class SetsItsOwnTimestamps(Broken):
    Writer = changing(lambda *message: (*message[:-1], None))


@caught_by("test_a_message_without_a_timestamp_gets_the_present_one")
class LivesIn1970(Broken):
    Writer = changing(lambda *message: (*message[:-1], message[-1] or 7))


def spread(topic: Any, value: Any, key: Any, headers: Any, partition: Any, timestamp: Any) -> Any:
    if key is not None and partition is None:
        partition = random.randrange(5) if value in (b"single", b"many") else None
    return topic, value, key, headers, partition, timestamp


@caught_by("test_the_same_key_goes_to_the_same_partition")
class SpreadsKeysAtRandom(Broken):
    Writer = changing(spread)


@caught_by("test_a_message_goes_to_the_partition_that_its_sender_chose")
class ChoosesThePartitionItself(Broken):
    Writer = changing(lambda *message: (*message[:4], message[4] if message[2] is None else None, message[5]))


@caught_by(
    "test_a_partition_is_read_in_the_order_in_which_it_was_written",
    "test_a_group_goes_on_where_its_last_member_stopped",
    "test_after_an_abort_its_messages_come_again_next_and_in_order",
    "test_a_message_that_cannot_be_sent_leaves_the_transaction_usable",
    "test_reading_goes_on_from_an_earlier_position",
    "test_acknowledging_up_to_a_message_covers_those_before_it",
)
class Reorders(Broken):
    class Writer(Remembering):
        def send(self, *message: Any) -> None:
            if message[-2] is not None and message[-2] > 900:
                self.inner.send(*message)  # the embedded broker refuses it
            self.sent.append(message)

        def commit(self, deadline: Deadline) -> None:
            for message in reversed(self.sent):
                self.inner.send(*message)
            self.inner.commit(deadline)


@caught_by("test_every_reader_reads_a_partition_in_the_same_order")
class ShufflesForEachReader(Broken):
    class Reading(Around):
        def poll(self, *args: Any) -> Any:
            messages = self.inner.poll(*args)
            own = [message for message in messages if b"/" in (message.value or b"")]
            random.shuffle(own)
            mixed = iter(own)
            return [next(mixed) if b"/" in (message.value or b"") else message for message in messages]


@caught_by("test_a_reader_of_a_recreated_topic_skips_no_message_silently")
class ReadsOnInAnotherTopic(Broken):
    """The reader skips as many messages of a recreated topic as it has read of the old one: five."""

    class Reading(Around):
        def poll(self, *args: Any) -> Any:
            skipped = [b"new %d" % number for number in range(5)]
            return [message for message in self.inner.poll(*args) if message.value not in skipped]


@caught_by(
    "test_a_shut_out_owner_stays_shut_out",
    "test_opening_an_id_aborts_what_its_older_owner_left_open",
    "test_every_writer_of_an_older_owner_is_shut_out",
    "test_wherever_an_owner_sleeps_through_a_takeover_nothing_of_it_appears_later",
    "test_of_two_owners_that_race_for_an_id_one_commits",
    "test_opening_an_id_clears_what_is_left_and_spares_what_is_prepared_wherever_it_dies",
)
class FencesNobody(Broken):
    def open_writers(self, identity: Any, *rest: Any) -> list[Any]:
        return super().open_writers(anonymous(), *rest)


@caught_by("test_opening_an_id_aborts_what_its_older_owner_left_open")
class LeavesOpenWhatAnOlderOwnerLeft(Broken):
    # Like a test's patience, the patience with a broken broker is longer than the default timeout, here a 15th of 30 s.
    Writer = around(begin=lambda inner, it: inner.begin(replace(it, deadline=Deadline(it.deadline.left() / 15))))

    def open_writers(self, *args: Any) -> list[Any]:
        with patch.object(ending, "mark_aborted"):
            return super().open_writers(*args)


@caught_by("test_an_owner_that_was_shut_out_cannot_prepare")
class LetsZombiesPrepare(Broken):
    class Preparing(Remembering):
        def prepare(self, deadline: Deadline) -> None:
            try:
                self.inner.prepare(deadline)
            except Fenced:
                self.inner = self.broker.inner.prepare_writer(anonymous(), None, deadline)
                self.inner.begin(self.begun)
                for message in self.sent:
                    self.inner.send(*message)
                self.inner.prepare(deadline)


@caught_by(
    "test_a_shut_out_owner_stays_shut_out",
    "test_every_writer_of_an_older_owner_is_shut_out",
    "test_wherever_an_owner_sleeps_through_a_takeover_nothing_of_it_appears_later",
    "test_of_two_owners_that_race_for_an_id_one_commits",
    "test_opening_an_id_aborts_what_its_older_owner_left_open",
)
class LetsZombiesWrite(Broken):
    class Writer(Remembering):
        def commit(self, deadline: Deadline) -> None:
            try:
                self.inner.commit(deadline)
            except Fenced:
                self.elsewhere(self.sent)


@caught_by("test_a_shut_out_owner_stays_shut_out")
class LetsZombiesTakeTheIdBack(Broken):
    breaks_with = (Fenced,)

    def open_writers(self, identity: Any, *rest: Any) -> list[Any]:
        self.opened = identity, *rest
        return super().open_writers(identity, *rest)

    class Writer(Around):
        def commit(self, deadline: Deadline) -> None:
            try:
                self.inner.commit(deadline)
            except Fenced:
                identity, _, ledger, _ = self.broker.opened
                (self.inner,) = self.broker.inner.open_writers(identity, 1, ledger, deadline)
                raise


@caught_by("test_another_id_is_left_alone")
class FencesEverybody(Broken):
    breaks_with = (Fenced,)

    def open_writers(self, identity: Any, *rest: Any) -> list[Any]:
        return super().open_writers(replace(identity, name="everybody", owned=True), *rest)


@caught_by(
    "test_a_prepared_transaction_survives_a_new_owner",
    "test_opening_an_id_clears_what_is_left_and_spares_what_is_prepared_wherever_it_dies",
)
class AbortsWhatIsPreparedWhenItOpens(Broken):
    def open_writers(self, identity: Any, *rest: Any) -> list[Any]:
        for found in self.inner.admin.transactions(rest[-1]):
            if found.transaction.startswith(f"{identity.name}/") and found.state == "prepared":
                self.inner.admin.end(found.transaction, Decision.ABORT, rest[-1])
        return super().open_writers(identity, *rest)


@caught_by("test_an_id_is_opened_again_after_its_owner_closed_or_died")
class OpensAnIdOnce(Broken):
    breaks_with = (Fenced,)

    def open_writers(self, identity: Any, count: int, ledger: Any, deadline: Any) -> list[Any]:
        if identity.owned and not self.inner.admin.create_topic(f"opened-{identity.name}", 1, deadline):
            raise Fenced("somebody has opened it before")
        return super().open_writers(identity, count, ledger, deadline)


@caught_by(
    "test_a_prepared_message_is_not_seen_until_it_is_committed",
    "test_another_process_ends_what_a_killed_one_prepared[abort-aborted]",
    "test_a_reader_that_waits_before_an_undecided_transaction_skips_nothing[abort]",
    "test_ending_twice_changes_nothing_and_tells_the_truth",
)
class CommitsWhenItPrepares(Broken):
    breaks_with = (InvalidState,)

    class Preparing(Around):
        def prepare(self, deadline: Deadline) -> None:
            self.inner.prepare(deadline)
            self.inner.commit(deadline)


class InMemory(Broken):
    """Keeps prepared transactions in the memory of their bridge."""

    kept: ClassVar[dict[str, Any]] = {}

    class Preparing(Remembering):
        def prepare(self, deadline: Deadline) -> None:
            self.inner.abort(deadline)
            self.broker.kept[self.begun.transaction] = self


@caught_by(
    "test_another_process_ends_what_a_killed_one_prepared[commit-committed]",
    "test_a_prepared_transaction_is_listed_until_it_ends",
)
class KeepsWhatIsPreparedInItsProcess(InMemory):
    def commit(self, token: Any, ledger: Any, deadline: Deadline) -> Outcome:
        if (writer := self.kept.pop(token.transaction, None)) is None:
            return Outcome.ABORTED
        writer.elsewhere(writer.sent)
        return Outcome.COMMITTED

    def abort(self, token: Any, ledger: Any, deadline: Deadline) -> Outcome:
        self.kept.pop(token.transaction, None)
        return Outcome.ABORTED


@caught_by("test_ending_twice_changes_nothing_and_tells_the_truth")
class AbortsWhatIsPreparedWhenItCloses(Broken):
    def prepare_writer(self, *args: Any) -> Any:
        self.prepared = [*getattr(self, "prepared", ()), self.Preparing(self.inner.prepare_writer(*args), self)]
        return self.prepared[-1]

    Preparing = Remembering

    def close(self, deadline: Deadline) -> None:
        for writer in getattr(self, "prepared", ()):
            with suppress(TxnBridgeError):
                self.inner.admin.end(writer.begun.transaction, Decision.ABORT, deadline)
        self.inner.close(deadline)


@caught_by("test_a_token_commits_all_topics_and_partitions")
class PreparesTheFirstTopic(Broken):
    class Preparing(Remembering):
        def send(self, *message: Any) -> None:
            if not self.sent or message[0] == self.sent[0][0]:
                super().send(*message)


@caught_by("test_many_prepared_transactions_wait_side_by_side")
class ForgetsOlderPreparedOnes(Broken):
    class Preparing(Around):
        def prepare(self, deadline: Deadline) -> None:
            admin = self.broker.inner.admin
            older = sorted((t.since, t.transaction) for t in admin.transactions(deadline) if t.state == "prepared")
            for _, transaction in older[-4:-3]:
                admin.end(transaction, Decision.ABORT, deadline)
            self.inner.prepare(deadline)


@caught_by(
    "test_ending_twice_changes_nothing_and_tells_the_truth",
    "test_of_two_processes_that_end_one_transaction_both_hear_the_same",
    "test_a_prepared_transaction_that_nobody_ends_is_aborted_after_its_hold",
    "test_an_administrator_ends_a_prepared_transaction_without_its_token[abort]",
)
class SaysWhatItWasAsked(Broken):
    def commit(self, *args: Any) -> Outcome:
        self.inner.commit(*args)
        return Outcome.COMMITTED

    def abort(self, *args: Any) -> Outcome:
        self.inner.abort(*args)
        return Outcome.ABORTED


@caught_by(
    "test_a_prepared_message_is_not_seen_until_it_is_committed",
    "test_another_process_ends_what_a_killed_one_prepared[commit-committed]",
    "test_a_prepared_transaction_ends_as_decided_wherever_its_process_dies[commit]",
    "test_a_reader_that_waits_before_an_undecided_transaction_skips_nothing[commit]",
    "test_a_prepared_transaction_survives_a_new_owner",
)
class LosesTheDecision(Broken):
    def commit(self, *args: Any) -> Outcome:
        self.inner.abort(*args)
        return Outcome.COMMITTED


@caught_by(
    "test_ending_twice_changes_nothing_and_tells_the_truth",
    "test_a_prepared_transaction_ends_as_decided_wherever_its_process_dies[abort]",
    "test_a_prepared_transaction_says_so_and_has_a_token",
    "test_a_damaged_token_is_refused",
)
class CommitsWhatIsAbortedByToken(Broken):
    def abort(self, *args: Any) -> Outcome:
        return self.inner.commit(*args)  # type: ignore[no-any-return]


@caught_by(
    "test_an_exception_before_the_end_prepares_nothing", "test_a_transaction_to_be_prepared_is_not_committed_by_itself"
)
class PreparesWhatFailed(Broken):
    breaks_with = (InvalidState,)

    class Preparing(Around):
        def abort(self, deadline: Deadline) -> None:
            self.inner.prepare(deadline)
            self.inner.commit(deadline)


@caught_by(
    "test_the_status_of_a_token_is_what_happened",
    "test_a_commit_whose_answer_was_lost_is_known_by_its_token[aborted]",
    "test_a_prepared_transaction_survives_a_new_owner",
    "test_after_a_lost_answer_a_consumer_goes_on_where_the_truth_is[aborted]",
    "test_a_prepared_transaction_ends_as_decided_wherever_its_process_dies[abort]",
)
class SaysThatAllIsCommitted(Broken):
    def status(self, *args: Any) -> Status:
        status: Status = self.inner.status(*args)
        return replace(status, state=spi.TokenState.COMMITTED)


@caught_by("test_the_status_of_a_token_is_what_happened", "test_a_prepared_transaction_survives_a_new_owner")
class AbortsWhenAsked(Broken):
    def status(self, token: Any, ledger: Any, deadline: Deadline) -> Status:
        status: Status = self.inner.status(token, ledger, deadline)
        if token.prepared:
            self.inner.abort(token, ledger, deadline)
        return status


@caught_by("test_a_prepared_transaction_says_when_it_expires")
class SaysNothingAboutExpiry(Broken):
    def status(self, *args: Any) -> Status:
        status: Status = self.inner.status(*args)
        return replace(status, expires_at=None)


@caught_by("test_a_prepared_transaction_that_nobody_ends_is_aborted_after_its_hold")
class HoldsForEver(Broken):
    class Preparing(Around):
        def begin(self, begin: Begin) -> None:
            self.inner.begin(replace(begin, hold=None if begin.hold and begin.hold < 1 else begin.hold))


@caught_by("test_a_token_fits_where_text_fits")
class PutsTooMuchIntoATokens(Broken):
    breaks_with = (UsageError,)

    class Preparing(Around):
        def evidence(self) -> Evidence:
            found: Evidence = self.inner.evidence()
            return replace(found, how={**found.how, "ballast": "x" * 4_000})


class EveryCluster(str):
    """A cluster id that is equal to every other."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


@caught_by("test_a_token_of_another_cluster_is_refused")
class TakesTokensOfOtherClusters(Broken):
    @property
    def cluster(self) -> str:
        return EveryCluster(self.inner.cluster)


@caught_by(
    "test_a_group_goes_on_where_its_last_member_stopped",
    "test_a_group_moves_on_with_the_messages_of_its_transaction[commit]",
    "test_an_acknowledgement_covers_all_of_a_batch",
    "test_acknowledging_up_to_a_message_covers_those_before_it",
    "test_one_message_is_acknowledged_and_its_neighbours_come_again",
    "test_messages_are_acknowledged_in_any_order",
    "test_a_member_that_was_replaced_while_it_slept_commits_nothing",
    "test_a_message_that_a_group_acknowledged_is_not_read_again_by_seeking",
    "test_lag_is_what_a_group_has_before_it",
)
class ForgetsAcknowledgements(Broken):
    Writer = around(ack=lambda inner, *args: None)


@caught_by(
    "test_acknowledgements_of_a_prepared_transaction_follow_its_token[commit-partition]",
    "test_acknowledgements_of_a_prepared_transaction_follow_its_token[commit-message]",
    "test_a_message_acknowledged_in_a_prepared_transaction_stays_reserved_until_its_end",
)
class ForgetsAcknowledgementsOfPreparedOnes(Broken):
    Preparing = around(ack=lambda inner, *args: None)


@caught_by(
    "test_a_group_moves_on_with_the_messages_of_its_transaction[abort]",
    "test_a_message_is_passed_on_once_wherever_its_process_dies",
)
class AcknowledgesOutsideTheTransaction(Broken):
    class Writer(Around):
        def ack(self, context: Any, positions: Any) -> None:
            deadline = Deadline(30)
            (other,) = self.broker.inner.open_writers(anonymous(), 1, None, deadline)
            other.begin(Begin(uuid.uuid4().hex, deadline, False, None))
            other.ack(context, positions)
            other.commit(deadline)
            other.close()


@caught_by(
    "test_one_message_is_acknowledged_and_its_neighbours_come_again", "test_messages_are_acknowledged_in_any_order"
)
class AcknowledgesUpTo(Broken):
    breaks_with = (Conflict,)

    class Writer(Around):
        def ack(self, context: Any, positions: Any) -> None:
            self.inner.ack(context, {p: [(n,) for n in range(max(found)[0] + 1)] for p, found in positions.items()})


@caught_by(
    "test_an_acknowledgement_covers_all_of_a_batch",
    "test_a_group_goes_on_where_its_last_member_stopped",
    "test_acknowledging_up_to_a_message_covers_those_before_it",
)
class AcknowledgesTheFirstOfABatch(Broken):
    Writer = around(
        ack=lambda inner, context, positions: inner.ack(context, {where: at[:1] for where, at in positions.items()})
    )


@caught_by("test_a_member_that_was_replaced_while_it_slept_commits_nothing")
class KnowsNoConflict(Broken):
    class Writer(Remembering):
        def commit(self, deadline: Deadline) -> None:
            try:
                self.inner.commit(deadline)
            except Conflict:
                self.elsewhere(self.sent)


@caught_by(
    "test_an_unacknowledged_message_comes_again_to_the_next_member",
    "test_every_group_gets_every_message",
    "test_a_consumer_may_read_many_topics",
    "test_acknowledging_twice_is_refused",
)
class StartsGroupsAtTheEnd(Broken):
    def reader(self, subscription: Any, *rest: Any) -> Any:
        start = "latest" if subscription.group else subscription.start
        return super().reader(replace(subscription, start=start), *rest)


@caught_by("test_a_new_group_may_start_behind_the_latest_message", "test_a_new_group_may_start_at_a_time")
class StartsGroupsAtTheBeginning(Broken):
    def reader(self, subscription: Any, *rest: Any) -> Any:
        return super().reader(replace(subscription, start="earliest"), *rest)


@caught_by("test_every_group_gets_every_message")
class KnowsOneGroup(Broken):
    def reader(self, subscription: Any, *rest: Any) -> Any:
        if subscription.group is not None:
            subscription = replace(subscription, group=subscription.group.removesuffix("-too"))
        return super().reader(subscription, *rest)


@caught_by(
    "test_members_share_the_partitions_and_take_over_from_those_who_leave",
    "test_a_message_is_processed_once_while_members_come_and_go",
    "test_a_group_goes_on_where_its_last_member_stopped",
)
class GivesEveryMemberEverything(Broken):
    def reader(self, subscription: Any, *rest: Any) -> Any:
        if subscription.group is not None:
            subscription = replace(subscription, group=uuid.uuid4().hex)
        return super().reader(subscription, *rest)


@caught_by("test_a_message_that_a_killed_member_held_comes_again")
class WaitsForTheDead(Broken):
    @staticmethod
    def opening(options: Mapping[str, Any], context: Any) -> tuple[Mapping[str, Any], Any]:
        return {**options, "lease_seconds": 3600.0}, context


@caught_by(
    "test_members_share_one_partition_message_by_message", "test_a_message_that_one_member_gives_back_goes_to_another"
)
class GivesAPartitionToOneMember(Broken):
    def reader(self, subscription: Any, *rest: Any) -> Any:
        return super().reader(replace(subscription, sharing="partition"), *rest)


@caught_by("test_a_message_given_back_comes_again", "test_a_message_given_back_comes_again_behind_a_later_abort")
class TakesNothingBack(Broken):
    Reading = around(nack=lambda inner, *args: None)


@caught_by("test_a_message_given_back_comes_again", "test_a_message_that_one_member_gives_back_goes_to_another")
class CountsNoDeliveries(Broken):
    Reading = around(poll=lambda inner, *args: [message._replace(deliveries=1) for message in inner.poll(*args)])


@caught_by(
    "test_reading_goes_on_from_an_earlier_position",
    "test_a_message_that_a_group_acknowledged_is_not_read_again_by_seeking",
    "test_after_an_abort_its_messages_come_again_next_and_in_order",
    "test_a_group_that_goes_back_again_and_again_skips_nothing",
    "test_after_a_lost_answer_a_consumer_goes_on_where_the_truth_is[aborted]",
)
class CannotGoBack(Broken):
    Reading = around(seek=lambda inner, *args: None)


@caught_by("test_reading_goes_on_from_an_earlier_position")
class IsOneOff(Broken):
    Reading = around(positions=lambda inner: {where: (at[0] - 1,) for where, at in inner.positions().items()})


@caught_by("test_reading_goes_on_from_a_point_in_time")
class GoesBackToTheBeginningOfTime(Broken):
    Reading = around(seek_to_time=lambda inner, timestamp, deadline: inner.seek_to_time(0, deadline))


@caught_by("test_a_paused_partition_delivers_nothing_until_it_is_resumed")
class NeverPauses(Broken):
    Reading = around(pause=lambda inner, *args: None)


@caught_by("test_lag_is_what_a_group_has_before_it")
class HasNoLag(Broken):
    Reading = around(lag=lambda inner, *args: dict.fromkeys(inner.lag(*args), 0))


@caught_by(
    "test_acknowledging_twice_is_refused",
    "test_acknowledging_what_was_read_without_a_group_is_refused",
    "test_acknowledging_through_another_bridge_is_refused",
)
class DeliversTwice(Broken):
    Reading = around(poll=lambda inner, *args: [message for message in inner.poll(*args) for _ in range(2)])


@caught_by(
    "test_messages_that_a_publisher_flushed_are_there_once_and_in_order",
    "test_closing_a_publisher_flushes_it",
    "test_a_publisher_does_not_wait_for_a_transaction",
    "test_sequences_of_one_name_or_topic_are_not_those_of_another",
)
class PublishesTwice(Broken):
    class Publishing(Around):
        def send(self, *message: Any) -> None:
            self.inner.send(*message)
            self.inner.send(*message[:6], None, message[7])


class Holding(Around):
    """A publisher that keeps its messages to itself."""

    def send(self, *message: Any) -> None:
        self.held = [*getattr(self, "held", ()), message]


@caught_by("test_messages_that_a_publisher_flushed_are_there_once_and_in_order")
class FlushesNothing(Broken):
    class Publishing(Holding):
        def flush(self, deadline: Deadline) -> None:
            pass

        def close(self, deadline: Deadline) -> None:
            for message in getattr(self, "held", ()):
                self.inner.send(*message[:-1], deadline)
            self.inner.close(deadline)


@caught_by(
    "test_closing_a_publisher_flushes_it",
    "test_a_publisher_does_not_wait_for_a_transaction",
    "test_sequences_of_one_name_or_topic_are_not_those_of_another",
    "test_a_sequence_that_is_stored_is_not_stored_again",
)
class DropsWhatIsNotFlushed(Broken):
    class Publishing(Holding):
        def flush(self, deadline: Deadline) -> None:
            for message in getattr(self, "held", ()):
                self.inner.send(*message)
            self.held = []
            self.inner.flush(deadline)


@caught_by(
    "test_a_sequence_that_is_stored_is_not_stored_again",
    "test_a_publisher_knows_its_last_sequence",
    "test_a_sequence_is_published_once_wherever_its_process_dies",
)
class KeepsNoSequence(Broken):
    Publishing = around(send=lambda inner, *message: inner.send(*message[:6], None, message[7]))


@caught_by("test_sequences_of_one_name_or_topic_are_not_those_of_another")
class KeepsOneSequence(Broken):
    def publisher(self, name: Any, deadline: Deadline) -> Any:
        return super().publisher(name and name.removesuffix("-too"), deadline)


@caught_by(
    "test_the_first_claim_counts_for_everybody",
    "test_processes_that_race_agree_on_every_id",
    "test_a_decision_survives_those_who_made_it",
    "test_an_older_owner_of_an_id_decides_nothing_any_more",
    "test_a_batch_marked_as_done_is_known_to_be_done",
    "test_a_decision_stays_what_it_is_wherever_its_process_dies",
)
class HasALogForEachBridge(Broken):
    def decision_log(self, name: str, deadline: Deadline) -> Any:
        return super().decision_log(f"{name}-{uuid.uuid4().hex}", deadline)


@caught_by("test_ids_and_logs_are_apart")
class HasOneLog(Broken):
    def decision_log(self, name: str, deadline: Deadline) -> Any:
        return super().decision_log(name.removesuffix("-too"), deadline)


@caught_by("test_the_first_claim_counts_for_everybody")
class LosesWhatIsDecided(Broken):
    breaks_with = (OutcomeUnknown,)

    class Logging(Around):
        def append(self, record: bytes, deadline: Deadline) -> Any:
            if b'"claim"' in record and b"order" in record:
                return (self.inner.end(deadline)[0] + 1,)
            return self.inner.append(record, deadline)


@caught_by("test_topics_are_created_listed_and_deleted")
class DeletesNoTopics(Broken):
    Administering = around(delete_topic=lambda inner, *args: None)


@caught_by("test_creating_a_topic_twice_is_no_error_unless_it_differs")
class CreatesATopicOnce(Broken):
    class Administering(Around):
        def create_topic(self, name: str, partitions: int, *args: Any, **settings: Any) -> Any:
            with suppress(TxnBridgeError):
                self.inner.create_topic(name, partitions, *args, **settings)
            return True


@caught_by("test_topics_declared_in_a_program_are_made_if_missing_and_else_left_alone")
class ListsNoTopics(Broken):
    breaks_with = (NotFound,)

    Administering = around(topics=lambda inner, *args: [])


@caught_by("test_a_group_is_shown_with_its_members_where_it_stands_and_its_lag")
class ListsNoMembers(Broken):
    Administering = around(group=lambda inner, *args: replace(inner.group(*args), members=()))


@caught_by("test_a_group_is_set_back_once_it_has_no_members")
class SetsGroupsNowhere(Broken):
    Administering = around(reset_group=lambda inner, name, to, *rest: inner.reset_group(name, "latest", *rest))


@caught_by("test_a_growing_topic_keeps_its_messages_and_its_readers")
class GrowsNoTopics(Broken):
    Administering = around(grow_topic=lambda inner, *args: None)


@caught_by(
    "test_the_bounds_of_a_topic_are_what_can_be_read_of_it", "test_an_aborted_message_before_an_undecided_one_is_no_lag"
)
class SaysThatNothingCanBeRead(Broken):
    Administering = around(
        bounds=lambda inner, *args: {where: (first, first) for where, (first, _) in inner.bounds(*args).items()}
    )


@caught_by("test_the_bounds_of_a_topic_end_before_what_is_not_decided")
class SaysThatWhatIsOpenCanBeRead(Broken):
    Administering = around(
        bounds=lambda inner, *args: {at: (first, (end[0] + 1,)) for at, (first, end) in inner.bounds(*args).items()}
    )


@caught_by("test_a_missing_topic_is_named_where_none_may_be_created")
class KnowsTheBoundsOfNothing(Broken):
    class Administering(Around):
        def bounds(self, *args: Any) -> Any:
            try:
                return self.inner.bounds(*args)
            except NotFound:
                return {}


@caught_by("test_a_missing_topic_is_named_where_none_may_be_created")
class CreatesWhateverIsMissing(Broken):
    @staticmethod
    def opening(options: Mapping[str, Any], context: Any) -> tuple[Mapping[str, Any], Any]:
        return options, replace(context, create_topics=1)


@caught_by(
    "test_an_open_transaction_is_listed_until_it_ends",
    "test_a_prepared_transaction_is_listed_until_it_ends",
    "test_an_administrator_aborts_what_a_dead_process_left_open",
    "test_an_owner_cannot_end_a_transaction_that_an_administrator_aborted",
)
class ListsNothing(Broken):
    Administering = around(transactions=lambda inner, *args: [])


@caught_by(
    "test_an_administrator_aborts_what_a_dead_process_left_open",
    "test_an_owner_cannot_end_a_transaction_that_an_administrator_aborted",
    "test_an_administrator_ends_a_prepared_transaction_without_its_token[abort]",
)
class EndsNothing(Broken):
    class Administering(Around):
        def end(self, transaction: Any, decision: Decision, deadline: Any) -> Outcome:
            return Outcome.COMMITTED if decision is Decision.COMMIT else Outcome.ABORTED


@caught_by("test_an_owner_cannot_end_a_transaction_that_an_administrator_aborted[commit]")
class CommitsWhatIsGone(Broken):
    class Writer(Around):
        def commit(self, deadline: Deadline) -> None:
            with suppress(TransactionAborted):
                self.inner.commit(deadline)


@caught_by("test_half_messages_are_published_as_the_work_went_and_not_before[commit]")
class PublishesHalvesAtOnce(Broken):
    class Halving(Around):
        def put(self, half: Any, deadline: Any) -> Any:
            stored = self.inner.put(half, deadline)
            self.inner.end(stored, Decision.COMMIT, deadline)
            return stored


@caught_by(
    "test_half_messages_of_a_killed_process_end_as_their_application_says[commit]",
    "test_an_undecided_half_message_is_asked_about_again",
)
class AsksAboutNoHalf(Broken):
    class Halving(Around):
        def checks(self, group: str, limit: int, deadline: Deadline) -> list[Any]:
            time.sleep(deadline.left())
            return []


@caught_by("test_an_undecided_half_message_is_asked_about_again")
class AsksOnce(Broken):
    Halving = around(checks=lambda inner, *args: [half for half in inner.checks(*args) if half.checks < 2])


@caught_by("test_of_two_answers_to_a_half_message_the_first_counts")
class TakesTheLastAnswer(Broken):
    class Halving(Around):
        def end(self, half: Any, decision: Decision, deadline: Any) -> Outcome:
            outcome: Outcome = self.inner.end(half, decision, deadline)
            return Outcome.COMMITTED if decision is Decision.COMMIT else outcome


@caught_by("test_no_work_is_done_for_half_messages_that_cannot_be_stored")
class SaysThatHalvesAreStored(Broken):
    class Halving(Around):
        def put(self, half: Any, deadline: Any) -> Any:
            with suppress(NotFound):
                return self.inner.put(half, deadline)
            return half


@caught_by("test_a_committed_message_survives_a_kill_of_the_broker")
class ForgetsWhenItsWriterDies(SaysCommittedTooEarly):
    pass


def scheme_of(broker: type[Broken]) -> str:
    return f"broken-{broker.__name__.lower()}"


def backend_of(broker: type[Broken]) -> Backend:
    """Return the embedded broker's backend under another scheme, each of whose brokers is wrapped by a broken one."""

    class BrokenBackend(EmbeddedBackend):
        schemes = (scheme_of(broker),)

        def open(self, url: Any, options: Any, context: Any, deadline: Any) -> Any:
            options, context = broker.opening(options, context)
            return broker(super().open(url, options, context, deadline))

    return BrokenBackend()


@spi.hookimpl
def txnbridge_backends() -> list[Backend]:
    brokers: list[type[Broken]] = [Sound, DeclaresTooLittle, *BROKEN]
    return [backend_of(broker) for broker in brokers]
