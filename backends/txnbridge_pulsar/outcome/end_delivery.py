"""Makes sure that the end of a transaction reaches each of its participants: its topics and subscriptions.

A coordinator sends the end, a commit or an abort, to the brokers that serve the participants. While a broker unloads a
topic, to have another broker serve it, the coordinator mistakes "being unloaded" for "deleted", and counts the end as
delivered, although the end never arrives. Committed messages stay hidden on this topic. The end of a later transaction
there turns the commit into an abort: messages are lost, and acknowledged messages are processed twice (hazard H49).

The broker closes each producer and consumer on a topic that it unloads. So an owner remembers each transaction for some
seconds after its end, and ends the transaction again on every topic whose producer or consumer was closed. This fails
if the process dies in these seconds, or if another program ends a transaction on the topic first.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from txnbridge.spi import Deadline
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.client import TxnId
from txnbridge_pulsar.cluster import ClusterAccess, in_parallel
from txnbridge_pulsar.outcome.anchors import Anchors
from txnbridge_pulsar.settings.topic_names import whole_topic
from txnbridge_pulsar.write.fence_records import AnnouncedTransaction

_log = logging.getLogger("txnbridge")

# Seconds for which an ended transaction is remembered. A broker closes producers within milliseconds of unloading a
# topic, but unloads the topics of a large bundle one by one.
_KEEP_SECONDS = 5.0
_UNLOAD_CHECK_SECONDS = 0.05
# Seconds for one delivery. Topics of a killed broker are retried until the other brokers notice its death.
_DELIVERY_SECONDS = 2.0

# Limit for the participants in a token, which has 4,096 characters in all.
_MAX_TOKEN_CHARACTERS = 1800


class Participant(NamedTuple):
    """A topic or subscription that a transaction used, and our producer or consumer of it, which an unload closes."""

    topic: str
    subscription: str | None
    user: wire.PulsarProducer | wire.PulsarConsumer
    generation: int  # before the transaction's end is requested, so that a later unload is noticed

    @property
    def has_moved(self) -> bool:
        lost: BaseException | None = self.user.lost
        while isinstance(lost, wire.Closed):  # its cause is an earlier loss
            lost = lost.__cause__
        # An unload does not reach a producer or consumer that this process has closed; see `wait_for_unload_notices`.
        ours = lost is None or isinstance(lost.__cause__, wire.Closed)
        return self.user.generation != self.generation or not ours


@dataclass(frozen=True)
class Participants:
    """The names of the topics, and of subscriptions on topics, that a transaction's commit or abort has to reach."""

    topics: tuple[str, ...] = ()
    subscriptions: tuple[tuple[str, str], ...] = ()

    def fields(self) -> dict[str, Any]:
        """Return the names as fields of a token, a bit set of partitions for each topic; none if they are too long."""
        groups: dict[str, list[str]] = {}
        for topic, name in self.subscriptions:
            groups.setdefault(name, []).append(topic)
        packed = {"r": _packed(self.topics), "g": {name: _packed(topics) for name, topics in groups.items()}}
        return packed if len(json.dumps(packed)) <= _MAX_TOKEN_CHARACTERS else {}

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Participants:
        """Return the participants in a token's fields.

        Raise `KeyError`, `TypeError`, `AttributeError` or `ValueError` if the fields are invalid.
        """
        if "r" not in fields:
            return cls()
        groups = ((topic, name) for name, topics in fields["g"].items() for topic in _unpacked(topics))
        return cls(tuple(_unpacked(fields["r"])), tuple(groups))


NO_PARTICIPANTS = Participants()
Named = AnnouncedTransaction | None  # a transaction as the fence topic names it


def _packed(topics: Iterable[str]) -> dict[str, str]:
    sets: dict[str, int] = {}
    for concrete in topics:
        name, number = whole_topic(concrete)
        sets[name] = sets.get(name, 0) | 1 << (0 if name == concrete else number + 1)
    return {name: f"{set:x}" for name, set in sets.items()}


def _unpacked(sets: Mapping[str, str]) -> Iterator[str]:
    for name, text in sets.items():
        set = int(text, 16)
        for bit in range(set.bit_length()):
            if set >> bit & 1:
                yield name if bit == 0 else f"{name}-partition-{bit - 1}"


def deliver_everywhere(cluster: ClusterAccess, txn: TxnId, participants: Participants, deadline: Deadline) -> bool:
    """Commit a transaction again on each participant, for topics that were unloaded during the first commit.

    Return False if a participant's broker cannot be reached by the deadline: then it has to be committed again later.
    Refusals are only logged, because the outcome is decided. If authorization is on, only a superuser may do this.
    """

    def tell(target: tuple[str, str | None]) -> bool:
        try:
            _end_on(cluster, txn, True, *target, deadline)
        except wire.PulsarError as error:
            _log.debug("committing transaction %s again on %s: %s", txn, target[0], error)
            return _is_final(error)
        return True

    return all(in_parallel(tell, [*((topic, None) for topic in participants.topics), *participants.subscriptions]))


def _is_final(error: wire.PulsarError) -> bool:
    """Return whether a broker's refusal is final. A bridge's credentials may be renewed."""
    return isinstance(error, wire.ServerError) and not (error.retriable or isinstance(error, wire.NotAuthenticated))


def _end_on(
    cluster: ClusterAccess, txn: TxnId, commit: bool, topic: str, subscription: str | None, deadline: Deadline
) -> None:
    transactions = cluster.client.transactions
    if subscription is None:
        transactions.end_on_partition(txn, topic, commit, deadline.left())
    else:
        transactions.end_on_subscription(txn, topic, subscription, commit, deadline.left())


class _EndedTransaction(NamedTuple):
    at: float
    txn: TxnId
    commit: bool
    named: Named


class EndDelivery:
    """Remembers commits and aborts of an owner, and sends them again to topics that are unloaded. Thread-safe."""

    def __init__(self, cluster: ClusterAccess, anchors: Anchors | None = None) -> None:
        self._cluster = cluster
        self._anchors = anchors or Anchors(cluster)
        self._changed = threading.Condition()
        self._recent: dict[Participant, deque[_EndedTransaction]] = {}
        self._delivering: dict[Participant, None] = {}  # those to which a call sends ends again
        self._last_at = self._moved_at = 0.0
        self.has_given_up = False  # whether a topic or group may have missed an end for good
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def ended(
        self, txn: TxnId, commit: bool, participants: Sequence[Participant], deadline: Deadline, named: Named = None
    ) -> None:
        """Remember a transaction's commit or abort. Send it again to participants that are unloaded already."""
        ended = _EndedTransaction(time.monotonic(), txn, commit, named)
        with self._changed:
            for each in participants:
                self._recent.setdefault(each, deque()).append(ended)
            self._last_at = ended.at
        self.watch()
        self.settle({each.topic for each in participants}, deadline)

    def watch(self) -> None:
        """Send ends again, and end unused anchors, in the background."""
        with self._changed:
            if self._thread is None and not self._stop.is_set():
                with suppress(RuntimeError):  # if no more threads can be started now: the next end tries again
                    thread = threading.Thread(target=self._watch, name="txnbridge-pulsar-confirm", daemon=True)
                    thread.start()
                    self._thread = thread

    def settle(self, topics: Set[str], deadline: Deadline) -> None:
        """Send remembered commits and aborts again to those of these topics that were unloaded, until the deadline.

        Call this before another transaction ends on these topics, because its end would drop messages whose commit has
        not arrived.
        """
        busy = [each for each in self._moved(topics) if not self._deliver_again(each, deadline)]
        with self._changed:
            self._changed.wait_for(lambda: topics.isdisjoint(one.topic for one in [*self._delivering]), deadline.left())
        for each in busy:  # the other thread may have looked for ends right before the last one came
            self._deliver_again(each, deadline)

    def _moved(self, topics: Set[str] | None = None) -> list[Participant]:
        with self._changed:
            return [each for each in self._recent if (topics is None or each.topic in topics) and each.has_moved]

    def _deliver_again(self, missed: Participant, deadline: Deadline) -> bool:
        """Send ends again to an unloaded participant; keep failed ones for later. Return False if a thread does so."""
        mine = False
        try:
            with self._changed:
                if (busy := missed in self._delivering) or missed not in self._recent:
                    return not busy
                self._delivering[missed], ended, mine = None, self._recent[missed], True
                self._moved_at = time.monotonic()
            while ended:
                _end_on(self._cluster, ended[0].txn, ended[0].commit, missed.topic, missed.subscription, deadline)
                ended.popleft()
        except wire.PulsarError as error:
            if _is_final(error):
                self._give_up(missed, lost := list(ended), error)
                for _ in lost:
                    ended.popleft()
            else:
                _log.debug("ending transaction %s again on %s: %s", ended[0].txn, missed.topic, error)
        finally:
            if mine:
                del self._delivering[missed]  # before the lock, where an exception of a signal handler may come
                with self._changed:
                    self._changed.notify_all()
        return True

    def _give_up(self, missed: Participant, ended: Iterable[_EndedTransaction], error: object) -> None:
        self.has_given_up = True
        if committed := [str(each.txn) for each in ended if each.commit]:
            _log.error(
                "%s was unloaded while these transactions were committed: %s. The commits may not have reached the"
                " topic, and a later transaction would turn them into aborts there: %s. An administrator should run"
                " `txnbridge transactions repair` for each transaction at once",
                *(missed.topic, ", ".join(committed), error),
            )

    def _watch(self) -> None:
        while not self._stop.wait(_UNLOAD_CHECK_SECONDS):
            with suppress(RuntimeError):  # if this machine starts no more threads now
                in_parallel(lambda each: self._deliver_again(each, Deadline(_DELIVERY_SECONDS)), self._moved())
            # While one topic is unloaded, other ones of its bundle may have missed ends, too.
            if not self._delivering and time.monotonic() > self._moved_at + _KEEP_SECONDS:
                self._anchors.drop_unused({ended.txn for _, ended in self._undelivered()})
            with self._changed:
                self._drop_old()
                if not (self._recent or self._anchors.has_unused):
                    self._thread = None
                    return

    def _undelivered(self) -> list[tuple[Participant, _EndedTransaction]]:
        with self._changed:
            return [(each, ended) for each, kept in self._recent.items() if each.has_moved for ended in list(kept)]

    def missed_commits(self) -> set[AnnouncedTransaction]:
        """Return the commits that users' topics or groups have missed, for the next owner, which finds their proofs."""
        missed = {(each.topic, ended.named) for each, ended in self._undelivered() if ended.commit}
        return {named for topic, named in missed if named is not None and topic != named.proof.topic}

    def _drop_old(self) -> None:
        oldest = time.monotonic() - _KEEP_SECONDS
        for each, ended in list(self._recent.items()):
            while ended and ended[0].at < oldest and not each.has_moved:
                ended.popleft()
            if not ended:
                del self._recent[each]

    def wait_for_unload_notices(self) -> None:
        """Wait until the broker has had time to close the producers on topics that were unloaded during the last end.

        A writer calls this before it closes its producers: the broker does not tell a closed producer of an unload.
        """
        seconds = self._cluster.settings.timing.unload_notice_seconds
        time.sleep(max(0.0, self._last_at + seconds - time.monotonic()))

    def close(self, deadline: Deadline) -> None:
        """Stop the thread that sends ends again, after a last attempt for the unloaded participants."""
        self._stop.set()
        self.settle({each.topic for each in self._moved()}, deadline)
        for each, ended in self._undelivered():
            self._give_up(each, [ended], "the bridge was closed before they were sent again")
        self._anchors.drop_unused({ended.txn for _, ended in self._undelivered()}, deadline)
