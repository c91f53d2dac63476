"""Lists, creates and changes topics: through the binary protocol where possible, else by REST."""

from __future__ import annotations

import math
import time
from contextlib import suppress

from txnbridge.errors import AccessDenied, InvalidOption, InvalidState, NotFound, NotSupported, TxnBridgeError
from txnbridge.spi import Deadline, Partition
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.admin.rest import Rest, RestRefused, path_of, unavailable
from txnbridge_pulsar.errors import needing, retry_translated, translate, translated
from txnbridge_pulsar.settings import PulsarSettings
from txnbridge_pulsar.settings.topic_names import SUBSCRIPTION, namespace_of, partitions_of, whole_topic

# Seconds for which a topic's partitions are cached: some may be added, and a request takes only a millisecond.
_CACHE_SECONDS = 1.0
# Seconds for which a missing topic is looked for: a broker that has just started does not know all topics.
_MISSING_TOPIC_SECONDS = 0.5
_CHECK_SECONDS = 0.02
NEEDS_REST = "it needs the option admin_url, because the binary protocol has no request for it"


class PulsarTopics:
    """The topics of a cluster. Thread-safe.

    A concrete topic is what a broker serves as one topic: a partition, or a topic without partitions.
    """

    def __init__(self, settings: PulsarSettings, client: wire.PulsarClient, rest: Rest) -> None:
        self._settings = settings
        self._client = client
        self._rest = rest
        self._known: dict[str, tuple[float, tuple[str, ...]]] = {}
        self._internal: set[str] = set()

    def concrete(self, topic: str, deadline: Deadline, at_least: int = 1, create: bool = True) -> tuple[str, ...]:
        """Return the full names of a topic's partitions. Create a missing topic if `create` and the settings allow it.

        The names may be up to one second old, but not if there are fewer than `at_least`. Raise `NotFound` if the topic
        does not exist and is not created, `InvalidOption` if the name is invalid.
        """
        at, names = self._known.get(topic, (0.0, ()))
        if len(names) >= at_least and time.monotonic() - at < _CACHE_SECONDS:
            return names
        names = self._find_or_create(topic, deadline, at_least, create)
        self._known[topic] = time.monotonic(), names
        return names

    def require(self, topic: str, partition: int | None, deadline: Deadline) -> tuple[str, ...]:
        """Return the full names of a topic's partitions, to send to the partition `partition`, or to any for None.

        Raise `NotFound` if the topic or the partition is missing.
        """
        if partition is not None and partition < 0:
            raise NotFound(f"{topic}[{partition}]: partitions are numbered from 0")
        names = self.concrete(topic, deadline, (partition or 0) + 1)
        if partition is not None and partition >= len(names):
            raise NotFound(f"{topic} has {len(names)} partitions, so there is no partition {partition}")
        return names

    def check_may_send(self, concrete: str, deadline: Deadline) -> None:
        """Open a producer on a topic or partition, and close it.

        Raise `AccessDenied` without the right to send, and the broker's refusal of a terminated topic. A topic with its
        greatest number of producers passes: one of them may be this bridge's own.
        """

        def open_and_close() -> None:
            with suppress(wire.ProducerBusy), needing("produce", concrete):
                self._client.create_producer(concrete, timeout=deadline.left()).close(deadline.left())

        retry_translated(open_and_close, f"sending to topic {concrete}", deadline)

    def existing(self, topic: str, deadline: Deadline) -> tuple[str, ...]:
        """Return the full names of a topic's partitions; none for a missing topic, which is not created."""
        full = self._settings.namespace.full_name(topic)

        def find() -> tuple[str, ...]:
            with needing("produce,consume", full):
                return self._find(full, deadline)

        return retry_translated(find, f"looking up topic {topic!r}", deadline)

    def _find(self, full: str, deadline: Deadline) -> tuple[str, ...]:
        if count := self._partitions(full, deadline):
            return partitions_of(full, count)
        return (full,) if full in self._client.topics(namespace_of(full), deadline.left()) else ()

    def _partitions(self, full: str, deadline: Deadline) -> int:
        """Return a topic's number of partitions; 0 for a topic without partitions and for a missing one."""
        try:
            return self._client.partitions(full, deadline.left())
        except wire.TopicNotFound:
            return 0

    def all_concrete(self, deadline: Deadline) -> list[str]:
        """Return the full names of all persistent partitions, and topics without partitions, of the namespace."""
        namespace = str(self._settings.namespace)
        return retry_translated(lambda: self._client.topics(namespace, deadline.left()), "listing topics", deadline)

    def all(self, deadline: Deadline) -> dict[str, int]:
        """Return the short names of all persistent topics of the namespace, each with its number of partitions."""
        counts: dict[str, int] = {}
        for concrete in self.all_concrete(deadline):
            full, _ = whole_topic(concrete)
            name = self._settings.namespace.short_name(full)
            # A broker may not list partitions that nobody uses. A topic that was deleted since has none.
            if name not in counts and (count := 1 if full == concrete else len(self.existing(full, deadline))):
                counts[name] = count
        return counts

    def partition_of(self, concrete: str) -> Partition:
        """Return the short name of the topic, and the partition's number, for a partition's full name."""
        full, number = whole_topic(concrete)
        return self._settings.namespace.short_name(full), number

    def _find_or_create(self, topic: str, deadline: Deadline, at_least: int, create: bool) -> tuple[str, ...]:
        sure_at = time.monotonic() + _MISSING_TOPIC_SECONDS
        while True:
            names = self.existing(topic, deadline)
            if len(names) >= at_least:
                return names
            if not names and create and self._settings.create_topics:
                self.create(topic, self._settings.create_topics, deadline)
            elif time.monotonic() >= sure_at or deadline.expired:
                break
            time.sleep(_CHECK_SECONDS)
        if not names:
            raise NotFound(
                f"there is no topic {topic!r}; create it with: txnbridge topics create {topic} --partitions N"
                f" --url {self._settings.service}/{self._settings.namespace}"
            )
        return names

    def create(self, topic: str, partitions: int, deadline: Deadline) -> bool:
        """Create a topic. Return False if it exists already, with any number of partitions.

        Raise `NotSupported` for several partitions without an `admin_url`, `InvalidOption` if a value is invalid.
        """
        full = self._settings.namespace.full_name(topic)
        if self.existing(topic, deadline):
            return False
        if not self._rest:
            if partitions > 1:
                raise NotSupported(f"topic {topic!r} cannot be created with {partitions} partitions: {NEEDS_REST}")
            self._create_by_producer(full, deadline)
            return True
        return self._changed("PUT", full, partitions, deadline, f"creating topic {topic!r}")

    def grow(self, topic: str, partitions: int, deadline: Deadline) -> None:
        """Add partitions until the topic has `partitions`, with an `admin_url`.

        Raise `NotFound`, or `InvalidOption` if the topic has more partitions already.
        """
        names = self.existing(topic, deadline)
        if not names:
            raise NotFound(f"there is no topic {topic!r}")
        if partitions < len(names):
            raise InvalidOption(f"topic {topic!r} has {len(names)} partitions and cannot have fewer")
        if partitions == len(names):
            return
        full = self._settings.namespace.full_name(topic)
        if names == (full,):
            raise NotSupported(f"topic {topic!r} was created without partitions, and Pulsar cannot add any")
        self._changed("POST", full, partitions, deadline, f"growing topic {topic!r}")
        self._known.pop(topic, None)

    def _changed(self, method: str, full: str, partitions: int, deadline: Deadline, what: str) -> bool:
        try:
            self._rest.ask(method, f"/admin/v2/persistent/{path_of(full)}/partitions", deadline, partitions)
        except RestRefused as refused:
            if refused.status == 409 and method == "PUT":
                return False
            raise _refusal(refused, what) from refused
        return True

    def delete(self, topic: str, deadline: Deadline, force: bool = True) -> None:
        """Delete a topic, with an `admin_url`; with `force` also one that is in use.

        Raise `NotFound`, and without `force` `InvalidState` if the topic is in use.
        """
        names = self.existing(topic, deadline)
        if not names:
            raise NotFound(f"there is no topic {topic!r}")
        full = self._settings.namespace.full_name(topic)
        kind = "" if names == (full,) else "/partitions"
        try:
            self._rest.ask("DELETE", f"/admin/v2/persistent/{path_of(full)}{kind}?force={str(force).lower()}", deadline)
        except RestRefused as refused:
            if refused.status == 412:
                raise InvalidState(f"deleting topic {topic!r}: {refused}") from refused
            raise _refusal(refused, f"deleting topic {topic!r}") from refused
        self._known.pop(topic, None)

    def internal(self, name: str, deadline: Deadline) -> str:
        """Return the full name of an internal topic; create a missing one with its subscription.

        The subscription is durable, and is created before the first record. Without such a subscription a broker with
        default settings drops records, and deletes an idle topic (hazard H42). Raise `AccessDenied` with instructions
        for an administrator if a right is missing.
        """
        full = f"persistent://{self._settings.namespace}/{name}"
        if full in self._internal:
            return full
        try:
            self.keep(full, deadline)
        except (AccessDenied, NotFound) as error:
            raise AccessDenied(self._for_the_administrator(name)) from error.__cause__
        self._internal.add(full)
        return full

    def keep(self, full: str, deadline: Deadline) -> None:
        """Create an internal topic and its subscription again if they were deleted since `internal` returned it."""
        what = f"opening the topic {self._settings.namespace.short_name(full)!r}"
        retry_translated(lambda: self._keep(full, deadline), what, deadline)

    def _keep(self, full: str, deadline: Deadline) -> None:
        if self._partitions(full, deadline):
            raise InvalidOption(f"topic {full} has partitions, which an internal topic must not have: choose a prefix")
        with suppress(wire.ConsumerBusy):  # another process holds the subscription, so it exists
            keeper = self._client.subscribe(full, SUBSCRIPTION, timeout=deadline.left(), start=wire.EARLIEST)
            keeper.close(deadline.left())

    def trim(self, full: str, before: tuple[int, int], what: str, deadline: Deadline) -> None:
        """Allow the broker to drop an internal topic's records before a position: whole BookKeeper ledgers, later.

        If another process is trimming, or if the record before the position is in another ledger, do nothing; a later
        call trims. `what` is for error texts.
        """
        ledger, entry = before
        if entry == 0:
            return
        with translated(what), suppress(wire.ConsumerBusy):
            mover = self._client.subscribe(full, SUBSCRIPTION, timeout=deadline.left(), start=wire.EARLIEST)
            with wire.closing(mover, deadline.left):
                mover.acknowledge_up_to(wire.MessageId(ledger, entry - 1), timeout=deadline.left())

    def _create_by_producer(self, full: str, deadline: Deadline) -> None:
        """Create a topic by opening a producer on it. This works only if the broker's settings allow it."""
        what = f"creating topic {full}"
        try:
            self._client.create_producer(full, timeout=deadline.left()).close(deadline.left())
        except wire.TopicNotFound as error:
            raise NotSupported(f"{what}: this cluster creates no topics by itself, and {NEEDS_REST}") from error
        except wire.PulsarError as error:
            raise translate(error, what) from error

    def _for_the_administrator(self, name: str) -> str:
        namespace = self._settings.namespace
        return (
            f"this user may not create or use the topic {name!r}, which txnbridge needs, and others that begin with"
            f" {self._settings.prefix!r}. An administrator grants this user's role:"
            f"\n  pulsar-admin namespaces grant-permission --role ROLE --actions produce,consume {namespace}"
            f"\nand, if brokers create no topics by themselves, allows it in this namespace:"
            f"\n  pulsar-admin namespaces set-auto-topic-creation --enable --type non-partitioned {namespace}"
        )

    def deduplicates(self, concrete: str, deadline: Deadline) -> bool:
        """Return whether the broker removes duplicates on a topic; False if this is not known (without `admin_url`)."""
        return self.deduplication(concrete, deadline) == "Enabled"

    def deduplication(self, concrete: str, deadline: Deadline) -> str:
        """Return the broker's deduplication status, such as "Enabled" or "Disabled"; empty if it is not known."""
        if not self._rest:
            return ""
        try:
            stats = self._rest.get(f"/admin/v2/persistent/{path_of(concrete)}/stats", deadline)
        except (RestRefused, AccessDenied):
            return ""
        return str(stats.get("deduplicationStatus", ""))

    def wait_for_writes(self, concrete: str, deadline: Deadline) -> None:
        """Wait until the broker has stored, or failed to store, all messages that it has received on a topic so far."""
        path, pending, last = f"/admin/v2/persistent/{path_of(concrete)}/internalStats", 0, math.inf
        while True:
            try:
                stats = self._rest.get(path, deadline)
            except RestRefused as refused:
                raise unavailable(refused, f"asking whether earlier messages to {concrete} are stored") from refused
            if pending:  # other producers may send without a break
                last = min(last, stats["entriesAddedCounter"] + pending)
            pending = stats["pendingAddEntriesCount"]
            if not pending or stats["entriesAddedCounter"] >= last:
                return
            deadline.check(f"waiting until earlier messages to {concrete} are stored")
            time.sleep(_CHECK_SECONDS)


def _refusal(refused: RestRefused, what: str) -> TxnBridgeError:
    invalid: dict[int, type[TxnBridgeError]] = dict.fromkeys((400, 406, 412), InvalidOption)
    kind = {**invalid, 404: NotFound, 409: InvalidState}.get(refused.status)
    return unavailable(refused, what) if kind is None else kind(f"{what}: {refused}")
