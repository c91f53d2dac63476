"""For administrators: lists open and discarded halves, ends them, and resumes their check-backs."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from txnbridge.errors import AccessDenied, BrokerUnavailable, EvidenceLost, InvalidState, InvalidToken, OutcomeUnknown
from txnbridge.spi import Deadline, Decision, Ledger, LedgerClaim, OpenTransaction, Outcome, Partition, Token
from txnbridge_rocketmq.client import administration, groups
from txnbridge_rocketmq.client.protocol import read_requests
from txnbridge_rocketmq.client.protocol.codes import DISCARDED_TOPIC, HALF_TOPIC, Property
from txnbridge_rocketmq.client.protocol.frames import RpcRequest
from txnbridge_rocketmq.client.protocol.records import MessageExt
from txnbridge_rocketmq.client.protocol.send_requests import HalfEnd, end
from txnbridge_rocketmq.client.retry import look_up_by_key, retry_call
from txnbridge_rocketmq.cluster import RocketMQCluster
from txnbridge_rocketmq.outcome.end_transaction import HalfEnder, address_of_copy
from txnbridge_rocketmq.outcome.outcome import (
    PrepareRecord,
    end_prepared,
    is_published,
    prepare_record,
    prepared_by,
    publish_decided,
)
from txnbridge_rocketmq.write.half_buffer import HalfCount, halves_as_json, seconds_since
from txnbridge_rocketmq.write.transaction_properties import HalfOrigin, origin_of, place_of

T = TypeVar("T")

_log = logging.getLogger("txnbridge")

# The consumer group of the broker's check-back service, and the topic of its op messages, which name ended halves.
_BROKERS_GROUP, _OP_TOPIC = "CID_RMQ_SYS_TRANS", "RMQ_SYS_TRANS_OP_HALF_TOPIC"
# The consumer group in pull requests. It has no members.
_GROUP = "txnbridge-listing"
_OFFSETS = re.compile(rb"\d+")
# Op messages are read from this many before the service's offset on. Each names several halves, so the service may have
# read op messages about halves that it has not passed yet.
_OP_MESSAGES_BEFORE = 1024
# A transaction that was decided so recently is not listed, because its owner may be publishing it.
_BEING_PUBLISHED_SECONDS = 1.0
# The wait between two reads of a stored record that is not readable yet.
_VISIBLE_POLL_SECONDS = 0.01
# After the op message, a broker may still write the half again for this long: it pauses for a second within a round.
_LATE_COPY_SECONDS = 2.0
# The wait between two searches for such copies.
_COPY_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class PendingHalf:
    """The record of a half that waits for its end at a broker, or is discarded (without further check-backs)."""

    broker: str
    record: MessageExt
    discarded: bool = False

    @property
    def partition(self) -> Partition:
        """The partition in which the message would be published."""
        properties = self.record.properties
        number = properties.get("REAL_QID", "0")
        return properties.get(Property.REAL_TOPIC, self.record.topic), int(number) if number.isdigit() else 0


@dataclass(frozen=True)
class OpenHalves:
    """A transaction whose halves wait for their end. A half of another client is listed as a transaction of its own."""

    name: str
    # "open", "prepared", "ending" (decided, but not completely published or dropped), "discarded" (by the broker), or
    # "lost" (the record that decides it is gone)
    state: str
    halves: Sequence[PendingHalf]
    origin: HalfOrigin | None = None  # None for another client's half
    prepared: PrepareRecord | None = None

    @property
    def owner(self) -> str:
        """The transactional id; empty for another client's half."""
        return self.name.rsplit("/", 2)[0] if self.origin is not None else ""

    @property
    def may_be_published(self) -> bool:
        """Whether messages of the transaction may still be published; False for a discarded half of another client."""
        return self.origin is not None or self.state != "discarded"

    @property
    def messages(self) -> int:
        """The number of messages of a prepared transaction; for others, the number of listed halves."""
        return sum(each.count for each in self.prepared.topics) if self.prepared is not None else len(self.halves)


# --- listing ----------------------------------------------------------------------------------------------------------


def list_open(cluster: RocketMQCluster, deadline: Deadline) -> list[OpenHalves]:
    """Return the transactions that have open or discarded halves on any broker, the oldest first."""
    waiting: dict[str, list[PendingHalf]] = {}
    for broker in cluster.brokers.names(deadline):
        for each in _newest([*_discarded(cluster, broker, deadline), *_waiting(cluster, broker, deadline)]):
            waiting.setdefault(_name_of(each), []).append(each)
    listed = (_state(cluster, name, halves, deadline) for name, halves in waiting.items())
    return sorted((each for each in listed if each is not None), key=lambda each: each.halves[0].record.born_time)


def groups_of_open_halves(cluster: RocketMQCluster, deadline: Deadline) -> set[str]:
    """Return the producer groups of the open halves that bridges have stored on any broker."""
    return {
        half.record.properties.get(Property.GROUP, "")
        for broker in cluster.brokers.names(deadline)
        for half in _waiting(cluster, broker, deadline)
        if place_of(half.record) is not None
    }


def _name_of(half: PendingHalf) -> str:
    place = place_of(half.record)
    return place.transaction if place is not None else half.record.unique_key or str(half.record.offset_id)


def _newest(halves: Sequence[PendingHalf]) -> list[PendingHalf]:
    """Return the last record of each half: a broker writes a copy of a half in each round of check-backs."""
    return list({(each.record.unique_key, each.partition): each for each in halves}.values())


def _waiting(cluster: RocketMQCluster, broker: str, deadline: Deadline) -> list[PendingHalf]:
    """Return the open halves of a broker.

    A half is open if the broker's check-back service has not passed its record, and no op message names the record. A
    half message that needs no decision in the log is left out if a look-up finds that its message is published.
    """
    records = _records(cluster, broker, HALF_TOPIC, _service_offset(cluster, broker, HALF_TOPIC, deadline), deadline)
    pending = [PendingHalf(broker, replace(record, body=b"")) for record in records]
    if not pending:
        return []
    notes = _service_offset(cluster, broker, _OP_TOPIC, deadline) - _OP_MESSAGES_BEFORE
    ended = {
        int(offset)
        for record in _records(cluster, broker, _OP_TOPIC, notes, deadline)
        for offset in _OFFSETS.findall(record.body)
    }
    left = [half for half in pending if half.record.queue_offset not in ended]
    whole = [half for half in left if prepared_by(half.record, broker) is not None]
    published = {half.record.queue_offset for half in _published(cluster, broker, whole, deadline)}
    return [half for half in left if half.record.queue_offset not in published]


def _discarded(cluster: RocketMQCluster, broker: str, deadline: Deadline) -> Iterator[PendingHalf]:
    """Yield a broker's discarded halves, except those whose message is published: a token has committed them since."""
    records = _records(cluster, broker, DISCARDED_TOPIC, 0, deadline)
    discarded = _newest([PendingHalf(broker, replace(record, body=b""), discarded=True) for record in records])
    published = {half.record.queue_offset for half in _published(cluster, broker, discarded, deadline)}
    yield from (half for half in discarded if half.record.queue_offset not in published)


def _published(
    cluster: RocketMQCluster, broker: str, halves: Sequence[PendingHalf], deadline: Deadline
) -> list[PendingHalf]:
    """Return those halves whose message a look-up finds: they are published, although the broker lists them."""
    asked = [(broker, half.partition[0], half.record.unique_key or "") for half in halves]
    found = look_up_by_key(cluster.client, asked, f"looking at what broker {broker} has published", deadline)
    return [half for half, record in zip(halves, found, strict=True) if record is not None]


def _service_offset(cluster: RocketMQCluster, broker: str, topic: str, deadline: Deadline) -> int:
    """Return the offset up to which the check-back service of a broker has read its half or op topic."""
    return _ask(cluster, broker, groups.committed_offset(_BROKERS_GROUP, topic, 0), deadline) or 0


def _records(cluster: RocketMQCluster, broker: str, topic: str, first: int, deadline: Deadline) -> Iterator[MessageExt]:
    """Yield the records of a broker's system topic, which has one queue, from an offset to its current end."""
    at = max(first, 0, _ask(cluster, broker, read_requests.min_offset(topic, 0), deadline))
    end = _ask(cluster, broker, read_requests.max_offset(topic, 0), deadline)
    while at < end:
        deadline.check(f"reading {topic} of broker {broker}")
        pulled = _ask(cluster, broker, read_requests.pull(topic, 0, at, _GROUP), deadline)
        yield from (record for record in pulled.records if record.queue_offset < end)
        if not pulled.records and pulled.next_offset <= at:
            time.sleep(_VISIBLE_POLL_SECONDS)
        at = max(at, pulled.next_offset)


def _ask(cluster: RocketMQCluster, broker: str, request: RpcRequest[T], deadline: Deadline) -> T:
    return retry_call(cluster.client, broker, request, f"looking for halves on broker {broker}", deadline)


def _state(cluster: RocketMQCluster, name: str, halves: Sequence[PendingHalf], deadline: Deadline) -> OpenHalves | None:
    """Return the transaction of these halves with its state, such as "prepared" or "discarded".

    Return None if the transaction has ended, and only the op messages about its halves are still to be written.
    """
    origin = origin_of(halves[0].record)
    discarded = all(half.discarded for half in halves)
    listed = OpenHalves(name, "discarded" if discarded else "open", halves, origin)
    if origin is None:
        return listed
    ledger = cluster.ledger(name, origin.log)
    try:
        claim = ledger.decided(name, deadline, log=origin.log)
        if claim is not None:
            return _decided(cluster, listed, claim, deadline)
        prepared = prepared_by(halves[0].record, halves[0].broker) or prepare_record(ledger, name, origin.log, deadline)
    except EvidenceLost:
        return replace(listed, state="lost")
    except (OutcomeUnknown, InvalidToken):  # the decision log cannot be read now, or is in another store
        return listed
    if prepared is None and _published(cluster, halves[0].broker, _single(halves), deadline):
        return None
    listed = replace(listed, prepared=prepared)
    return replace(listed, state="prepared") if prepared is not None and not discarded else listed


def _single(halves: Sequence[PendingHalf]) -> Sequence[PendingHalf]:
    """Return `halves` if it is one half, the first of its transaction, which may end without a decision; else ()."""
    place = place_of(halves[0].record)
    return halves if len(halves) == 1 and place is not None and place.number == 0 else ()


def _decided(cluster: RocketMQCluster, listed: OpenHalves, claim: LedgerClaim, deadline: Deadline) -> OpenHalves | None:
    """Return a decided transaction with the state "ending"; `claim` is the decision.

    Return None if it was decided only seconds ago, or if it is aborted and its halves are discarded already.
    """
    if claim.decision is Decision.ABORT and listed.state == "discarded":
        return None
    noted = max(cluster.brokers.config(half.broker, deadline).op_message_interval for half in listed.halves)
    if seconds_since(claim.data) < max(_BEING_PUBLISHED_SECONDS, 2 * noted):
        return None
    return replace(listed, state="ending")


def as_open_transaction(cluster: RocketMQCluster, listed: OpenHalves) -> OpenTransaction:
    """Return a listed transaction in the form that `Admin.transactions` returns."""
    group = listed.halves[0].record.properties.get(Property.GROUP, "")
    prepared = listed.prepared
    return OpenTransaction(
        transaction=listed.name,
        state=listed.state,
        owner=cluster.settings.application_of(group) or group,
        since=min(half.record.born_time for half in listed.halves),
        expires_at=None if listed.origin is None else listed.origin.deadline,
        partitions=tuple(sorted({half.partition for half in listed.halves})),
        groups=tuple(sorted({ack.group for ack in prepared.acks})) if prepared is not None else (),
        messages=listed.messages,
        token=token_of(cluster, listed),
        transactional_id=listed.owner,
    )


def token_of(cluster: RocketMQCluster, listed: OpenHalves) -> Token | None:
    """Return the token of a prepared transaction; None for other transactions."""
    if listed.prepared is None or listed.origin is None:
        return None
    return Token(
        broker="rocketmq",
        cluster=cluster.id,
        transaction=listed.name,
        how={} if listed.origin.whole_until is None else halves_as_json(listed.prepared.topics),
        prepared=True,
        expires_at=listed.prepared.expires_at,
        messages=listed.messages,
        log=listed.origin.log,
    )


def list_held(cluster: RocketMQCluster, deadline: Deadline) -> Iterator[OpenTransaction]:
    """Yield prepared transactions that acknowledge messages, also without halves, by the application's decision log."""
    application = cluster.settings.application
    if cluster.settings.log_topic(application) in cluster.topics.all(deadline):  # a look creates no log
        ledger = cluster.context.ledger(application, application)
        with suppress(AccessDenied, EvidenceLost, OutcomeUnknown):
            ledger.positions("", deadline)  # reads the log
            for group, _, held in ledger.holds(deadline):
                name, until, log = held.transaction, held.expires_at, {**held.log, "log": application}
                token = Token("rocketmq", cluster.id, name, {}, True, until, log=log)
                owner = name.rsplit("/", 2)[0]
                yield OpenTransaction(name, "prepared", application, None, until, (), (group,), None, token, owner)


# --- ending by hand ---------------------------------------------------------------------------------------------------


def end_open(ender: HalfEnder, listed: OpenHalves, decision: Decision, deadline: Deadline) -> Outcome:
    """End a transaction for an administrator. Return its outcome, which follows an earlier decision if there is one.

    Raise `InvalidState` for the commit of a transaction that an administrator may only abort.
    """
    if listed.origin is None:
        return _end_foreign(ender.cluster, listed, decision, deadline)
    ledger = ender.cluster.ledger(listed.name, listed.origin.log)
    token = token_of(ender.cluster, listed)
    if token is not None:
        outcome = end_prepared(ender, token, decision, ledger, deadline, prepared=listed.prepared)
    else:
        outcome = _end_unprepared(ender, listed, decision, ledger, deadline)
    try:
        _drop_all(ender, listed, deadline)
    except BrokerUnavailable as error:
        _log.debug("halves of %s stay until the broker discards them: %s", listed.name, error)
    return outcome


def _drop_all(ender: HalfEnder, listed: OpenHalves, deadline: Deadline) -> None:
    """Abort the halves of an ended transaction, so that the broker stops its check-backs. Published messages stay.

    Repeat this for some seconds: a round of check-backs may write a half again until the half's op message is written.
    """
    cluster, brokers = ender.cluster, {half.broker for half in listed.halves}
    noted = max(cluster.brokers.config(broker, deadline).op_message_interval for broker in brokers)
    left = [half for half in listed.halves if not half.discarded]
    dropped: set[tuple[str, int]] = set()
    quiet = Deadline(0)
    while True:
        new = [half for half in left if (half.broker, half.record.queue_offset) not in dropped]
        if new:
            ender.drop([(half.broker, address_of_copy(half.record)) for half in new], deadline)
            dropped.update((half.broker, half.record.queue_offset) for half in new)
            quiet = Deadline(noted + _LATE_COPY_SECONDS)
        if quiet.expired or deadline.expired:
            return
        time.sleep(_COPY_POLL_SECONDS)
        waiting = (half for broker in brokers for half in _waiting(cluster, broker, deadline))
        left = [half for half in waiting if _name_of(half) == listed.name]


def _end_unprepared(
    ender: HalfEnder, listed: OpenHalves, decision: Decision, ledger: Ledger, deadline: Deadline
) -> Outcome:
    assert listed.origin is not None
    claim = ledger.decided(listed.name, deadline, log=listed.origin.log)
    if claim is None:
        if decision is Decision.COMMIT:
            raise InvalidState(f"transaction {listed.name!r} is open and not prepared: only its writer can commit it")
        topics = _known_topics(listed)
        if _single(listed.halves) and is_published(ender, listed.name, topics, False, deadline):
            # If its owner has decided it since, it may have other messages, which are not published yet (hazard H102).
            if (claim := ledger.decided(listed.name, deadline, log=listed.origin.log)) is None:
                return Outcome.COMMITTED
        else:
            claim = ledger.claim(listed.name, Decision.ABORT, halves_as_json(topics), deadline, log=listed.origin.log)
    if claim.decision is Decision.COMMIT:
        publish_decided(ender, listed.name, claim, deadline)
    return Outcome.COMMITTED if claim.decision is Decision.COMMIT else Outcome.ABORTED


def _known_topics(listed: OpenHalves) -> list[HalfCount]:
    """Return the number of the transaction's halves by topic: the highest number of a listed half, from 0, plus one."""
    counts: dict[tuple[str, str], int] = {}
    for half in listed.halves:
        place = place_of(half.record)
        assert place is not None
        key = half.partition[0], half.broker
        counts[key] = max(counts.get(key, 0), place.number + 1)
    return [HalfCount(topic, broker, count) for (topic, broker), count in counts.items()]


def _end_foreign(cluster: RocketMQCluster, listed: OpenHalves, decision: Decision, deadline: Deadline) -> Outcome:
    """Abort halves of another client that have one unique key: a client that sends a message again stores several.

    Raise `InvalidState` for COMMIT: only the other client may commit its halves.
    """
    if decision is Decision.COMMIT:
        raise InvalidState(f"half {listed.name!r} is another client's: only that client can commit it")
    for broker, key in sorted({(half.broker, half.record.unique_key or "") for half in listed.halves}):
        copies = _ask(cluster, broker, read_requests.by_unique_key(HALF_TOPIC, key), deadline)
        if not copies:
            raise EvidenceLost(f"half {listed.name!r} is gone: broker {broker} no longer finds it")
        for copy in copies:  # also older ones, whose abort has no effect
            _ask(cluster, broker, end(address_of_copy(copy), HalfEnd.ABORT, from_check=True), deadline)
    return Outcome.ABORTED


def resume_check_backs(cluster: RocketMQCluster, listed: OpenHalves, deadline: Deadline) -> int:
    """Have the broker send check-backs for discarded halves again, with a new count. Return the number of halves."""
    discarded = [half for half in listed.halves if half.discarded]
    for half in discarded:
        _ask(cluster, half.broker, administration.resume_half(half.record.offset_id), deadline)
    return len(discarded)
