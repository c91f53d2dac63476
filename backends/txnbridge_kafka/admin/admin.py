"""Administration: topics, groups, open transactions and their end by hand, repair of missing markers, the doctor."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from confluent_kafka import KafkaException

from txnbridge import errors
from txnbridge.spi import (
    Admin,
    Advice,
    Context,
    Deadline,
    Decision,
    GroupInfo,
    Ledger,
    LedgerEntry,
    OpenTransaction,
    Outcome,
    Partition,
    Position,
    TokenState,
    TopicInfo,
)
from txnbridge_kafka.admin import doctor
from txnbridge_kafka.admin.groups import KafkaGroups
from txnbridge_kafka.client.protocol_types import COMMITTED, OPEN, TransactionDescription
from txnbridge_kafka.cluster import KafkaCluster
from txnbridge_kafka.errors import translate
from txnbridge_kafka.outcome.hanging_transactions import write_missing_markers_of_id
from txnbridge_kafka.outcome.outcome import end_prepared, status_from_state_log
from txnbridge_kafka.topics import KafkaTopics
from txnbridge_kafka.write.owner import PREPARE
from txnbridge_kafka.write.prepared import prepares_for, token_of

# The coordinator's states of a transaction that has begun and not ended.
_UNENDED = (OPEN, "PrepareCommit", "PrepareAbort", "PrepareEpochFence")
# A writer's transactional.id is the bridge's transactional id and a suffix, for plain or for prepared transactions.
# The opening of a made-up id has the id's own name.
_WRITER = re.compile(r"(?P<owner>.+?)(\.\d+|(?P<prepared>(\.(?P<opening>[0-9a-f]{16}|(?P=owner)))?\.p\d+))", re.DOTALL)
# The pause before a topic's partitions, or the transactions that use a topic, are looked up again.
_CHECK_SECONDS = 0.02
_Key = tuple[str, int, int | None]  # the transactional.id of a transaction, its producer id and its start


@dataclass(frozen=True)
class _Prepared:
    """A prepare record, which makes a transaction a prepared one, and its ledger (one owner's part of a log)."""

    entry: LedgerEntry
    ledger: Ledger


class KafkaAdmin(Admin):
    """Administration of the whole cluster: it also lists and ends the transactions of other programs."""

    def __init__(self, cluster: KafkaCluster, context: Context) -> None:
        self._cluster = cluster
        self._settings = cluster.settings
        self._requests = cluster.requests
        self._topics = cluster.topics
        self._context = context

    def create_topic(
        self,
        name: str,
        partitions: int,
        deadline: Deadline,
        *,
        retention_seconds: float | None = None,
        retention_bytes: int | None = None,
    ) -> bool:
        created = self._topics.create(name, partitions, deadline, _retention(retention_seconds, retention_bytes))
        # An existing topic may also have just been created, so that some brokers do not know it yet.
        count = self._wait_until_known(name, partitions if created else 1, deadline)
        if count != partitions:
            raise errors.InvalidOption(f"topic {name!r} exists already, with {count} partitions")
        return created

    def _wait_until_known(self, topic: str, partitions: int, deadline: Deadline) -> int:
        """Wait until every broker knows at least `partitions` partitions of a topic; return the number that all know.

        Any broker may get the next request.
        """
        while (count := self._requests.partitions_everywhere(topic, deadline)) < partitions:
            deadline.check(f"waiting until every broker knows topic {topic!r}")
            time.sleep(_CHECK_SECONDS)
        return count

    def topic_names(self, deadline: Deadline) -> list[str]:
        return [name for name in self._topics.all(deadline) if not name.startswith((self._settings.prefix, "__"))]

    def unreadable(self, topics: Sequence[str], deadline: Deadline) -> list[str]:
        return self._topics.unreadable(topics, deadline) if topics else []

    def topics(self, deadline: Deadline) -> list[TopicInfo]:
        topics = self._topics.all(deadline)
        settings = self._topics.configs(list(topics), deadline)
        return [
            TopicInfo(
                name=name,
                partitions=len(topic.partitions),
                internal=name.startswith((self._settings.prefix, "__")),
                retention_seconds=None if (kept := _limit(settings[name], "retention.ms")) is None else kept / 1000,
                retention_bytes=_limit(settings[name], "retention.bytes"),
            )
            for name, topic in topics.items()
        ]

    def delete_topic(self, name: str, deadline: Deadline) -> None:
        while users := [each for each in self._unended(deadline) if any(topic == name for topic, _ in each.partitions)]:
            for last in users:
                # A transaction that is ending is complete within milliseconds. Its writer may have seen the end.
                if last.state == OPEN or deadline.left() <= _CHECK_SECONDS:
                    raise errors.InvalidState(f"topic {name!r} is in use by the transaction of {last.id}; end it first")
            time.sleep(_CHECK_SECONDS)
        self._topics.delete(name, deadline)

    def grow_topic(self, name: str, partitions: int, deadline: Deadline) -> None:
        self._topics.grow(name, partitions, deadline)
        self._wait_until_known(name, partitions, deadline)

    def bounds(self, topics: Sequence[str], deadline: Deadline) -> dict[Partition, tuple[Position, Position]]:
        offsets = self._cluster.requests
        counts = offsets.counts(topics, deadline)
        partitions = [(topic, number) for topic, count in counts.items() for number in range(count)]
        # Retention may remove messages between the two requests, so an end is at least the beginning.
        ends, begins = offsets.ends(partitions, deadline), offsets.begins(partitions, deadline)
        return {each: ((begins[each],), (max(begins[each], ends[each]),)) for each in partitions}

    def internal_name(self, name: str) -> str:
        return self._settings.prefix + name

    def create_internal_topic(self, name: str, deadline: Deadline) -> None:
        self._topics.create_internal_topic(name, deadline)
        self._topics.require_keeping(name, deadline)

    def trim(self, partition: Partition, before: Position, deadline: Deadline) -> None:
        try:
            self._topics.drop_records(partition, before[0], deadline)
        except KafkaException as error:
            raise translate(error, f"deleting records of topic {partition[0]!r}") from error

    def topic_ids(self, topics: Sequence[str], deadline: Deadline) -> dict[str, str]:
        return {topic: id for topic, id in self._cluster.requests.topic_ids(topics, deadline).items() if id}

    def groups(self, deadline: Deadline) -> dict[str, int]:
        return KafkaGroups(self._cluster, deadline).members()

    def group(self, name: str, deadline: Deadline) -> GroupInfo:
        return KafkaGroups(self._cluster, deadline).group(name)

    def describe_groups(self, names: Sequence[str], deadline: Deadline) -> dict[str, GroupInfo]:
        return KafkaGroups(self._cluster, deadline).describe(names)

    def reset_group(
        self, name: str, to: str | int, topics: Sequence[str] | None, deadline: Deadline
    ) -> dict[Partition, Position]:
        return KafkaGroups(self._cluster, deadline).reset(name, to, topics)

    def transactions(self, deadline: Deadline, owners: str = "") -> list[OpenTransaction]:
        records, cluster = self._records(deadline), self._requests.cluster_id(deadline)
        return [self._info_of(last, records, cluster) for last in self._unended(deadline, owners)]

    def _unended(self, deadline: Deadline, owners: str = "") -> list[TransactionDescription]:
        listed = self._requests.transactions(deadline, _UNENDED)
        # The ids are filtered first, because each described id may be looked up in every decision log.
        wanted = [each.id for each in listed if owner_of(each.id).startswith(owners)]
        # Transactions that have ended since they were listed are left out.
        return [last for last in self._requests.describe(wanted, deadline).values() if last.state in _UNENDED]

    def _info_of(self, last: TransactionDescription, records: _PrepareRecords, cluster: str) -> OpenTransaction:
        prepared = records.of(last)
        until = None
        if prepared is None:
            token, transaction, messages = None, last.id, None
            writer, seconds = _WRITER.fullmatch(last.id), prepares_for(last.timeout)
            if self._settings.common_logs and writer and writer["opening"] and seconds and last.start is not None:
                # Without its owner's log nobody knows whether it is prepared.
                until = last.start + 1000 * seconds if records.knows(writer["owner"]) else None
        else:
            token = token_of(prepared.entry, cluster)
            transaction, messages = token.transaction, token.messages
        return OpenTransaction(
            transaction=transaction,
            state="ending" if last.state != OPEN else "open" if prepared is None else "prepared",
            owner=last.id,
            since=last.start,
            expires_at=None if last.start is None else last.start + last.timeout,
            partitions=last.partitions,
            messages=messages,
            token=token,
            transactional_id=owner_of(last.id),
            prepares_until=until,
        )

    def end(self, transaction: str, decision: Decision, deadline: Deadline) -> Outcome:
        """End a transaction. `transaction` is the transaction's own id, or the transactional.id of its writer.

        A transaction that is not prepared can only be aborted. The abort fences the transaction's writer, and the
        writer then opens its transactional id again.
        """
        records = self._records(deadline)
        last, prepared = self._look_up(transaction, records, deadline)
        commit = decision is Decision.COMMIT
        if prepared is not None:
            token = token_of(prepared.entry, self._requests.cluster_id(deadline))
            return end_prepared(self._cluster, token, commit, prepared.ledger, deadline)
        if last is not None and last.state in _UNENDED and last.state != OPEN:
            return Outcome.COMMITTED if last.state in COMMITTED else Outcome.ABORTED
        if records.unread is not None:
            # The unread decision log may have a prepare record and a commit decision of the transaction.
            raise records.unread
        if last is None or last.state != OPEN:
            raise errors.NotFound(
                f"no open or prepared transaction {transaction!r}: it has ended, or was never begun here"
            )
        if commit:
            raise errors.InvalidState(
                f"transaction {transaction!r} is open and not prepared: only its writer can commit it"
            )
        return self._abort(last, deadline)

    def _records(self, deadline: Deadline) -> _PrepareRecords:
        return _PrepareRecords(self._topics, self._settings.log_topic(""), self._context, deadline)

    def _look_up(
        self, transaction: str, records: _PrepareRecords, deadline: Deadline
    ) -> tuple[TransactionDescription | None, _Prepared | None]:
        """Find a transaction by its own id or its writer's transactional.id; return its description and prepare record.

        The description is None if `transaction` is the own id of a prepared transaction, or if the coordinator does not
        know the transactional.id. The prepare record is None if the transaction is not prepared.
        """
        prepared = records.by_transaction(transaction)
        if prepared is not None:
            return None, prepared
        last = self._requests.describe([transaction], deadline).get(transaction)
        return last, None if last is None else records.of(last)

    def _abort(self, last: TransactionDescription, deadline: Deadline) -> Outcome:
        """Fence a transactional id, which atomically aborts its open transaction (hazard H13); return the outcome.

        The outcome may be a commit, because the writer may have committed the transaction just before.
        """
        self._requests.fence(last.id, int(self._settings.timeout * 1000), deadline)
        assert last.start is not None
        status = status_from_state_log(self._cluster, last.id, last.pid, last.epoch, last.start, deadline)
        if status.state is TokenState.UNKNOWN:
            raise errors.OutcomeUnknown(
                f"the writer of {last.id} is fenced, and has no open transaction. Its transaction was aborted, unless"
                f" the writer had just ended it: {status.reason}"
            )
        return Outcome.COMMITTED if status.state is TokenState.COMMITTED else Outcome.ABORTED

    def repair(self, transaction: str, deadline: Deadline) -> str:
        """Write the missing markers of a hanging transaction, by its coordinator's decision; return a report.

        The writer must be stopped: the markers would also end its next transaction in the same partitions. Raise
        `NotFound` for an unknown id, and `InvalidState` if the transaction has not ended or the id is in use.
        """
        _, prepared = self._look_up(transaction, self._records(deadline), deadline)
        id = transaction if prepared is None else str(prepared.entry.data["id"])
        written = write_missing_markers_of_id(self._cluster, id, deadline)
        if not written:
            return f"{id} has no missing markers: no partition has an open transaction of it"
        return f"wrote the missing markers of {id}: {', '.join(written)}"

    def check(self, deadline: Deadline) -> list[Advice]:
        return list(self._run_checks(deadline))

    def _run_checks(self, deadline: Deadline) -> Iterator[Advice]:
        parts: tuple[Callable[[], Iterable[Advice]], ...] = (
            lambda: doctor.check_settings(self._cluster, deadline),
            lambda: doctor.check_topics(self._cluster, deadline),
            lambda: doctor.check_open(self.transactions(deadline), self._settings),
            lambda: doctor.check_hanging(self._cluster, deadline),
        )
        for part in parts:
            try:
                yield from part()
            except errors.AccessDenied as error:
                yield Advice("warning", "rights", str(error), "grant this user Describe on the cluster and its topics")
            except errors.NotSupported as error:  # by another broker that speaks Kafka's protocol
                yield Advice("warning", "broker", str(error))


class _PrepareRecords:
    """The prepare records in the decision logs of all applications of a cluster, read when they are needed."""

    def __init__(self, topics: KafkaTopics, logs: str, context: Context, deadline: Deadline) -> None:
        self._topics = topics
        self._logs_begin = logs
        self._context = context
        self._deadline = deadline
        self._by_owner: dict[str, dict[_Key, _Prepared]] = {}
        self.unread: errors.TxnBridgeError | None = None  # the error of a decision log that could not be read

    def of(self, last: TransactionDescription) -> _Prepared | None:
        """Return the prepare record of a transaction that the coordinator describes; None if it is not prepared."""
        writer = _WRITER.fullmatch(last.id)
        if writer is None or not writer["prepared"] or last.state == "Empty":
            return None
        return self._of_owner(writer["owner"]).get((last.id, last.pid, last.start))

    def by_transaction(self, transaction: str) -> _Prepared | None:
        """Return the prepare record of the transaction with this own id; None if there is no such record.

        A transaction's own id begins with the transactional id of the transaction's owner.
        """
        owner, *rest = transaction.rsplit("/", 2)
        if len(rest) != 2:
            return None
        return next((p for p in self._of_owner(owner).values() if p.entry.transaction == transaction), None)

    def knows(self, owner: str) -> bool:
        """Return whether a decision log that could be read knows the owner, and so has the owner's prepare records."""
        for application in self._applications:
            with suppress(errors.TxnBridgeError):
                if self._context.ledger(application, owner).newest_opening(self._deadline) is not None:
                    return True
        return False

    def _of_owner(self, owner: str) -> dict[_Key, _Prepared]:
        if owner not in self._by_owner:
            ledgers = [self._context.ledger(application, owner) for application in self._applications]
            self._by_owner[owner] = {
                (each.data["id"], each.data["pid"], each.data["start"]): _Prepared(each, ledger)
                for ledger in ledgers
                for each in self._entries(ledger)
            }
        return self._by_owner[owner]

    def _entries(self, ledger: Ledger) -> list[LedgerEntry]:
        try:
            return ledger.entries(PREPARE, self._deadline)
        except errors.BrokerUnavailable:
            raise
        except errors.TxnBridgeError as error:
            # The records in the other decision logs are still returned.
            self.unread = error
            return []

    @cached_property
    def _applications(self) -> list[str]:
        names = self._topics.all(self._deadline)
        return [name[len(self._logs_begin) :] for name in names if name.startswith(self._logs_begin)]


def owner_of(id: str) -> str:
    """Return the bridge's transactional id with which a writer's transactional.id begins.

    The transactional.id of a program without txnbridge is returned unchanged.
    """
    writer = _WRITER.fullmatch(id)
    return id if writer is None else writer["owner"]


def _retention(seconds: float | None, size: int | None) -> dict[str, str]:
    config = {}
    if seconds is not None:
        config["retention.ms"] = str(max(1, int(seconds * 1000)))
    if size is not None:
        config["retention.bytes"] = str(size)
    return config


def _limit(settings: dict[str, str], name: str) -> int | None:
    value = int(settings.get(name, -1))
    return None if value < 0 else value
