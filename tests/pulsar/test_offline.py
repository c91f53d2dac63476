"""Tests without a broker: what writers, owners and publishers conclude from answers, and how long they take."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from threading import get_ident
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from txnbridge_pulsar import broker as broker_module
from txnbridge_pulsar import client as wire
from txnbridge_pulsar import decision_log
from txnbridge_pulsar.admin import doctor
from txnbridge_pulsar.admin.admin import PulsarAdmin
from txnbridge_pulsar.admin.rest import RestRefused
from txnbridge_pulsar.client import consumer as consumer_module
from txnbridge_pulsar.client.connecting.connection import BrokerConnection
from txnbridge_pulsar.client.errors import server_error
from txnbridge_pulsar.client.format.codec import encode
from txnbridge_pulsar.client.format.frames import command, parse, send_command
from txnbridge_pulsar.client.format.ids import message_id
from txnbridge_pulsar.decision_log import PulsarLog
from txnbridge_pulsar.outcome import in_doubt, late_writes
from txnbridge_pulsar.outcome import outcome as outcome_module
from txnbridge_pulsar.outcome.anchors import Anchors
from txnbridge_pulsar.outcome.end_delivery import EndDelivery, Participant, Participants
from txnbridge_pulsar.outcome.in_doubt import InDoubt
from txnbridge_pulsar.outcome.late_writes import LateWriteGuard
from txnbridge_pulsar.outcome.outcome import EndResult, TokenEvidence
from txnbridge_pulsar.outcome.proof import ProofRecord
from txnbridge_pulsar.read import partition as partition_module
from txnbridge_pulsar.read import reader as reader_module
from txnbridge_pulsar.read.group_registry import GroupRegistry
from txnbridge_pulsar.read.partition import BEGIN, PulsarPartition
from txnbridge_pulsar.read.subscriptions import FailoverMode, SharedMode, mode_of
from txnbridge_pulsar.settings import Timing
from txnbridge_pulsar.settings.topic_names import Namespace
from txnbridge_pulsar.topics import PulsarTopics
from txnbridge_pulsar.write import fence as fence_module
from txnbridge_pulsar.write import owner as owner_module
from txnbridge_pulsar.write import prepared, writer
from txnbridge_pulsar.write.acks import PulsarAckContext
from txnbridge_pulsar.write.batching import PendingReceipts, TransactionProducer
from txnbridge_pulsar.write.fence import Fence
from txnbridge_pulsar.write.fence_records import AnnouncedTransaction, FenceRecord, ProofLocation
from txnbridge_pulsar.write.owner import PulsarOwner
from txnbridge_pulsar.write.publisher import PulsarPublisher
from txnbridge_pulsar.write.writer import PulsarWriter

from tests.core.decisions_kit import MemoryLog
from tests.core.reading_kit import by_partition
from tests.failing import EACH, answer_calls, fail_call, raising, replace_method
from tests.in_time import Hold, wait_until
from tests.interrupts import Interrupted, interrupted_at, interrupted_everywhere
from tests.pulsar import reading_kit
from tests.pulsar.fake import FakeBroker, Peer, connected, fake_broker, owns_everything, replies, served
from tests.pulsar.kit import Kept, settings_for
from tests.pulsar.reading_kit import Member
from txnbridge import Outcome, Token, errors
from txnbridge.spi import Begin, Deadline, Emitter, Identity, Subscription, TopicInfo

pytestmark = pytest.mark.offline

SOON = 60.0
TXN = wire.TxnId(0, 7)
PROOF_LOCATION = ProofLocation("persistent://public/default/_txnbridge-marker-w", (1, 0), "n0nce")
NO_LEDGER: Any = None
NO_REST: Any = None
NO_CLIENT: Any = None


def cluster_with(timing: Timing | None = None, **parts: Any) -> Any:
    given = {"mix_keys": False, "prepared_ids": 1, "prefix": "_txnbridge-", "namespace": Namespace("a", "b")}
    settings = SimpleNamespace(**given, pack=wire.Compression.NONE, timing=timing or Timing())
    client = SimpleNamespace(hang_up=lambda connection_key: None)
    return SimpleNamespace(**{"settings": settings, "events": Emitter("tests", ()), "client": client, **parts})


def asking(**requests: Any) -> Any:
    """A cluster with these requests to coordinators."""
    return cluster_with(client=SimpleNamespace(transactions=SimpleNamespace(**requests)))


def moved(*topics: str) -> list[Participant]:
    lost = wire.BrokerConnectionLost("it has moved")
    return [Participant(topic, None, Mock(lost=lost, generation=0), 0) for topic in topics]


def tells(last: tuple[int, int], acknowledged: tuple[int, int]) -> Any:
    """Answer with a topic's last message and a group's mark-delete position."""
    ids = [{"ledger_id": ledger, "entry_id": entry} for ledger, entry in (last, acknowledged)]
    return replies("get_last_message_id_response", last_message_id=ids[0], consumer_mark_delete_position=ids[1])


@pytest.fixture
def ready() -> PulsarWriter:
    """A writer that has sent all of its transaction."""
    do = dict.fromkeys(("settle", "ended", "wait_for_unload_notices", "add", "check", "forget"), lambda *_: None)
    owner: Any = SimpleNamespace(opening="o", **do)
    owner.end_delivery = owner.late_write_guard = owner
    found = PulsarWriter(cluster_with(), owner, "w")
    found.begin(Begin("app/host/1", Deadline(SOON), False, None))
    has_sent(found)
    return found


def has_sent(writer: PulsarWriter, committing: bool = False) -> None:
    """Let a writer be one that has sent all of its transaction."""
    writer._txn, writer.proof = TXN, PROOF_LOCATION
    writer._evidence = TokenEvidence(TXN, PROOF_LOCATION, committing)


def says(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, answer: object) -> None:
    """Let a function return `answer`, or raise it if it is an error."""
    if isinstance(answer, errors.TxnBridgeError):
        fail_call(monkeypatch, owner, name, answer, EACH)
    else:
        answer_calls(monkeypatch, owner, name, answer)


def answering(monkeypatch: pytest.MonkeyPatch, ended: EndResult, marker: bool | errors.TxnBridgeError | None) -> None:
    """The coordinator's answer to every end, and what the proof topic shows."""
    answer_calls(monkeypatch, writer, "end", ended)
    says(monkeypatch, outcome_module, "_committed_by_proof", marker)


@pytest.mark.parametrize("error", [errors.OutcomeUnknown("no answer"), KeyboardInterrupt()], ids=repr)
def test_the_evidence_of_a_commit_without_an_answer_is_kept(ready, monkeypatch, error):
    fail_call(monkeypatch, writer, "end", error, EACH)
    with pytest.raises(type(error)):
        ready.commit(Deadline(SOON))
    assert ready.unknown


DENIED, MISSING = errors.AccessDenied("the token has expired"), errors.NotFound("no such topic")


@pytest.mark.parametrize(
    ("call", "marker", "refused"),
    [
        *(("commit", error, True) for error in (DENIED, MISSING)),
        *(("abort", marker, marker is not False) for marker in (True, None, False, DENIED)),
    ],
    ids=repr,
)
def test_an_end_without_an_answer_is_known_only_if_the_marker_shows_it(monkeypatch, ready, call, marker, refused):
    """An abort comes behind a commit."""
    answering(monkeypatch, EndResult.UNCLEAR if call == "commit" else EndResult.BEFORE, marker)
    has_sent(ready, committing=call == "abort")
    with pytest.raises(errors.OutcomeUnknown) if refused else nullcontext():
        getattr(ready, call)(Deadline(SOON))


def test_an_entry_is_acknowledged_whole_once_known_commits_have_acknowledged_all_its_parts(monkeypatch, ready):
    def ended(peer: Peer, fields: dict[str, Any]) -> None:
        if "request_id" in fields:
            peer.say("ack_response", consumer_id=fields["consumer_id"], request_id=fields["request_id"])

    def end(*indexes: int, by: Callable[[Deadline], None], ended: EndResult) -> None:
        ready.begin(Begin("app/host/1", Deadline(SOON), False, None))
        has_sent(ready)
        partition._sizes[7, 3], partition._outstanding[7, 3] = 3, 0b111
        ready._acks = [context.acknowledge(TXN, {key: [(7, 3, index)]}, Deadline(SOON)) for index in indexes]
        answering(monkeypatch, ended, errors.OutcomeUnknown("no answer"))
        with suppress(errors.OutcomeUnknown):
            by(Deadline(SOON))

    with served(ack=ended) as (broker, client):
        full, key = "persistent://public/default/t", ("t", 0)
        consumer = client.subscribe(full, "group", timeout=SOON, type=wire.SubscriptionType.FAILOVER)
        partition = PulsarPartition(key, full, consumer, True, 100)
        partition.arrive(None, BEGIN)
        context = PulsarAckContext("group", False, {key: partition}, threading.Lock())
        end(0, 1, 2, by=ready.abort, ended=EndResult.ABORTED)
        end(0, 1, 2, by=ready.commit, ended=EndResult.UNCLEAR)
        for indexes in (0, 2), (1,), (1, 0, 2):
            end(*indexes, by=ready.commit, ended=EndResult.COMMITTED)
        acks = [frame.fields for frame in broker.wait_for("ack", 26)]
    whole = [at for at, ack in enumerate(acks) if not ack["message_id"][0].get("ack_set")]
    assert whole == [18, 25]  # each part takes two commands, one of them for the extra index
    assert all(acks[at]["message_id"][0]["entry_id"] == 3 and "txnid_least_bits" not in acks[at] for at in whole)


def test_a_token_without_room_for_its_topics_has_its_marker_topic_told(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_calls(monkeypatch, outcome_module, "end", EndResult.COMMITTED)
    everywhere = lambda *given: [*given[2].topics]  # noqa: E731
    told = answer_calls(monkeypatch, outcome_module, "deliver_everywhere", True, note=everywhere)
    token = Token("pulsar", "cluster", "app/host/1", TokenEvidence(TXN, PROOF_LOCATION).fields(), True)
    assert outcome_module.end_prepared(cluster_with(), token, True, Deadline(SOON)) is Outcome.COMMITTED
    assert told == [[PROOF_LOCATION.topic]]


@pytest.mark.parametrize(
    ("error", "known"),
    [(wire.BrokerConnectionLost("its broker is away"), False), (server_error(4, "superusers only"), True)],
)
def test_a_commit_is_known_only_when_brokers_could_be_asked_whether_it_has_arrived_everywhere(
    monkeypatch: pytest.MonkeyPatch, error: Exception, known: bool
) -> None:
    cluster = asking(end_on_partition=lambda *_: None, end_on_subscription=raising(error))
    participants = Participants(("topic",), (("topic", "group"),))
    token = Token("p", "c", "a/b/1", TokenEvidence(TXN, PROOF_LOCATION, True, participants).fields(), True)
    answer_calls(monkeypatch, outcome_module, "end", EndResult.COMMITTED)
    answer_calls(monkeypatch, outcome_module, "_committed_by_proof", True)
    with nullcontext() if known else pytest.raises(errors.OutcomeUnknown, match="Commit it again"):
        assert outcome_module.end_prepared(cluster, token, True, Deadline(SOON)) is Outcome.COMMITTED
    ended = AnnouncedTransaction("a/b/1", TXN, ("topic",), (("topic", "group"),), PROOF_LOCATION)
    assert outcome_module.confirm_by_proof(cluster, ended, Deadline(SOON)) is known


AWAY = errors.BrokerUnavailable("its broker is away")


@pytest.mark.parametrize(
    ("state", "told"),
    [("", True), ("", False), ("", AWAY), (AWAY, True)],
    ids=["told", "hidden", "marker away", "coordinator away"],
)
def test_a_slot_is_free_when_its_marker_tells_and_else_another_one_is_taken(monkeypatch, state, told):
    resolved: list[wire.TxnId] = []
    unclear: Any = SimpleNamespace(resolve=None)
    says(monkeypatch, prepared, "coordinator_state", state)
    says(monkeypatch, unclear, "resolve", told)
    slots = prepared.PreparedSlots(cluster_with(), 8, unclear, resolved.append)
    assert slots.take("id", Deadline(SOON)) == 0
    slots.keep(replace(over(TXN.least), slot=0, prepared=True))
    slots.release(0)
    is_free = (state, told) == ("", True)
    assert slots.take("id", Deadline(SOON)) == (0 if is_free else 1)
    assert resolved == ([TXN] if is_free else [])


def test_all_transactions_that_a_bridge_prepares_have_marker_topics_of_their_own(monkeypatch) -> None:
    """Also the first ones, of two threads at once, and one behind the bridge's first plain transaction."""
    both = threading.Barrier(2)
    answer_calls(monkeypatch, broker_module.PulsarBroker, "_load_coordinators")
    answer_calls(monkeypatch, broker_module, "cluster_id", "cluster")
    context: Any = SimpleNamespace(events=None, application="app", ledger=lambda *_: both.wait(SOON))
    bridge = broker_module.PulsarBroker(settings_for("pulsar://h/a/b"), context, Deadline(SOON))
    identity = Identity("w", owned=False, application="app", host="h")
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(bridge.prepare_writer, identity, NO_LEDGER, Deadline(SOON)) for _ in range(2)]
    context.ledger = lambda *_: NO_LEDGER
    bridge.open_writers(identity, 1, NO_LEDGER, Deadline(SOON))
    taken: list[Any] = [*(each.result() for each in asked), bridge.prepare_writer(identity, NO_LEDGER, Deadline(SOON))]
    bridge.close(Deadline(SOON))
    assert sorted(each.name for each in taken) == ["w.p0", "w.p1", "w.p2"]


def sending(monkeypatch: pytest.MonkeyPatch, presence: Mock, timing: Timing | None = None) -> tuple[Any, Mock]:
    """Let a writer send to a topic in a transaction that cannot be registered; return the call, and its client."""
    monkeypatch.setattr(writer, "write_presence", presence)
    answer_calls(monkeypatch, writer, "proof_topic", PROOF_LOCATION.topic)
    topics = SimpleNamespace(require=lambda topic, *_: (topic,), keep=lambda *_: None)
    client, owner = Mock(), Mock(opening="o")
    client.create_producer.return_value.lost = None
    client.transactions.register = raising(wire.BrokerConnectionLost("it is away"))
    owner.in_doubt.touching.return_value = []
    used = PulsarWriter(cluster_with(timing, topics=topics, client=client), owner, "w")

    def send(topic: str) -> None:
        used.begin(Begin("app/host/1", Deadline(SOON), False, None))
        used.send(topic, b"x", None, None, None, None)
        with pytest.raises(errors.BrokerUnavailable):
            used.flush(Deadline(SOON))

    return send, client


def test_a_presence_record_that_could_not_be_written_is_not_taken_for_written(monkeypatch) -> None:
    """The older one may be dropped by then, and with it the outcomes of transactions that rely on it."""
    presence = Mock(side_effect=[PROOF_LOCATION, AWAY, AWAY])
    send, _ = sending(monkeypatch, presence, Timing(transactions_per_presence=2))
    for _ in range(4):
        send("t")
    assert presence.call_count == 3  # for the first transaction, and for both that are too far from it


def test_a_writer_keeps_no_producer_on_every_topic_that_it_ever_sent_to(monkeypatch) -> None:
    monkeypatch.setattr(writer, "_MAX_IDLE_PRODUCERS", 3)
    send, client = sending(monkeypatch, Mock(return_value=PROOF_LOCATION))
    for number in range(8):
        send(f"t{number}")
    assert client.hang_up.call_count == 2


def test_rest_that_had_little_time_to_answer_is_asked_again_soon() -> None:
    rest = Mock(**{"get.side_effect": [errors.DeadlineExceeded("late"), RestRefused(404, "Subscription not found")]})
    registry = GroupRegistry(rest, Subscription(("t",), "group"), NO_LEDGER, Timing())
    registry.check("persistent://a/b/t", Deadline(0.01))
    time.sleep(0.3)  # no request is sent for ten times as long as it had
    with pytest.raises(errors.PositionLost):
        registry.check("persistent://a/b/t", Deadline(SOON))


def test_a_cluster_is_named_although_its_brokers_do_not_list_the_topic_for_that_yet(monkeypatch) -> None:
    answer_calls(monkeypatch, decision_log, "PulsarLog", MemoryLog())
    topics: Any = SimpleNamespace(all=lambda _: {})
    assert decision_log.cluster_id(settings_for("pulsar://h/a/b"), NO_CLIENT, topics, Deadline(SOON))


def test_no_late_write_is_refused_on_a_topic_with_a_transaction_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    def left(number: int, topic: str) -> AnnouncedTransaction:
        txn = wire.TxnId(0, number)
        proof = ProofLocation(f"marker-{number}", (1, 0), "n0nce")
        return AnnouncedTransaction(f"app/host/{number}", txn, (topic, proof.topic), (), proof)

    beside, unclear, elsewhere = left(1, "t"), left(2, "t"), left(3, "u")
    told = {beside.txn: True, unclear.txn: False, elsewhere.txn: True}
    answer_calls(monkeypatch, owner_module, "end", EndResult.BEFORE)
    answer_calls(monkeypatch, owner_module, "coordinator_state", "")
    monkeypatch.setattr(in_doubt, "confirm_by_proof", lambda _, ended, deadline: told[ended.txn])
    swept = answer_calls(monkeypatch, late_writes, "refuse_late_writes", True, note=lambda _, ended, deadline: ended)
    before = FenceRecord("older", "host", 0, (beside, unclear, elsewhere), fence_id="lineage")
    fence: Any = SimpleNamespace(take=lambda _: before, write=lambda *_: None)
    ledger: Any = SimpleNamespace(newest_opening=lambda _: ("older", {"lineage": "lineage"}))
    owner = PulsarOwner(cluster_with(), Identity("id", owned=False, application="app", host="h"), ledger)
    owner._open(fence, Deadline(SOON))
    assert swept == [elsewhere] and list(owner._under_way) == [unclear.txn]
    owner.require_no_doubt(["u"], Deadline(SOON))
    with pytest.raises(errors.BrokerUnavailable, match=f"repair {unclear.txn}"):
        owner.require_no_doubt(["t"], Deadline(SOON))
    told[unclear.txn] = True
    owner.require_no_doubt(["t"], Deadline(SOON))
    assert unclear in swept and not owner._under_way
    owner.late_write_guard.close(Deadline(SOON))


def test_an_end_is_sent_again_to_a_moved_topic_until_the_credentials_can_be_read() -> None:
    end = Mock(side_effect=[wire.NotAuthenticated(3, "the credentials could not be read"), None])
    end_delivery = EndDelivery(asking(end_on_partition=end))
    end_delivery.ended(TXN, True, moved("t"), Deadline(SOON))
    end_delivery.settle({"t"}, Deadline(SOON))
    end_delivery.close(Deadline(SOON))
    assert end.call_count == 2


def test_a_group_that_has_missed_a_commit_is_told_of_it_although_its_member_is_closed_meanwhile(monkeypatch) -> None:
    monkeypatch.setattr(EndDelivery, "watch", lambda _: None)
    end = Mock(side_effect=[wire.BrokerConnectionLost("it is still away"), None])
    cluster = asking(end_on_subscription=end)
    end_delivery = EndDelivery(cluster)
    with served() as (broker, client):
        consumer = client.subscribe("t", "s", timeout=SOON)
        used = Participant("t", "s", consumer, consumer.generation)
        (opened,) = broker.wait_for("subscribe")
        broker.peers[0].say("close_consumer", consumer_id=opened.fields["consumer_id"], request_id=2**64 - 1)
        wait_until(lambda: consumer.lost)
        end_delivery.ended(TXN, True, [used], Deadline(SOON))
        for _ in range(2):
            consumer.close(SOON)
        never_lost = client.subscribe("u", "s", timeout=SOON)
        never_lost.close(SOON)
        end_delivery.ended(TXN, True, [Participant("u", "s", never_lost, never_lost.generation)], Deadline(SOON))
        end_delivery.close(Deadline(SOON))
    assert [given.args[1] for given in end.call_args_list] == ["t", "t"]


def test_a_member_that_is_closed_right_after_a_commit_learns_that_its_topic_is_unloaded() -> None:
    with member_of([1], set(), "group", timing=Timing(unload_notice_seconds=1)) as (member, _, ((peer, id),)):
        used = Participant("t", "group", consumer := member.partition("t").consumer, consumer.generation)
        notice = threading.Timer(0.1, lambda: peer.say("close_consumer", consumer_id=id, request_id=2**64 - 1))
        notice.start()
        member.reader.close(Deadline(SOON))
        notice.join()
        assert used.has_moved


def test_the_thread_that_sends_ends_again_goes_on_after_moments_in_which_no_thread_can_be_started(monkeypatch) -> None:
    """The first end, which is certain, cannot start it, the next one can; then it starts no other ones at first."""
    away = repeat(wire.BrokerConnectionLost("it is still away"), 4)
    end, used = Mock(side_effect=chain(away, repeat(None))), moved("t", "u")
    end_delivery = EndDelivery(asking(end_on_partition=end))
    failed = fail_call(monkeypatch, threading.Thread, "start", RuntimeError("can't start new thread"), (0, 2))
    for _ in range(2):
        end_delivery.ended(TXN, True, used, Deadline(SOON))
    wait_until(lambda: end.call_count == 8)
    assert len(failed) == 2
    end_delivery.close(Deadline(SOON))


def test_an_anchor_that_was_used_before_ends_also_after_a_begin_that_failed() -> None:
    begin, send_abort = Mock(side_effect=[wire.TxnId(0, 6), TXN]), Mock()
    cluster = asking(begin=begin, send_abort=send_abort)
    owner = PulsarOwner(cluster, Identity("w", owned=False, application="app", host="h"), NO_LEDGER)
    owner.forget(owner.new_transaction(lambda: 30, Deadline(SOON)))
    hold = Hold(raising(wire.NotAllowed(22, "no")))
    begin.side_effect = hold
    with pytest.raises(errors.NotSupported), hold.asked_by(lambda: owner.new_transaction(lambda: 30, Deadline(SOON))):
        wait_until(lambda: "txnbridge-pulsar-confirm" not in [thread.name for thread in threading.enumerate()])
    wait_until(lambda: send_abort.called)


def test_closing_ends_no_anchor_of_a_commit_that_another_thread_still_delivers() -> None:
    begin, send_abort = Mock(side_effect=[wire.TxnId(0, 6), TXN]), Mock()
    hold = Hold(raising(wire.BrokerConnectionLost("it is still away")))
    cluster = asking(begin=begin, send_abort=send_abort, end_on_partition=hold)
    anchors = Anchors(cluster)
    end_delivery, used = EndDelivery(cluster, anchors), moved("t")
    anchors.ended(anchors.begin(lambda: 30, 1))
    with hold.asked_by(lambda: end_delivery.ended(TXN, True, used, Deadline(SOON))):
        end_delivery.close(Deadline(0))
    assert not send_abort.called


def test_an_exception_of_a_signal_handler_lets_no_later_transaction_wait_for_an_end_that_nobody_sends(monkeypatch):
    monkeypatch.setattr(EndDelivery, "watch", lambda _: None)
    end, used = Mock(), moved("t")
    end_delivery = EndDelivery(asking(end_on_partition=end))

    def end_one() -> None:
        end_delivery.ended(TXN, True, used, Deadline(SOON))

    def settle() -> None:
        end_delivery.settle({"t"}, deadline := Deadline(5))
        assert not deadline.expired

    assert interrupted_everywhere(end_one, settle, ["end_delivery.py"])
    this = get_ident()
    for number in range(9):  # also as it takes the lock
        with monkeypatch.context() as patch, suppress(Interrupted):
            fail_call(patch, threading.Condition, "__enter__", Interrupted, number, when=lambda *_: get_ident() == this)
            end_one()
        settle()


def test_an_end_that_comes_while_another_thread_gives_earlier_ones_up_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EndDelivery, "watch", lambda _: None)
    monkeypatch.setattr(EndDelivery, "_give_up", hold := Hold(Mock()))
    end = Mock(side_effect=[wire.NotAllowed(22, "no"), None])
    end_delivery = EndDelivery(asking(end_on_partition=end))
    used = moved("t")
    with ThreadPoolExecutor(1) as pool:
        with hold.asked_by(lambda: end_delivery.ended(TXN, True, used, Deadline(SOON))):
            later = pool.submit(end_delivery.ended, wire.TxnId(0, 9), True, used, Deadline(SOON))
            time.sleep(0.3)  # until it waits for the other thread
        later.result(SOON)
    assert end.call_count == 2


@pytest.mark.parametrize("text", [b'{"v": 1, "k": "here", "e": Infinity}', b"[" * 100_000], ids=["infinite", "deep"])
def test_a_record_of_a_stranger_is_no_record(text: bytes) -> None:
    assert ProofRecord.unpack(text) is None
    with pytest.raises(errors.EvidenceLost):
        FenceRecord.unpack(text)


def announcing(**parts: Any) -> tuple[PulsarOwner, list[FenceRecord]]:
    """An owner whose records have room for a few topics, and what it writes."""
    written: list[FenceRecord] = []
    cluster = cluster_with(Timing(max_fence_record_bytes=1000), **parts)
    owner = PulsarOwner(cluster, Identity("id", owned=True, application="app", host="h"), NO_LEDGER)
    fence: Any = SimpleNamespace(write=lambda make, _: written.append(make()))
    owner._fence = fence
    return owner, written


def over(number: int, *topics: str) -> AnnouncedTransaction:
    return AnnouncedTransaction(
        f"app/host/{number}", wire.TxnId(0, number), (*topics, PROOF_LOCATION.topic), (), PROOF_LOCATION
    )


def test_a_transaction_too_large_for_one_record_is_not_announced_and_disturbs_no_other(monkeypatch) -> None:
    owner, written = announcing()
    many = [f"persistent://public/default/topic-{number}" for number in range(100)]
    first, second = over(1, "t"), over(2, "t")
    owner.announce(first, Deadline(SOON))
    for too_much in (over(3, *many), over(1, *many)):
        with pytest.raises(errors.DeliveryFailed, match="fewer topics"):
            owner.announce(too_much, Deadline(SOON))
    owner.announce(second, Deadline(SOON))
    answer_calls(monkeypatch, TransactionProducer, "ready")
    has_sent(found := PulsarWriter(cluster_with(), owner, "w"))
    found._announced, found._registered = {PROOF_LOCATION.topic: None}, {PROOF_LOCATION.topic}
    with pytest.raises(errors.DeliveryFailed):
        found._register(many, (), Deadline(SOON))
    assert list(found._announced) == [PROOF_LOCATION.topic]
    assert [list(record.under_way) for record in written] == [[first], [first, second]]


def test_a_fence_record_names_no_anchor_of_a_prepared_transaction_for_the_next_owner_to_end() -> None:
    """Who ends the transaction by its token needs the anchor until then, also after the death of this owner."""
    announced, anchor = over(8, "t"), wire.TxnId(0, 7)
    begin = Mock(side_effect=[anchor, announced.txn])
    owner, written = announcing(client=SimpleNamespace(transactions=SimpleNamespace(begin=begin)))
    owner.new_transaction(lambda: 30, Deadline(SOON), alone=True)
    for prepared_now in (False, True):
        owner.announce(replace(announced, prepared=prepared_now), Deadline(SOON))
    assert [list(record.anchors) for record in written] == [[anchor], []]


def test_a_fence_record_names_commits_that_topics_have_missed_for_the_next_owner_to_deliver() -> None:
    end = raising(wire.BrokerConnectionLost("it is still away"))
    owner, written = announcing(client=SimpleNamespace(transactions=SimpleNamespace(end_on_partition=end)))
    missed, told = over(1, "t"), over(2, "t")
    for ended, topic in (missed, "t"), (told, PROOF_LOCATION.topic):
        used = moved(topic)
        owner.end_delivery.ended(ended.txn, True, used, Deadline(SOON), ended)
        owner.forget(ended.txn)
    owner.announce(over(3, "u"), Deadline(SOON))
    assert [set(record.under_way) for record in written] == [{missed, over(3, "u")}]
    owner.end_delivery.close(Deadline(0))


@pytest.mark.parametrize("refusal", [None, "it is still away", "not a superuser"])
def test_closing_a_bridge_without_an_id_keeps_the_proof_of_a_commit_that_a_topic_missed(monkeypatch, caplog, refusal):
    """By it a waiting reader frees the topic, or an administrator, before another transaction drops the messages."""
    away, denied = wire.BrokerConnectionLost("it is still away"), wire.NotAuthorized(4, "not a superuser")
    end = Mock(side_effect={None: None, "it is still away": away, "not a superuser": denied}[refusal])
    cluster = asking(end_on_partition=end)
    owner = PulsarOwner(cluster, Identity("w", owned=False, application="app", host="h"), NO_LEDGER)
    removed = answer_calls(monkeypatch, owner_module, "remove", note=lambda _, topic, __: topic)
    (used,) = owner.open_writers(1, Deadline(SOON))
    assert isinstance(used, PulsarWriter)
    used.proof = PROOF_LOCATION
    for txn, commit in (wire.TxnId(0, 6), False), (TXN, True):
        owner.end_delivery.ended(txn, commit, moved("t"), Deadline(SOON), over(1, "t"))
    owner.close(Deadline(0.1))
    assert removed == ([] if refusal else [PROOF_LOCATION.topic])
    told = [each.message for each in caplog.records if each.levelname == "ERROR"]
    assert [f"committed: {TXN}" in each and "repair" in each for each in told] == [True] * bool(refusal)


def test_a_fence_topic_that_cannot_be_taken_leaves_no_connection() -> None:
    hung_up: list[str] = []
    client = SimpleNamespace(create_producer=raising(wire.NotAuthorized(4, "no")), hang_up=hung_up.append)
    fence = Fence(cluster_with(topics=SimpleNamespace(internal=lambda *_: "t"), client=client), "id", "opening")
    with pytest.raises(errors.AccessDenied):
        fence.take(Deadline(SOON))
    fence.close(Deadline(SOON))
    assert hung_up == ["fence opening"]


def test_an_owner_whose_lost_connection_a_broker_still_counts_as_open_is_not_fenced(monkeypatch) -> None:
    """Only the broker's end of the first connection is missing: its exclusive producer is the owner's own."""
    holder: list[str] = []
    stored: list[int] = []

    def open_producer(peer: Peer, fields: dict[str, Any]) -> None:
        name = fields.get("producer_name") or f"given-{len(broker.wait_for('producer'))}"
        if holder and fields["producer_access_mode"] == wire.AccessMode.EXCLUSIVE:
            text = f"Topic has an existing exclusive producer: {holder[0]}"
            peer.answer(fields, "error", error=25, message=text)
            return
        holder[:] = [name]
        peer.answer(fields, "producer_success", producer_name=name, last_sequence_id=-1, topic_epoch=1)

    def close_producer(peer: Peer, fields: dict[str, Any]) -> None:
        holder.clear()
        peer.answer(fields, "success")

    def store(peer: Peer, fields: dict[str, Any]) -> None:
        stored.append(fields["sequence_id"])
        id = {"ledger_id": 1, "entry_id": len(stored)}
        peer.say("send_receipt", producer_id=fields["producer_id"], sequence_id=stored[-1], message_id=id)

    with served() as (broker, client):
        broker.handlers.update(producer=open_producer, close_producer=close_producer, send=store)
        topics = SimpleNamespace(internal=lambda *_: "t", trim=lambda *_: None)
        fence = Fence(cluster_with(topics=topics, client=client), "id", "opening")
        record = FenceRecord("opening", "host", 1)
        answer_calls(monkeypatch, fence_module, "last_fence_record", (wire.MessageId(1, 0), record))
        fence.take(Deadline(SOON))
        fence.write(lambda: record, Deadline(SOON))
        client.hang_up("fence opening")
        fence.write(lambda: record, Deadline(SOON))
        modes = [frame.fields["producer_access_mode"] for frame in broker.wait_for("producer")]
        fence.close(Deadline(SOON))
    assert modes == [3, 1, 1, 3] and len(stored) == 2


def test_a_record_that_its_thread_notes_behind_a_newer_one_fences_nobody(monkeypatch) -> None:
    """Between the two records the connection was lost, and with it the record of sequence id 1."""

    def newer_one_first(_: float) -> wire.Receipt:
        fence.write(lambda: record, Deadline(SOON))
        return wire.Receipt(0, wire.MessageId(1, 5))

    results = iter([newer_one_first, lambda _: wire.Receipt(2, wire.MessageId(1, 6))])
    send = lambda *_, **__: SimpleNamespace(result=next(results))  # noqa: E731
    client = SimpleNamespace(create_producer=lambda *_, **__: SimpleNamespace(send=send, close=lambda _: None))
    fence = Fence(cluster_with(topics=Mock(), client=client), "id", "opening")
    record = FenceRecord("opening", "host", 1)
    answer_calls(monkeypatch, fence_module, "last_fence_record", (wire.MessageId(1, 4), record))
    fence.take(Deadline(SOON))
    fence.write(lambda: record, Deadline(SOON))


def test_an_entry_whose_sending_was_interrupted_counts_as_under_way() -> None:
    client = SimpleNamespace(create_producer=lambda *_, **__: SimpleNamespace(send=raising(KeyboardInterrupt)))
    receipts = PendingReceipts()
    with pytest.raises(KeyboardInterrupt):
        TransactionProducer(cluster_with(client=client), "t", "").send(wire.Single(b""), TXN, receipts, Deadline(SOON))
    assert not receipts.settled


def test_an_entry_that_is_refused_before_the_connection_is_lost_once_more_is_not_taken_for_stored(monkeypatch) -> None:
    """Two entries are sent again after a loss; the broker refuses the first, and is gone before the second."""
    written: list[bytes] = []

    def take(peer: Peer, fields: dict[str, Any]) -> None:
        answer = {"producer_id": fields["producer_id"], "sequence_id": fields["sequence_id"]}
        if len(broker.peers) == 1 and fields["sequence_id"] == 1:
            peer.hang_up()
        elif len(broker.peers) == 2 and fields["sequence_id"] == 0:
            peer.say("send_error", **answer, error=22, message="no")
            peer.say("ping")
        elif len(broker.peers) == 2:
            peer.say("send_receipt", **answer, message_id={"ledger_id": 1, "entry_id": 0})

    def write(call: Any, connection: Any, frame: bytes, deadline: Any) -> None:
        written.append(frame)
        if len(written) == 4:
            broker.wait_for("pong")
            raise wire.BrokerConnectionLost("it broke")
        call(connection, frame, deadline)

    replace_method(monkeypatch, BrokerConnection, "write", write)
    with served(send=take) as (broker, client):
        topics = SimpleNamespace(deduplicates=lambda *_: True)
        producer, receipts = TransactionProducer(cluster_with(client=client, topics=topics), "t", ""), PendingReceipts()
        for value in b"0", b"1":
            producer.send(wire.Single(value), TXN, receipts, Deadline(SOON))
        assert receipts.wait(Deadline(SOON)) and producer in receipts.lost
        assert producer.recover(receipts, Deadline(SOON)) and receipts.wait(Deadline(SOON))
    assert written[1] == written[3] == written[4] and receipts.settled
    assert isinstance(receipts.failure, wire.NotAllowed)


def test_messages_whose_acknowledgement_was_interrupted_come_again_after_the_abort() -> None:
    partition = partition_of(start_acknowledge=raising(KeyboardInterrupt))
    partition.arrive(None, BEGIN)
    context = PulsarAckContext("group", False, {("t", 0): partition}, threading.Lock())

    def delivered() -> list[Any]:
        given = {"left_out": 0, "arrival": 1, "metadata": {}, "parts": ()}
        entry: Any = SimpleNamespace(**vars(entry_at(1)), **given, records=lambda: [(0, b"", {})])
        partition.put(entry)
        return partition.take(1)[0]

    (message,) = delivered()
    with pytest.raises(KeyboardInterrupt):
        context.acknowledge(TXN, {("t", 0): [message.position]}, Deadline(SOON))
    assert [each.position for each in delivered()] == [message.position]


def test_a_writer_that_hangs_up_leaves_the_room_of_its_lost_entries_to_others() -> None:
    with served(room=1000) as (_, client):
        dropped = PulsarWriter(cluster_with(client=client), Mock(opening="o"), "w")
        dropped._producer("t").send(wire.Single(bytes(900)), TXN, PendingReceipts(), Deadline(SOON))
        dropped.close()
        client.create_producer("u", timeout=SOON).send(wire.Single(bytes(900)), timeout=1)


def test_the_wait_of_a_transaction_for_its_coordinator_is_taken_from_its_time() -> None:
    anchor = wire.TxnId(TXN.most, TXN.least - 1)
    begin, send_abort = Mock(side_effect=[anchor, wire.RequestTimedOut("no answer"), TXN]), Mock()
    cluster = asking(begin=begin, send_abort=send_abort)
    owner = PulsarOwner(cluster, Identity("w", owned=False, application="app", host="h"), NO_LEDGER)
    left = iter([31.0, 30.0, 27.0])
    assert owner.new_transaction(lambda: next(left), Deadline(SOON)) == TXN
    assert [call.args[0] for call in begin.call_args_list][1:] == [30_000, 27_000]
    assert send_abort.call_args.args[0] == anchor  # there may be room for one


def test_a_transaction_begins_at_another_coordinator_while_the_broker_of_one_is_away() -> None:
    """Each transaction has some seconds for its begin, and asks one coordinator after the other in these."""

    def lookup(peer: Peer, fields: dict[str, Any]) -> None:
        if fields["topic"].endswith("-0"):
            peer.answer(fields, "lookup_response", response=2, error=6, message="no broker")
        else:
            found(peer, fields)

    def begin(peer: Peer, fields: dict[str, Any]) -> None:
        peer.answer(fields, "new_txn_response", txnid_most_bits=fields["tc_id"], txnid_least_bits=7)

    count, connects = replies("partition_metadata_response", partitions=2), replies("tc_client_connect_response")
    with served(partition_metadata=count, tc_client_connect_request=connects, new_txn=begin) as (broker, client):
        found, broker.handlers["lookup"] = broker.handlers["lookup"], lookup
        assert [client.transactions.begin(1000, SOON / 10).most for _ in range(4)] == [1, 1, 1, 1]


def late_write_guard() -> tuple[LateWriteGuard, AnnouncedTransaction]:
    end_delivery: Any = SimpleNamespace(settle=lambda *_: None)
    return LateWriteGuard(cluster_with(), end_delivery, InDoubt(cluster_with())), over(TXN.least)


def test_late_writes_are_refused_although_a_machine_starts_no_more_threads_for_a_while(monkeypatch) -> None:
    monkeypatch.setattr(late_writes, "refuse_late_writes", Mock(side_effect=[*2 * [RuntimeError("no thread")], True]))
    guard, ended = late_write_guard()
    guard.add(ended, Deadline(SOON))
    wait_until(lambda: not guard.at_risk)


def test_closing_the_late_write_guard_waits_no_longer_than_its_deadline(monkeypatch) -> None:
    """Its broker has stopped answering; and its thread could not be started at first."""
    answer, asked = threading.Event(), list[object]()

    def refuse(*given: object) -> bool:
        asked.append(given)
        return len(asked) > 2 and answer.wait(SOON)

    monkeypatch.setattr(late_writes, "refuse_late_writes", refuse)
    fail_call(monkeypatch, threading.Thread, "start", RuntimeError("can't start new thread"))
    guard, ended = late_write_guard()
    with pytest.raises(RuntimeError):
        guard.add(ended, Deadline(SOON))
    guard.add(ended, Deadline(SOON))
    wait_until(lambda: len(asked) == 3)
    started = time.monotonic()
    guard.close(Deadline(0.5))
    assert time.monotonic() - started < 8  # its thread would take 10 seconds
    answer.set()


def publisher_where(
    deduplicates: Any, last: int = -1, ledger: Any = None, failing: int | None = None
) -> tuple[PulsarPublisher, list[int]]:
    """A named publisher on a topic of one partition, and the sequences that it sends.

    The broker has received one more than the `last` one, and fails to store it.
    """
    ledger = Kept() if ledger is None else ledger
    sent: list[int] = []

    def send(message: Any, sequence_id: int, timeout: float, when_done: Callable[[wire.Send], None]) -> None:
        sent.append(sequence_id)
        if sequence_id == failing:
            (refused := wire.Send(0, sequence_id, 1, None, b"")).resolve(wire.PerhapsDropped())
            when_done(refused)

    parts: dict[str, Any] = {"lost": None, "unconfirmed": [], "send": send, "close": lambda _: None}
    producer = SimpleNamespace(last_sequence_id=last if last < 0 else last + 1, **parts)
    fails = lambda *_: setattr(producer, "last_sequence_id", last)  # noqa: E731
    found = dict.fromkeys(("concrete", "require"), lambda *_: ["t-partition-0"])
    topics = SimpleNamespace(**found, deduplicates=deduplicates, wait_for_writes=fails)
    client = SimpleNamespace(create_producer=lambda *_, **__: producer)
    return PulsarPublisher(cluster_with(id="cluster", topics=topics, client=client), "name", lambda _: ledger), sent


def send_one(publisher: PulsarPublisher, sequence: int | None) -> None:
    publisher.send("t", b"x", None, None, None, None, sequence, Deadline(SOON))


def fails_at_first() -> Mock:
    """Return whether brokers remove duplicates, of which the first call fails."""
    return Mock(side_effect=chain([errors.BrokerUnavailable("REST does not answer")], repeat(True)))


def test_a_publisher_goes_on_from_the_stored_sequence_although_its_first_look_failed() -> None:
    ledger = Kept(stored=2)
    publisher, sent = publisher_where(fails_at_first(), 4, ledger)
    with pytest.raises(errors.BrokerUnavailable):
        send_one(publisher, 3)
    for number in range(6):
        send_one(publisher, number)
    assert sent == [5] and ledger.newest[1] == {"stored": 4}


@pytest.mark.parametrize(
    ("kept", "last", "error", "text"),
    [
        (False, -1, errors.NotSupported, "no sequences"),
        (True, -1, errors.EvidenceLost, "another name"),
        (True, 3, errors.EvidenceLost, "another name"),
    ],
    ids=["not kept", "forgotten", "partly forgotten"],
)
def test_where_sequences_are_not_kept_or_forgotten_every_call_says_so(kept, last, error, text) -> None:
    publisher, sent = publisher_where(lambda *_: kept, last, Kept(stored=4))
    for call in 2 * (partial(send_one, publisher, 0), partial(publisher.last_sequence, "t", Deadline(SOON))):
        with pytest.raises(error, match=text):
            call()
    assert not sent


@pytest.mark.parametrize(("last", "resent"), [(4, [5]), (5, None), (6, None)])
def test_a_publisher_goes_on_at_a_failed_sequence_only_if_no_later_one_may_be_stored(
    last: int, resent: list[int] | None
) -> None:
    ledger = Kept(stored=4)
    first, _ = publisher_where(lambda *_: True, 4, ledger, failing=5)
    send_one(first, 5)
    with pytest.raises(errors.DeliveryFailed):
        send_one(first, 6)
    second, sent = publisher_where(lambda *_: True, last, ledger)
    with nullcontext() if resent else pytest.raises(errors.EvidenceLost, match="could not store 5"):
        send_one(second, 5)
    assert (sent, "failed" in ledger.newest[1]) == ((resent, False) if resent else ([], True))


@pytest.mark.parametrize("error", [errors.DeadlineExceeded("it is away"), errors.AccessDenied("no")], ids=repr)
def test_a_log_that_cannot_be_written_is_tried_once_and_fails_no_publisher(caplog, error) -> None:
    denied = isinstance(error, errors.AccessDenied)
    ledger = Mock(
        **{"newest_opening.side_effect": repeat(error if denied else None), "open_behind.side_effect": [error]}
    )
    publisher, sent = publisher_where(lambda *_: True, 4, ledger)
    for number in (5, 6):
        send_one(publisher, number)
    assert sent == [5, 6] and [call.args[1] for call in ledger.open_behind.call_args_list] == [{"stored": 4}][denied:]
    assert ("it will not be noticed if the broker forgets" in caplog.text) is denied


@pytest.mark.parametrize("again", ["flush", "send"])
def test_messages_on_their_way_are_sent_again_also_after_a_call_that_failed_meanwhile(again: str) -> None:
    came: list[int] = []
    senders: list[Peer] = []

    def take(peer: Peer, fields: dict[str, Any]) -> None:
        senders.append(peer)
        if peer is senders[0]:
            peer.hang_up()
            return
        came.append(fields["sequence_id"])
        id = {"ledger_id": 1, "entry_id": len(came)}
        peer.say("send_receipt", producer_id=fields["producer_id"], sequence_id=came[-1], message_id=id)

    with served(send=take) as (broker, client):
        topics = SimpleNamespace(require=lambda *_: ["persistent://a/b/t"], deduplicates=fails_at_first())
        publisher = PulsarPublisher(cluster_with(topics=topics, client=client), None, NO_LEDGER)
        send_one(publisher, None)
        with pytest.raises(errors.BrokerUnavailable, match="REST"):
            publisher.flush(Deadline(SOON))
        if again == "send":
            send_one(publisher, None)
        publisher.flush(Deadline(SOON))
        assert len(broker.wait_for("producer")) == 2
    assert came == ([0, 1] if again == "send" else [0])


def test_a_refusal_is_heard_also_of_a_message_that_did_not_go_out_in_time() -> None:
    read_on = threading.Event()

    def take(peer: Peer, fields: dict[str, Any]) -> None:
        read_on.wait(SOON)  # it reads nothing meanwhile
        if fields["sequence_id"] == 0:
            id = {"ledger_id": 1, "entry_id": 1}
            peer.say("send_receipt", producer_id=fields["producer_id"], sequence_id=0, message_id=id)
        else:
            peer.say("send_error", producer_id=fields["producer_id"], sequence_id=1, error=22, message="no")

    with served(connect=partial(connected, largest=1 << 24), send=take) as (broker, client):
        topics = SimpleNamespace(require=lambda *_: ["persistent://a/b/t"])
        publisher = PulsarPublisher(cluster_with(topics=topics, client=client), None, NO_LEDGER)
        send_one(publisher, None)
        broker.wait_for("send")
        publisher.send("t", bytes(12_000_000), None, None, None, None, None, Deadline(0.5))
        read_on.set()
        with pytest.raises(errors.DeliveryFailed):
            publisher.flush(Deadline(SOON))


def test_the_doctor_tells_of_brokers_that_evict_what_is_not_acknowledged() -> None:
    told = {"backlogQuotaDefaultRetentionPolicy": "consumer_backlog_eviction", "backlogQuotaDefaultLimitGB": "10"}
    rest: Any = SimpleNamespace(get=lambda *_: told)

    def found() -> list[str]:
        return [each.text for each in doctor.check_settings(rest, Deadline(SOON)) if each.level == "problem"]

    assert len(found()) == 1 and "backlog quota" in found()[0]
    told["backlogQuotaDefaultLimitGB"] = "-1"
    assert not found()


def test_the_end_of_a_topic_is_not_told_too_early_while_a_broker_refuses_to_tell_it() -> None:
    read = Mock(**{"return_value.progress.return_value": (wire.MessageId(1, 2), None)})
    told = [RestRefused(503, "the broker is starting"), RestRefused(404, ""), {"maxReadPosition": "1:7"}]
    cluster = cluster_with(topics=Mock(), client=SimpleNamespace(read=read), rest=Mock(**{"get.side_effect": told}))
    cluster.topics.existing.return_value = ("t",)
    found = PulsarAdmin(cluster)
    with pytest.raises(errors.BrokerUnavailable, match="the broker is starting"):
        found.bounds(["t"], Deadline(SOON))
    assert [found.bounds(["t"], Deadline(SOON))["t", 0][1] for _ in told[1:]] == [(1, 3, 0), (1, 8, 0)]


@pytest.mark.parametrize("states", [["Initializing"], ["Error"], ["Initializing", "Ready"], ["Ready"]])
def test_the_doctor_tells_of_a_group_whose_store_never_opens(states: list[str]) -> None:
    told = iter(states)

    def answer(path: str, _: Deadline) -> Any:
        if path.endswith("/stats"):
            return {"subscriptions": {"billing/eu": {"durable": True}, "reader": {"durable": False}}}
        assert path == "/admin/v3/transactions/pendingAckStats/public/default/orders/billing%2Feu"
        return {"state": next(told, states[-1])}

    topics = SimpleNamespace(existing=lambda *_: ("persistent://public/default/orders",))
    cluster = cluster_with(Timing(store_opening_seconds=0.5), topics=topics, rest=SimpleNamespace(get=answer))
    found = list(doctor.check_stores(cluster, [TopicInfo("orders", 1)], Deadline(SOON)))
    assert [(each.level, each.subject) for each in found] == (
        [("problem", "group billing/eu")] if len(states) == 1 and states != ["Ready"] else []
    )


def entry_at(number: int, batch: int = 1) -> Any:
    id = wire.MessageId(7, number)
    none = {"is_batch": False, "redeliveries": 0, "chunk": None, "comes_again": False}
    return SimpleNamespace(id=id, size=1, count=batch, permits=1, publish_time=1, **none)


def partition_of(grouped: bool = True, **consumer: Any) -> PulsarPartition:
    part: Any = SimpleNamespace(**{"generation": 1, "activations": 1, **consumer})
    return PulsarPartition(("t", 0), "t", part, grouped, 100)


def arrives(partition: PulsarPartition, *numbers: int) -> bool:
    """Whether the reader keeps all of these entries: else the last one is dropped, and everything redelivered."""
    for number in numbers:
        if partition.misses_entries_before(entry_at(number)):
            assert number == numbers[-1]
            return False
        partition.put(entry_at(number))
    return True


def redelivers(partition: PulsarPartition, *dropped: int) -> None:
    partition.expect_again()
    partition.drop()
    partition.expect_again(wire.MessageId(7, number) for number in dropped)


def test_a_redelivery_that_skips_entries_is_repeated_until_they_cannot_be_there_any_more() -> None:
    partition = partition_of()
    assert arrives(partition, 1, 2)
    partition._outstanding[7, 0] = 1
    redelivers(partition, 3)
    assert not arrives(partition, 0, 2)
    for _ in range(4):  # another member has acknowledged entry 1
        redelivers(partition)
        assert not arrives(partition, 0, 2)
    redelivers(partition)
    assert arrives(partition, 0, 2, 4)


def test_a_partition_of_a_shared_group_is_silent_if_no_entry_comes_for_a_while(monkeypatch) -> None:
    consumer: Any = (partition := partition_of(arrived=0)).consumer
    assert not partition.is_silent() and not partition.is_silent()
    monkeypatch.setattr(partition_module, "_SILENCE_SECONDS", 0)
    assert arrives(partition, 1)
    assert not partition.is_silent() and partition.is_silent()
    consumer.generation += 1
    assert not partition.is_silent() and partition.is_silent()
    consumer.arrived += 1  # a chunk of a message that takes long to arrive whole, or one that comes again
    assert not partition.is_silent() and partition.is_silent()


def test_entries_that_a_broker_skips_after_it_went_back_unasked_are_missed() -> None:
    """A broker goes back by itself whenever a transaction of the group aborts."""
    partition = partition_of()
    assert arrives(partition, 1, 2, 3, 4)
    assert not arrives(partition, 1, 2, 9)
    redelivers(partition)
    assert arrives(partition, 1, 2, 3, 4, 9)


def unreadable(number: int, publish_time: int) -> Any:
    broken = raising(wire.CorruptEntry("broken"))
    changed = {"publish_time": publish_time, "messages": broken, "records": broken}
    return SimpleNamespace(**{**vars(entry_at(number)), **changed})


def test_an_unreadable_entry_from_before_the_time_at_which_a_group_begins_does_not_stop_it() -> None:
    sought: list[wire.MessageId] = []
    consumer = SimpleNamespace(
        progress=lambda _: (wire.MessageId(7, 2), None),
        receive=lambda _: [unreadable(1, 50), unreadable(2, 150)],
        seek=lambda position, _: sought.append(position),
        close=lambda _: None,
    )
    client: Any = SimpleNamespace(subscribe=lambda *_, **__: consumer)
    mode = mode_of(client, Subscription(("t",), "group", start=100), wire.Inbox(), "")
    mode.open("t", True, Deadline(SOON))
    assert sought == [wire.MessageId(7, 2)]


@pytest.mark.parametrize(("published", "elsewhere"), [(50, False), (150, False), (50, True)])
def test_a_reader_that_seeks_a_time_fails_only_at_unreadable_entries_from_then_on(published, elsewhere) -> None:
    """It skips none once its partition was elsewhere."""
    partition = partition_of(grouped=elsewhere)
    partition.since = 100, (9, 0, 0)
    if elsewhere:
        partition.leave()
        partition.arrive(None, BEGIN)
    partition.put(unreadable(1, published))
    assert partition.take(1) == ([], 0) and (partition.fault is None) == (published < 100 and not elsewhere)


@contextmanager
def member_of(
    partitions: list[int], broken: set[int], group: str | None, **given: Any
) -> Iterator[tuple[Member, FakeBroker, Any]]:
    """A reader of so many partitions, of which the broken ones cannot be opened; and those that it has opened."""
    made: list[tuple[Peer, int]] = []

    def count(peer: Peer, fields: dict[str, Any]) -> None:
        peer.answer(fields, "partition_metadata_response", partitions=partitions[0])

    def subscribe(peer: Peer, fields: dict[str, Any]) -> None:
        if int(fields["topic"][-1]) in broken:
            peer.answer(fields, "error", error=2, message="its ledger cannot be read")
        else:
            peer.answer(fields, "success")
            peer.say("active_consumer_change", consumer_id=fields["consumer_id"], is_active=True)
            made.append((peer, fields["consumer_id"]))

    last = replies("get_last_message_id_response", last_message_id={"ledger_id": 1, "entry_id": 0})
    with fake_broker(partition_metadata=count, get_last_message_id=last) as broker:
        owns_everything(broker)
        broker.handlers["subscribe"] = subscribe
        member = Member(f"{broker.url}/public/default", "t", group, **given)
        wait_until(lambda: len(made) == len({*range(partitions[0])} - broken))  # entries come behind the activation
        yield member, broker, made
        member.leave()


@pytest.mark.parametrize("seconds", [0.5, 3])
def test_a_partition_whose_broker_stays_away_does_not_keep_another_one_from_coming_back(monkeypatch, seconds) -> None:
    monkeypatch.setattr(reader_module, "_REOPEN_SECONDS", seconds)
    broken: set[int] = set()
    with member_of([2], broken, None) as (member, _, made):
        partitions = member.reader._partitions
        broken.add(next(number for _, number in partitions))  # the one that would be reopened first
        for peer, id in made[:]:
            peer.say("close_consumer", consumer_id=id, request_id=0)
        wait_until(lambda: all(each.consumer.lost for each in partitions.values()))
        member.until(lambda: len(made) == 3, SOON / 4)  # a partition alone is tried for longer


def test_a_topic_that_is_deleted_while_topics_are_listed_is_not_listed_without_partitions() -> None:
    """A copy of all topics would make such a topic at its target, and be refused."""
    client: Any = SimpleNamespace(
        topics=lambda *_: ["persistent://a/b/t-partition-0", "persistent://a/b/u"],
        partitions=raising(wire.TopicNotFound(0, "it was deleted")),
    )
    topics = PulsarTopics(cluster_with().settings, client, NO_REST)
    assert topics.all(Deadline(SOON)) == {"u": 1}


@pytest.mark.parametrize("looks", [[(0, 9)], [(2, 5), (1, 6), (0, 7)], [(2, 5), (9, 6), (9, 7), (9, 8)]])
def test_earlier_messages_are_waited_for_and_not_what_others_send_meanwhile(looks: list[tuple[int, int]]) -> None:
    names = ("pendingAddEntriesCount", "entriesAddedCounter")
    rest: Any = SimpleNamespace(get=Mock(side_effect=[dict(zip(names, look, strict=True)) for look in looks]))
    PulsarTopics(cluster_with().settings, NO_CLIENT, rest).wait_for_writes("persistent://a/b/t", Deadline(SOON))
    assert rest.get.call_count == len(looks)


@pytest.mark.parametrize("number", range(1, 9))
def test_a_member_whose_closing_was_interrupted_leaves_its_group(number: int) -> None:
    with member_of([1], set(), "group") as (member, *_):
        consumer = member.partition("t").consumer
        assert interrupted_at(lambda: member.reader.close(Deadline(SOON)), number, ["read/reader.py"])
        member.reader.close(Deadline(SOON))  # as the core does
        wait_until(lambda: consumer.lost)


@pytest.mark.parametrize("start", ["latest", 1])
def test_a_group_that_has_begun_begins_nowhere_else(monkeypatch, start: str | int) -> None:
    """Not even at added partitions, and although it has acknowledged nothing: it would skip messages."""
    log, set_to = MemoryLog(), []
    monkeypatch.setattr(reading_kit, "MemoryLog", lambda: log)
    monkeypatch.setattr(FailoverMode, "_begin_at", lambda *_: set_to.append(start))
    with member_of([1], set(), "group", start=start):
        assert set_to == [start]
    with member_of([2], set(), "group", start=start) as (_, broker, _):
        assert [each.fields["initial_position"] for each in broker.wait_for("subscribe", 2)] == [1, 1]
    assert set_to == [start]


@pytest.mark.parametrize("deleted", [True, False])
def test_a_member_has_lost_no_subscription_that_goes_with_its_topic(monkeypatch, deleted) -> None:
    partitions, lost = [1], errors.PositionLost("its subscription is gone")

    def check(*_: object) -> None:
        partitions[0] = 1 - deleted  # the broker is about to delete the topic, and its subscriptions go first
        raise lost

    with member_of(partitions, set(), "group") as (member, broker, ((peer, id),)):
        broker.handlers["get_topics_of_namespace"] = replies("get_topics_of_namespace_response", topics=[])
        member.has(1)
        monkeypatch.setattr(GroupRegistry, "check", check)
        peer.say("close_consumer", consumer_id=id, request_id=0)
        with pytest.raises(errors.NotFound if deleted else errors.PositionLost):
            member.until(lambda: False, SOON)


def test_a_new_partition_that_cannot_be_opened_keeps_no_other_one_from_being_assigned() -> None:
    partitions = [1]
    with member_of(partitions, {1}, "group") as (member, broker, ((peer, id),)):
        member.reader._timeout = 1.0
        member.has(1)
        partitions[0] = 3
        member.until(lambda: len(broker.wait_for("subscribe")) > 1)
        for active in (False, True):
            peer.say("active_consumer_change", consumer_id=id, is_active=active)
        member.until(lambda: member.listener.told.count(("assigned", ("t", 0))) == 2, SOON / 4)
        member.until(lambda: ("assigned", ("t", 2)) in member.listener.told, SOON / 4)


def test_a_partition_whose_broker_stands_still_keeps_no_other_one_from_being_assigned() -> None:
    with member_of([2], set(), "group") as (member, broker, made):
        answer = broker.handlers["get_last_message_id"]
        silent = lambda peer, fields: fields["consumer_id"] == made[0][1] or answer(peer, fields)  # noqa: E731
        broker.handlers["get_last_message_id"] = silent
        member.until(lambda: "assigned" in [what for what, _ in member.listener.told], SOON / 4)


def deliver(
    peer: Peer,
    consumer: int,
    numbers: Iterable[int],
    chunk: int | None = None,
    ledger: int = 1,
    uuid: str = "one",
    published: int = 1,
    **more: Any,
) -> None:
    """Deliver entries with their numbers as values. As a `chunk` an entry is one of the two of a message."""
    chunked = {} if chunk is None else {"uuid": uuid, "chunk_id": chunk, "num_chunks_from_msg": 2}
    for number in numbers:
        fields = {"producer_name": "p", "sequence_id": number, "publish_time": published, **chunked}
        metadata = encode("MessageMetadata", fields)
        tail = parse(send_command({"producer_id": 1, "sequence_id": number}, metadata, b"%d" % number)[4:]).tail
        message = command("message", consumer_id=consumer, message_id={"ledger_id": ledger, "entry_id": number}, **more)
        peer.raw((len(message) - 4 + len(tail)).to_bytes(4, "big") + message[4:] + tail)


@pytest.mark.parametrize(
    ("admin_url", "partitions"),
    [("", 1), ("http://127.0.0.1:1", 1), ("", 2)],
    ids=["no REST", "REST is away", "another partition cannot be reopened"],
)
def test_the_last_entries_of_a_topic_come_again_if_a_broker_skips_them_after_an_abort(
    admin_url: str, partitions: int
) -> None:
    """No later entry comes that would show it, and no transaction aborts (hazard H94)."""

    def go_back(peer: Peer, fields: dict[str, Any]) -> None:
        # The first time the broker skips all of them.
        if len(broker.wait_for("redeliver")) > 1 and fields["consumer_id"] == ids["0"]:
            deliver(peer, ids["0"], (1, 2, 3), consumer_epoch=fields["consumer_epoch"])

    often: dict[str, Any] = {"admin_url": admin_url, "timing": Timing(idle_check_seconds=0.5)}
    with member_of([partitions], set(), "group", **often) as (member, broker, ((peer, _), *_)):
        broker.handlers.update(get_last_message_id=tells((1, 3), (1, 0)), redeliver=go_back)
        opened = [frame.fields for frame in broker.wait_for("subscribe", partitions)]
        ids = {each["topic"][-1]: each["consumer_id"] for each in opened}
        member.has(partitions)
        if partitions == 2:
            broker.handlers["subscribe"] = replies("error", error=5, message="the subscription is of another type")
            peer.say("close_consumer", consumer_id=ids["1"], request_id=0)
            member.until(lambda: ("lost", ("t", 1)) in member.listener.told)
        deliver(peer, ids["0"], (1, 2, 3))
        found = member.take(3)
        member.seek({("t", 0): found[0].position})
        again = member.take(3, SOON / 4)
        assert [message.position for message in again] == [message.position for message in found]


# Entries of a topic: ledger and number, and the names and numbers of chunks. The first chunk of `gone` has expired.
STORED: list[tuple[int, int, str, int | None]] = [
    *((7, number, "", None) for number in range(20)),
    (7, 20, "gone", 1),
    (7, 21, "a", 0),
    *((7, number, "", None) for number in range(22, 30)),
    (7, 30, "b", 0),
    (9, 0, "a", 1),
    (9, 1, "a", 1),  # a copy
    (9, 2, "", None),
    (9, 3, "c", 0),
    (9, 4, "b", 1),
    (9, 5, "c", 1),
    (9, 6, "dead", 0),
]
WHOLE = [(ledger, entry, 0) for ledger, entry, name, chunk in STORED if chunk is None]
WHOLE = sorted([*WHOLE, (9, 0, 0), (9, 4, 0), (9, 5, 0)])


@pytest.mark.parametrize("start", [(7, 0), (7, 20), (7, 22), (7, 30), (8, 5), *((9, number) for number in range(8))])
def test_a_reader_without_a_group_gets_each_message_whose_last_chunk_is_behind_its_start(caplog, start) -> None:
    def flow(peer: Peer, fields: dict[str, Any]) -> None:
        id = fields["consumer_id"]
        for ledger, number, uuid, chunk in STORED:
            if (ledger, number) > sent.get(id, (99, 0)):
                sent[id] = ledger, number
                deliver(peer, id, [number], chunk, ledger, uuid)

    def subscribe(peer: Peer, fields: dict[str, Any]) -> None:
        at = message_id(fields["start_message_id"])
        sent[fields["consumer_id"]] = at.ledger, at.entry
        peer.answer(fields, "success")

    def close(peer: Peer, fields: dict[str, Any]) -> None:
        sent.pop(fields["consumer_id"], None)
        peer.answer(fields, "success")

    def tell_end(peer: Peer, fields: dict[str, Any]) -> None:
        if fields["consumer_id"] in sent:
            peer.answer(fields, "get_last_message_id_response", last_message_id={"ledger_id": 9, "entry_id": 6})
        else:
            peer.answer(fields, "error", error=1, message="Consumer not found")

    sent: dict[int, tuple[int, int]] = {}
    with member_of([1], set(), None) as (member, broker, _):
        broker.handlers.update(flow=flow, subscribe=subscribe, close_consumer=close, get_last_message_id=tell_end)
        member.seek({("t", 0): (*start, 0)})
        found = member.until(lambda: not member.lag(Deadline(SOON))["t", 0], SOON / 4)
        assert not member.poll()
    expected = [position for position in WHOLE if position >= (*start, 0)]
    assert [message.position for message in found] == expected
    assert ("lost at 7:20" in caplog.text) == (start <= (7, 20))


@pytest.mark.parametrize(
    ("start", "acknowledged", "stored", "begin"),
    [
        (100, -1, [(1, None, 50), (2, 0, 150), (3, None, 60), (4, None, 150), (5, 1, 150)], (1, 2)),
        (100, -1, [(1, 0, 60), (2, None, 50), (3, None, 150), (4, 1, 60)], (1, 3)),
        (100, -1, [(1, None, 50), (2, 0, 60)], (1, 3)),  # its sender is dead
        ("latest", 9, [(1, None, 150), (2, None, 150)], (1, 3)),  # behind that are messages of open transactions
        ("latest", 9, [], (-1, -1)),
        ("latest", -1, [(1, None, 150)], None),  # somebody has made its subscription before
    ],
)
def test_a_group_begins_at_its_first_entry_also_if_that_is_a_chunk(start, acknowledged, stored, begin) -> None:
    def flow(peer: Peer, fields: dict[str, Any]) -> None:
        for number, chunk, published in stored:
            deliver(peer, fields["consumer_id"], [number], chunk, published=published)

    end = tells((1, len(stored) or -1), (1, acknowledged))
    with served(flow=flow, seek=replies("success"), get_last_message_id=end) as (broker, client):
        mode = mode_of(client, Subscription(("t",), "group", start=start), wire.Inbox(), "")
        mode.open("t", True, Deadline(SOON / 4))
        sought = [frame.fields["message_id"] for each in broker.peers for frame in each.seen if frame.name == "seek"]
    assert [message_id(each)[:2] for each in sought] == ([begin] if begin else [])


@pytest.mark.parametrize("sharing", ["partition", "message"])
def test_a_group_acknowledges_chunks_whose_first_one_it_never_gets(sharing: str) -> None:
    """It has begun amid their messages. A first chunk that a broker has skipped still comes (hazard H94)."""
    given = {"sharing": sharing, "timing": Timing(idle_check_seconds=0.1)}
    with member_of([1], set(), "group", **given) as (member, broker, ((peer, id),)):
        broker.handlers["get_last_message_id"] = tells((1, 9), (1, 4))
        for number in (5, 6, 8):
            deliver(peer, id, [number], chunk=1, uuid=f"{number}")
        member.until(lambda: "ack" in [each.name for each in peer.seen], SOON / 4)
        acked = [message_id(each).entry for each in broker.wait_for("ack")[0].fields["message_id"]]
    assert acked == [5, 6]


@pytest.mark.parametrize("redelivered", [False, True])
def test_a_group_acknowledges_copies_of_chunks_behind_their_whole_message(redelivered: bool) -> None:
    """A broker that removes duplicates drops a copy of the last chunk only."""
    with member_of([1], set(), "group", timing=Timing(idle_check_seconds=0.1)) as (member, broker, ((peer, id),)):
        for number in (1, 2):
            deliver(peer, id, [number], number - 1)
        (message,) = member.take(1)
        if redelivered:  # with earlier messages
            member.reader.nack({("t", 0): [message.position]})
        deliver(peer, id, [3], chunk=0, consumer_epoch=9)
        broker.handlers["get_last_message_id"] = tells((1, 3), (1, 2))
        member.until(lambda: "ack" in [each.name for each in peer.seen], SOON / 4)
        assert [message_id(each).entry for each in broker.wait_for("ack")[0].fields["message_id"]] == [3]


@pytest.mark.parametrize("is_late", [False, True], ids=["in order", "the second chunk comes before the first again"])
def test_a_busy_member_gives_chunks_back_until_their_message_is_whole(monkeypatch, is_late: bool) -> None:
    """Their key may have moved to another member, to which the broker then sends nothing of it (hazard H159)."""
    monkeypatch.setattr(consumer_module, "_ROUND_SECONDS", 0)
    given_back: list[int] = []

    def redeliver(peer: Peer, fields: dict[str, Any]) -> None:
        numbers = [each["entry_id"] for each in fields["message_ids"]]
        second = [2] if given_back.count(1) == 3 else []
        given_back.extend(numbers)
        for number in (*second, *numbers) if is_late else (*numbers, *second):
            deliver(peer, fields["consumer_id"], [number], number - 1, redelivery_count=given_back.count(number))

    with member_of([1], set(), "group", sharing="key") as (member, broker, ((peer, id),)):
        broker.handlers["redeliver"] = redeliver
        member.has(1)
        deliver(peer, id, [1], chunk=0)
        found: list[Any] = []
        others = iter(range(3, 1000))
        while not found:
            deliver(peer, id, [next(others)])
            found += [message for message in member.take(1) if message.position[1] < 3]
    assert [message.value for message in found] == [b"12"]
    assert set(given_back) == ({1, 2} if is_late else {1})


@pytest.mark.parametrize("sharing", ["message", "key"])
def test_entries_whose_acknowledgement_is_not_answered_in_time_come_again_with_the_abort(sharing: str) -> None:
    """The broker no longer counts them as the member's, and refuses all of them because of one that another has."""
    pending = set[int]()

    def acknowledge(peer: Peer, fields: dict[str, Any]) -> None:
        entries = {each["entry_id"] for each in fields["message_id"]}
        pending.update(entries if 1 not in entries else ())  # the answer, a refusal or not, comes too late

    with member_of([1], set(), "group", sharing=sharing) as (member, broker, ((peer, id),)):
        broker.handlers["ack"] = acknowledge
        member.has(1)
        deliver(peer, id, (1, 2, 3))
        found = member.take(3)
        sent = member.reader.ack_context().acknowledge(TXN, by_partition(found), Deadline(0.2))
        with pytest.raises(errors.DeadlineExceeded):
            sent.settle(Deadline(0.2))
        wait_until(lambda: pending == {2, 3})
        deliver(peer, id, sorted(pending))  # by the abort
        assert [message.value for message in member.take(2)] == [b"2", b"3"]


@pytest.mark.parametrize("polled", ["before", "after"])
def test_entries_whose_transaction_times_out_before_it_waits_for_the_answers_come_again(polled: str) -> None:
    """The broker confirms the acknowledgements, and redelivers the entries before the writer looks at its answers."""

    def acknowledge(peer: Peer, fields: dict[str, Any]) -> None:
        peer.answer(fields, "ack_response", consumer_id=fields["consumer_id"])
        deliver(peer, fields["consumer_id"], [each["entry_id"] for each in fields["message_id"]])

    with member_of([1], set(), "group", sharing="message") as (member, broker, ((peer, id),)):
        broker.handlers["ack"] = acknowledge
        member.has(1)
        deliver(peer, id, (1, 2))
        found = member.take(2)
        sent = member.reader.ack_context().acknowledge(TXN, by_partition(found), Deadline(SOON))
        consumer = member.partition("t").consumer
        wait_until(lambda: consumer.arrived == 4)
        again = member.take(2, SOON / 4) if polled == "before" else []
        sent.settle(Deadline(SOON))
        again += member.take(2 - len(again), SOON / 4)
        assert [message.position for message in again] == [message.position for message in found]


@pytest.mark.parametrize("call", ["append", "end"])
def test_a_thread_that_waits_for_anothers_connection_of_the_decision_log_keeps_its_deadline(call: str) -> None:
    hold = Hold()
    client: Any = SimpleNamespace(create_producer=hold, read=hold)
    topics: Any = SimpleNamespace(internal=lambda *_: "log")
    log = PulsarLog(client, topics, "log", Deadline(SOON), Emitter("tests", ()))
    with hold.asked_by(lambda: log.append(b"", Deadline(SOON))), pytest.raises(errors.DeadlineExceeded):
        getattr(log, call)(*[b""] * (call == "append"), Deadline(0.1))


def test_entries_of_a_consumer_that_is_reopened_while_its_partition_is_assigned_come(monkeypatch) -> None:
    with member_of([1], set(), "group", sharing="message") as (member, broker, made):
        member.has(1)
        flows, reopened = list[int](), list[PulsarPartition]()

        def flow(peer: Peer, fields: dict[str, Any]) -> None:
            if fields["consumer_id"] != made[0][1]:
                flows.append(fields["consumer_id"])
                deliver(peer, flows[-1], [1][: 2 - len(flows)])

        def grant(call: Callable[..., None], mode: SharedMode, partition: PulsarPartition, messages: int) -> None:
            if not reopened:  # by work in the background
                reopened.append(partition)
                partition.consumer.reopen(SOON)
            call(mode, partition, messages)

        broker.handlers["subscribe"] = lambda peer, fields: peer.answer(fields, "success")
        broker.handlers |= {"flow": flow, "redeliver": lambda peer, fields: deliver(peer, fields["consumer_id"], [1])}
        replace_method(monkeypatch, SharedMode, "grant_permits", grant)
        assert [m.value for m in member.take(1, 8)] == [b"1"]
