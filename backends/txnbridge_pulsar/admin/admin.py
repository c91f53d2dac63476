"""Administration: topics, the cluster's open transactions, ending them by hand, and the doctor."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from txnbridge.errors import AccessDenied, InvalidOption, InvalidState, NotFound, NotSupported
from txnbridge.spi import Admin, Advice, Deadline, Decision, OpenTransaction, Outcome, Partition, Position, TopicInfo
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.admin import doctor
from txnbridge_pulsar.admin.open_transactions import ListedTransaction, ListingBlocked, abort, list_open, token_of
from txnbridge_pulsar.admin.repair import TXN_ID, end_by_hand, repair
from txnbridge_pulsar.admin.rest import RestRefused, path_of, unavailable
from txnbridge_pulsar.cluster import ClusterAccess, in_parallel
from txnbridge_pulsar.errors import retry_translated
from txnbridge_pulsar.outcome.outcome import end_prepared
from txnbridge_pulsar.read.partition import BEGIN, position_after
from txnbridge_pulsar.topics import NEEDS_REST

_log = logging.getLogger("txnbridge")

# Seconds between checks whether a topic or partition was created or deleted.
_CHECK_SECONDS = 0.05
_MINUTE, _MEGABYTE = 60, 1024 * 1024
# Parts of the names of Pulsar's system topics, such as a subscription's pending-ack store.
_SYSTEM_TOPIC_NAMES = ("__transaction", "__change_events")


class PulsarAdmin(Admin):
    """Administration of the topics in the URL's namespace, and of open transactions of all programs in the cluster."""

    def __init__(self, cluster: ClusterAccess) -> None:
        self._cluster = cluster
        self._settings = cluster.settings
        self._topics = cluster.topics

    def create_topic(
        self,
        name: str,
        partitions: int,
        deadline: Deadline,
        *,
        retention_seconds: float | None = None,
        retention_bytes: int | None = None,
    ) -> bool:
        policy = _retention(retention_seconds, retention_bytes)
        created = self._topics.create(name, partitions, deadline)
        count = self._wait_until_known(name, partitions if created else 1, deadline)
        if count != partitions:
            raise InvalidOption(f"topic {name!r} exists already, with {count} partitions")
        if created and policy is not None:
            self._set_retention(name, policy, deadline)
        elif created and 0 in self._retention_of(name, deadline):
            _log.warning(
                "topic %r has a retention of 0: brokers delete messages that no subscription needs, even those of open"
                " and prepared transactions. Create the subscription before the first message, or set a retention",
                name,
            )
        return created

    def _wait_until_known(self, topic: str, partitions: int, deadline: Deadline) -> int:
        while (count := len(self._topics.existing(topic, deadline))) < partitions:
            deadline.check(f"waiting until topic {topic!r} has {partitions} partitions")
            time.sleep(_CHECK_SECONDS)
        return count

    def _set_retention(self, topic: str, policy: dict[str, int], deadline: Deadline) -> None:
        full = self._settings.namespace.full_name(topic)
        try:
            self._cluster.rest.ask("POST", f"/admin/v2/persistent/{path_of(full)}/retention", deadline, policy)
        except RestRefused as refused:
            raise unavailable(refused, f"setting the retention of topic {topic!r}") from refused

    def topic_names(self, deadline: Deadline) -> list[str]:
        names = {self._topics.partition_of(concrete)[0] for concrete in self._topics.all_concrete(deadline)}
        return [name for name in names if not self._is_internal(name)]

    def topics(self, deadline: Deadline) -> list[TopicInfo]:
        partitions_of = self._topics.all(deadline)
        kept = in_parallel(lambda name: self._retention_of(name, deadline), partitions_of)
        return [
            TopicInfo(name, partitions, self._is_internal(name), *limits)
            for (name, partitions), limits in zip(partitions_of.items(), kept, strict=True)
        ]

    def _is_internal(self, name: str) -> bool:
        return name.startswith(self._settings.prefix) or any(own in name for own in _SYSTEM_TOPIC_NAMES)

    def _retention_of(self, name: str, deadline: Deadline) -> tuple[float | None, int | None]:
        """Return for how long, and up to how many bytes, a topic keeps messages; None for no limit or if not known."""
        if not self._cluster.rest or self._is_internal(name):
            return None, None
        path = f"/admin/v2/persistent/{path_of(self._settings.namespace.full_name(name))}/retention?applied=true"
        try:
            retention = self._cluster.rest.get(path, deadline) or {}
        except (RestRefused, AccessDenied):
            return None, None
        minutes, megabytes = retention.get("retentionTimeInMinutes", 0), retention.get("retentionSizeInMB", 0)
        return None if minutes < 0 else float(minutes * _MINUTE), None if megabytes < 0 else int(megabytes * _MEGABYTE)

    def delete_topic(self, name: str, deadline: Deadline) -> None:
        concrete = set(self._topics.existing(name, deadline))
        if concrete:
            for listed in list_open(self._cluster, deadline):
                if concrete.intersection(listed.topics):
                    raise InvalidState(f"topic {name!r} is in use by transaction {listed.name}; end it first")
        self._topics.delete(name, deadline)
        while self._topics.existing(name, deadline):
            deadline.check(f"waiting until topic {name!r} is gone")
            time.sleep(_CHECK_SECONDS)

    def grow_topic(self, name: str, partitions: int, deadline: Deadline) -> None:
        self._topics.grow(name, partitions, deadline)
        self._wait_until_known(name, partitions, deadline)

    def bounds(self, topics: Sequence[str], deadline: Deadline) -> dict[Partition, tuple[Position, Position]]:
        bounds = {}
        for topic in topics:
            concrete = self._topics.existing(topic, deadline)
            if not concrete:
                raise NotFound(f"there is no topic {topic!r}")
            for number, name in enumerate(concrete):
                bounds[topic, number] = self._bounds(name, deadline)
        return bounds

    def internal_name(self, name: str) -> str:
        return self._settings.prefix + name

    def create_internal_topic(self, name: str, deadline: Deadline) -> None:
        full = self._topics.internal(name, deadline)
        if not self._topics.existing(name, deadline):  # it was deleted since it was created
            self._topics.keep(full, deadline)

    def trim(self, partition: Partition, before: Position, deadline: Deadline) -> None:
        """Allow the broker to drop whole BookKeeper ledgers before a position, as in a decision log."""
        full = self._settings.namespace.full_name(partition[0])
        self._topics.trim(full, (before[0], before[1]), f"dropping old records of {full}", deadline)

    def topic_ids(self, topics: Sequence[str], deadline: Deadline) -> dict[str, str]:
        """Return the topics' ids: the time when the first partition's record in the metadata store was created.

        A topic that was deleted and created again has another id. Adding partitions, moving the topic to another broker
        and changing its retention keep the id. Without an `admin_url` no topic's id is known.
        """
        if not self._cluster.rest:
            return {}
        ids = in_parallel(lambda topic: self._topic_id(topic, deadline), topics)
        return {topic: id for topic, id in zip(topics, ids, strict=True) if id}

    def _topic_id(self, topic: str, deadline: Deadline) -> str:
        concrete = self._topics.existing(topic, deadline)
        if not concrete:
            return ""
        try:
            info = self._cluster.rest.get(f"/admin/v2/persistent/{path_of(concrete[0])}/internal-info", deadline)
        except AccessDenied as error:
            _log.debug("this user may not read the id of topic %r: %s", topic, error)
            return ""
        except RestRefused as refused:
            if refused.status == 404:
                return ""
            raise unavailable(refused, f"asking for the id of topic {topic!r}") from refused
        return str(info.get("creationDate") or "")

    def _bounds(self, concrete: str, deadline: Deadline) -> tuple[Position, Position]:
        """Return the position of a topic's or partition's first message, and that after its last readable message."""

        def ask() -> tuple[wire.MessageId, wire.MessageId | None]:
            with wire.closing(self._cluster.client.read(concrete, timeout=deadline.left()), deadline.left) as reader:
                return reader.progress(deadline.left())

        last, before_first = retry_translated(ask, f"asking where {concrete} begins and ends", deadline)
        first = BEGIN if before_first is None else position_after(before_first)
        return first, max(first, position_after(last), self._max_read_position(concrete, deadline))

    def _max_read_position(self, concrete: str, deadline: Deadline) -> Position:
        """Return the position after the topic's max read position, or (0, 0, 0) if it is not known.

        This position is also after aborted messages at the topic's end, about which the binary protocol says nothing.
        """
        if not self._cluster.rest:
            return (0, 0, 0)
        try:
            path = f"/admin/v3/transactions/transactionBufferStats/{path_of(concrete)}"
            ledger, _, entry = str(self._cluster.rest.get(path, deadline)["maxReadPosition"]).partition(":")
        except (RestRefused, AccessDenied) as error:
            if isinstance(error, RestRefused) and error.status >= 500:  # later it is known, and further on
                raise unavailable(error, f"asking where {concrete} ends") from error
            return (0, 0, 0)
        return int(ledger), int(entry) + 1, 0

    def transactions(self, deadline: Deadline, owners: str = "") -> list[OpenTransaction]:
        listed = list_open(self._cluster, deadline)
        used = (each for each in listed if not each.is_empty and each.owner.startswith(owners))
        return [self._as_open_transaction(each) for each in used]

    def _as_open_transaction(self, listed: ListedTransaction) -> OpenTransaction:
        return OpenTransaction(
            transaction=listed.name,
            state="ending" if listed.status != "OPEN" else "prepared" if listed.prepared else "open",
            owner=listed.writer or str(listed.txn),
            since=listed.since,
            expires_at=listed.expires_at,
            partitions=tuple(self._topics.partition_of(topic) for topic in listed.users_topics),
            groups=tuple(sorted({group for _, group in listed.subscriptions})),
            messages=listed.messages,
            token=token_of(self._cluster, listed),
            transactional_id=listed.owner,
        )

    def end(self, transaction: str, decision: Decision, deadline: Deadline) -> Outcome:
        """End a transaction, given by its name or its id at the coordinator, such as 0:15. Return its true outcome.

        A transaction that no coordinator knows, but that is still open on topics, can be ended by its id as well.
        """
        commit = decision is Decision.COMMIT
        named = [each for each in list_open(self._cluster, deadline) if transaction in (each.name, str(each.txn))]
        if not named and self._cluster.rest and TXN_ID.fullmatch(transaction):
            return end_by_hand(self._cluster, transaction, commit, deadline)
        if not named:
            raise NotFound(f"no open or prepared transaction {transaction!r}: it has ended, or never existed")
        (listed,) = named
        token = token_of(self._cluster, listed)
        if token is not None:
            return end_prepared(self._cluster, token, commit, deadline)
        if commit:
            raise InvalidState(f"transaction {transaction!r} is open and not prepared: only its writer can commit it")
        return abort(self._cluster, listed, deadline)

    def repair(self, transaction: str, deadline: Deadline) -> str:
        if not self._cluster.rest:
            raise NotSupported(f"repairing transaction {transaction!r}: {NEEDS_REST}")
        return repair(self._cluster, transaction, deadline)

    def check(self, deadline: Deadline) -> list[Advice]:
        return list(self._check_all(deadline))

    def _check_all(self, deadline: Deadline) -> Iterator[Advice]:
        if not self._cluster.rest:
            yield Advice("warning", "rest", f"the cluster cannot be checked: {NEEDS_REST}", "give the option admin_url")
            return
        rest = self._cluster.rest
        parts: tuple[Callable[[], Iterable[Advice]], ...] = (
            lambda: doctor.check_settings(rest, deadline),
            lambda: doctor.check_namespace(rest, self._settings, deadline),
            lambda: doctor.check_stores(self._cluster, self.topics(deadline), deadline),
            lambda: doctor.check_topics(self._cluster, self.topics(deadline), deadline),
            lambda: self._check_open(deadline),
            lambda: doctor.check_held_back(self._cluster, deadline),
        )
        for part in parts:
            try:
                yield from part()
            except AccessDenied as error:
                yield Advice("warning", "rights", str(error), "let an administrator of the cluster ask")
            except ListingBlocked as error:
                yield Advice("problem", "open transactions", str(error), "wait, or end it in the program that began it")

    def _check_open(self, deadline: Deadline) -> Iterator[Advice]:
        listed = list_open(self._cluster, deadline)
        used = (self._as_open_transaction(each) for each in listed if not each.is_empty)
        yield from doctor.check_open(used, self._settings.timing)
        yield from doctor.check_at_risk(self._cluster, listed, deadline)


def _retention(seconds: float | None, size: int | None) -> dict[str, int] | None:
    if seconds is None and size is None:
        return None
    return {
        "retentionTimeInMinutes": -1 if seconds is None else math.ceil(seconds / _MINUTE),
        "retentionSizeInMB": -1 if size is None else math.ceil(size / _MEGABYTE),
    }
