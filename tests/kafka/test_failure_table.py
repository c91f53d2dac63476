"""Tests of refused requests: a program's error for each error that Kafka's design knows, at each request.

The brokers are librdkafka's mock, and what the coordinator remembers is what the test says: these tests show which of
our errors each answer becomes, that nothing hangs, and that the writer works again. What really happened to the
messages is for the tests with live brokers.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import count

import confluent_kafka
import pytest
from confluent_kafka import KafkaError, KafkaException
from txnbridge_kafka import broker as broker_module
from txnbridge_kafka.outcome import outcome as outcome_module
from txnbridge_kafka.outcome.transaction_state_log import StateRecord
from txnbridge_kafka.write.acks import KafkaAckContext
from txnbridge_kafka.write.writer import KafkaWriter

import txnbridge
from tests.core.decisions_kit import MemoryLog
from tests.failing import fail_call, raising
from tests.in_time import within
from tests.kafka.kit import bootstrap_of, silent, writer_of
from tests.kafka.mock_kit import HANG_UP, KEYS, Coordinator, MockCluster
from txnbridge import Bridge, Event, Outcome, TokenState, Transaction, errors
from txnbridge.errors import AccessDenied, DeliveryFailed, EvidenceLost, Fenced, TransactionAborted, TxnBridgeError
from txnbridge.spi import Deadline
from txnbridge.testing import listening

TOPIC, INPUT, GROUP, ID = "orders", "input", "billing", "shop"
# What is not retried ends long before this; what is retried is told how long it may.
TIMEOUT = 100.0
SHORT = 1.5

COMMITTED = None
AGAIN = "run it again"
WRITE_ON_ID = rf"{ID}-\d+.0 needs Write on this transactional id"


class World:
    """A transactional id at the mock cluster, what its coordinator says, and the bridges that own it in turn."""

    def __init__(self, cluster: MockCluster, patch: pytest.MonkeyPatch) -> None:
        self.cluster = cluster
        self.coordinator = coordinator = Coordinator()
        self.bridges: list[Bridge] = []
        self._id = f"{ID}-{next(numbers)}"
        log = MemoryLog()
        patch.setattr(broker_module, "Requests", lambda settings: coordinator)
        # The mock has no settings to tell.
        patch.setattr(broker_module, "longest_transaction_ms", lambda *asked: 900_000)
        patch.setattr(broker_module, "preflight", lambda *asked: {})
        patch.setattr(outcome_module, "state_records", lambda *asked: coordinator.steps)
        patch.setattr(broker_module.KafkaBroker, "decision_log", lambda *asked: log)

    def connect(self, timeout: float = TIMEOUT, **client: object) -> Bridge:
        """Every one opens the same id, and so takes it from the one before."""
        url = self.cluster.url
        bridge = txnbridge.connect(url, transactional_id=self._id, writers=1, timeout=timeout, kafka=client)
        self.bridges.append(bridge)
        return bridge

    def fail(self, request: str, code: int) -> None:
        """The next one of a kind is answered with this error."""
        if request == ACKS:
            self.coordinator.refusals.append(code)
        else:
            self.cluster.fail(request, code)

    def listen(self, event: Event) -> None:
        if event.name == "step:open" and event.phase == "after" and event.data["id"].startswith(f"{self._id}."):
            self.coordinator.opened()


numbers = count()


@contextmanager
def new_world(cluster: MockCluster) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        world = World(cluster, patch)
        with listening(world.listen):
            yield world
            cluster.heal()
            for bridge in world.bridges:
                bridge.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[MockCluster]:
    cluster = MockCluster(TOPIC, INPUT, "__consumer_offsets")
    yield cluster
    cluster.close()


@pytest.fixture
def world(cluster: MockCluster) -> Iterator[World]:
    with new_world(cluster) as world:
        yield world


@pytest.fixture
def bridge(world: World) -> Bridge:
    bridge = world.connect()
    send(bridge)
    return bridge


@pytest.fixture(scope="module")
def shared(cluster: MockCluster) -> Iterator[World]:
    """Share a world among all rows that leave its writer usable: opening a writer takes most of a row's time."""
    with new_world(cluster) as world:
        send(world.connect())
        yield world


def send(bridge: Bridge) -> None:
    with bridge.transaction() as txn:
        txn.send(TOPIC, b"1")


def acknowledge(world: World, txn: Transaction) -> None:
    """Acknowledge a message without being a member of the group: the mock checks no membership."""
    settings = {"bootstrap.servers": bootstrap_of(world.cluster.url), "group.id": GROUP}
    consumer = confluent_kafka.Consumer(settings, logger=silent)
    context = KafkaAckContext(GROUP)
    context.metadata = consumer.consumer_group_metadata()
    consumer.close()
    writer_of(txn).ack(context, {(INPUT, 0): [(0,)]})


@contextmanager
def told(raised: type[TxnBridgeError] | None, says: str = ".") -> Iterator[None]:
    """Check that the block raises exactly this error with such a message, or none, in time."""
    with within(0), nullcontext() if raised is None else pytest.raises(raised, match=says) as caught:
        yield
    assert caught is None or type(caught.value) is raised


def one_transaction(world: World, bridge: Bridge, acks: bool = False, seconds: float | None = None) -> Transaction:
    """The one that fails, left as its block left it."""
    txn = bridge.transaction(timeout=seconds)
    with txn:
        txn.send(TOPIC, b"2")
        if acks:
            acknowledge(world, txn)
        world.coordinator.becomes("Ongoing")
    return txn


def stored(bridge: Bridge, seconds: float | None = None) -> Transaction:
    """Begin a transaction, and store a message in it."""
    txn = bridge.transaction(timeout=seconds)
    txn.send(TOPIC, b"2")
    writer_of(txn).flush(Deadline(TIMEOUT))
    return txn


def test_an_id_whose_coordinator_left_during_its_opening_is_not_used_for_a_prepared_transaction(world: World) -> None:
    """The client repeats its request then, and logs nothing: the first copy may arrive late."""
    bridge = world.connect()
    world.coordinator.leaves = True
    with bridge.transaction(prepare=True) as txn:
        assert writer_of(txn).id.endswith(".p64")  # in place of p0
        txn.abort()


K = KafkaError
RETRIED = [K.COORDINATOR_LOAD_IN_PROGRESS, K.COORDINATOR_NOT_AVAILABLE, K.NOT_COORDINATOR, HANG_UP]
SHUT_OUT = "ended the transaction.*run it again"
NO_RIGHT_TO_ID, NO_RIGHT_TO_TOPIC = K.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, K.TOPIC_AUTHORIZATION_FAILED

# Our own requests bring these, and try again what passes by itself.
ACKS = "acknowledgements"

ADD = "AddPartitionsToTxn"
FENCED = (K.INVALID_PRODUCER_EPOCH, K.PRODUCER_FENCED)
FORGOTTEN = (K.INVALID_PRODUCER_ID_MAPPING, K.UNKNOWN_PRODUCER_ID, K.TRANSACTION_ABORTABLE)
NOT_STORED_YET = (K.NOT_ENOUGH_REPLICAS, K.NOT_ENOUGH_REPLICAS_AFTER_APPEND, K.REQUEST_TIMED_OUT, K.KAFKA_STORAGE_ERROR)
NEEDS_WRITE = "needs Write on every topic that it sends to"
OTHER_MEMBERS = (K.ILLEGAL_GENERATION, K.UNKNOWN_MEMBER_ID, K.FENCED_INSTANCE_ID, K.STALE_MEMBER_EPOCH)

Refusal = tuple[str, int, type[TxnBridgeError] | None, str]


def by_name(request: str, raised: type[TxnBridgeError], *codes: int) -> list[Refusal]:
    """Return the rows of errors that the message names."""
    return [(request, code, raised, f"{KafkaError(code).name()}.*{AGAIN}") for code in codes]


# Request, error, what is raised (nothing: it was tried again and is committed), what the message says.
REFUSALS: list[Refusal] = [
    *[(request, code, COMMITTED, "") for request in (ADD, "Produce", "EndTxn") for code in RETRIED],
    *[(request, K.CONCURRENT_TRANSACTIONS, COMMITTED, "") for request in (ADD, "EndTxn")],
    *[("Produce", code, COMMITTED, "") for code in NOT_STORED_YET],
    *[(request, code, TransactionAborted, SHUT_OUT) for request in (ADD, "Produce", ACKS, "EndTxn") for code in FENCED],
    *[(request, K.INVALID_TXN_STATE, TransactionAborted, SHUT_OUT) for request in (ADD, "EndTxn")],
    ("Produce", K.OUT_OF_ORDER_SEQUENCE_NUMBER, TransactionAborted, f"the client failed.*{AGAIN}"),
    *by_name(ADD, DeliveryFailed, *FORGOTTEN),
    *by_name("Produce", DeliveryFailed, *FORGOTTEN, K.INVALID_TXN_STATE, K.CONCURRENT_TRANSACTIONS),
    *by_name(ACKS, TransactionAborted, *FORGOTTEN, K.INVALID_TXN_STATE),
    *by_name("EndTxn", TransactionAborted, *FORGOTTEN, K.REQUEST_TIMED_OUT),
    ("Produce", K.MSG_SIZE_TOO_LARGE, DeliveryFailed, r"larger than its topic's max\.message\.bytes"),
    (ACKS, K.KAFKA_STORAGE_ERROR, errors.StorageFailed, "KAFKA_STORAGE_ERROR"),
    *[(ACKS, code, errors.Conflict, f"group {GROUP}.*other members") for code in OTHER_MEMBERS],
    *[(request, NO_RIGHT_TO_ID, AccessDenied, WRITE_ON_ID) for request in (ADD, "Produce", ACKS, "EndTxn")],
    *[(request, NO_RIGHT_TO_TOPIC, AccessDenied, NEEDS_WRITE) for request in (ADD, "Produce")],
    (ACKS, NO_RIGHT_TO_TOPIC, AccessDenied, "Read on those it acknowledges"),
    (ACKS, K.GROUP_AUTHORIZATION_FAILED, AccessDenied, f"group {GROUP}.* needs Read on the group"),
]


def title(value: str | int | type | None) -> str:
    if isinstance(value, bool):
        return "with acks" if value else "messages"
    if isinstance(value, int):
        return "hangs up" if value == HANG_UP else KafkaError(value).name()
    if isinstance(value, str):
        return value if value in (*KEYS, ACKS) else ""  # what a message says is no title
    return "committed" if value is None else value.__name__


def with_and_without_acks() -> Iterator[tuple[str, int, type[TxnBridgeError] | None, str, bool]]:
    for request, code, raised, says in REFUSALS:
        if request != ACKS and raised is not COMMITTED:
            yield request, code, raised, says, False
        if request != "EndTxn" or raised is COMMITTED:
            yield request, code, raised, says, True


@pytest.mark.parametrize(("request_kind", "code", "raised", "says", "acks"), [*with_and_without_acks()], ids=title)
def test_a_program_sees_the_listed_error_when_a_request_is_refused(shared, request_kind, code, raised, says, acks):
    (bridge,) = shared.bridges
    shared.fail(request_kind, code)
    with within(0):
        if raised is None:
            assert one_transaction(shared, bridge, acks).outcome is Outcome.COMMITTED
        else:
            with pytest.raises(TxnBridgeError, match=says) as caught:
                one_transaction(shared, bridge, acks)
            # A message that failed may be told of by the acknowledgement behind it.
            assert type(caught.value) in (raised, TransactionAborted if acks and raised is DeliveryFailed else raised)
            assert isinstance(caught.value.__cause__, KafkaException)
        send(bridge)


@pytest.mark.parametrize(
    ("where", "raised"),
    [({"partition": -1}, errors.NotFound), ({"headers": {"a\0b": "x"}}, errors.InvalidOption)],
    ids=str,
)
def test_a_message_that_the_client_would_change_is_refused(bridge, where, raised):
    """The client takes the partition -1 for any partition, and what follows a NUL for no part of a header's name."""
    with pytest.raises(raised), bridge.transaction() as txn:
        txn.send(TOPIC, b"x", **where)


def test_a_message_that_the_broker_has_stored_already_counts_as_stored(world: World, bridge: Bridge) -> None:
    world.cluster.fail("Produce", K.DUPLICATE_SEQUENCE_NUMBER)
    assert one_transaction(world, bridge).outcome is Outcome.COMMITTED


@pytest.mark.parametrize("many", [False, True], ids=["send", "send_many"])
@pytest.mark.parametrize(
    ("code", "raised", "says"),
    [
        (K.INVALID_PRODUCER_EPOCH, TransactionAborted, AGAIN),
        (K.TOPIC_AUTHORIZATION_FAILED, AccessDenied, "needs Write"),
        (K.MSG_SIZE_TOO_LARGE, DeliveryFailed, "larger than its topic's"),
    ],
    ids=title,
)
def test_a_program_that_goes_on_sending_is_told_why_that_is_in_vain(world, code, raised, says, many):
    """The error says more than that the client is in the wrong state, or full."""
    bridge = world.connect(**{"queue.buffering.max.messages": 10})
    send(bridge)
    world.cluster.fail("Produce", code)
    with told(raised, says):
        with bridge.transaction() as txn:
            world.coordinator.becomes("Ongoing")
            if many:
                txn.send_many(TOPIC, (b"x" for _ in range(1_000_000)))
            while True:
                txn.send(TOPIC, b"x")
    assert txn.outcome is Outcome.ABORTED
    send(bridge)


FOR_EVER = 100_000


@pytest.mark.parametrize("request_kind", ["AddPartitionsToTxn", "Produce"])
def test_a_transaction_whose_request_is_never_accepted_is_aborted_at_its_deadline(world, bridge, request_kind):
    code = K.NOT_ENOUGH_REPLICAS if request_kind == "Produce" else K.NOT_COORDINATOR
    world.cluster.fail(request_kind, *[code] * FOR_EVER)
    txn = bridge.transaction(timeout=SHORT)
    with within(SHORT), pytest.raises(errors.DeadlineExceeded):
        with txn:
            txn.send(TOPIC, b"2")
            acknowledge(world, txn)
            world.coordinator.becomes("Ongoing")
    assert txn.outcome is Outcome.ABORTED
    world.cluster.heal()
    send(bridge)


def test_a_commit_that_is_never_answered_is_unknown_at_the_deadline(world: World, bridge: Bridge) -> None:
    world.cluster.fail("EndTxn", *[K.NOT_COORDINATOR] * FOR_EVER)
    with within(SHORT), pytest.raises(errors.OutcomeUnknown) as caught:
        one_transaction(world, bridge, seconds=SHORT)
    assert bridge.status(str(caught.value.token)).state is TokenState.UNKNOWN
    world.cluster.heal()
    send(bridge)
    assert bridge.status(str(caught.value.token)).state is TokenState.ABORTED


# What has become of the transaction there, as (state, epochs later, producer ids later), and what a program is told.
TRUTHS: dict[str, tuple[tuple[str, int, int], type[TxnBridgeError] | None]] = {
    "open": (("Ongoing", 0, 0), TransactionAborted),
    "committed": (("CompleteCommit", 0, 0), COMMITTED),
    "being committed": (("PrepareCommit", 0, 0), COMMITTED),
    "aborted": (("CompleteAbort", 0, 0), TransactionAborted),
    # A time-out, or whoever opened it again: only the coordinator's log would tell, which is missing here.
    "timed out": (("CompleteAbort", 1, 0), EvidenceLost),
    "opened again": (("Empty", 1, 0), EvidenceLost),
    "committed by whoever opened it again": (("CompleteCommit", 1, 0), EvidenceLost),
    "expired and used again": (("CompleteCommit", 0, 1), EvidenceLost),
}
AMBIGUOUS = [K.INVALID_PRODUCER_EPOCH, K.INVALID_TXN_STATE, K.TRANSACTION_ABORTABLE]
# Each takes the way of one of those.
ALIKE = [K.PRODUCER_FENCED, K.INVALID_PRODUCER_ID_MAPPING, K.UNKNOWN_PRODUCER_ID, K.REQUEST_TIMED_OUT]

# Of one that was refused once and for all, and of which the coordinator has no word any more: it was not carried out.
CERTAIN = {K.INVALID_PRODUCER_EPOCH, K.PRODUCER_FENCED, K.INVALID_TXN_STATE, K.INVALID_PRODUCER_ID_MAPPING}


@pytest.mark.parametrize("truth", TRUTHS)
@pytest.mark.parametrize("code", [*AMBIGUOUS, *[pytest.param(c, marks=pytest.mark.full) for c in ALIKE]], ids=title)
def test_a_refused_commit_is_what_its_coordinator_says_it_is(world: World, code: int, truth: str) -> None:
    bridge = world.connect()
    (state, epochs, producers), raised = TRUTHS[truth]
    if raised is EvidenceLost and code in CERTAIN:
        raised = TransactionAborted
    txn = bridge.transaction()
    world.coordinator.settles = state == "PrepareCommit"
    world.cluster.fail("EndTxn", code)
    with told(raised):
        with txn:
            txn.send(TOPIC, b"2")
            world.coordinator.becomes(state, epochs, producers)
    wanted = Outcome.COMMITTED if raised is None else Outcome.UNKNOWN if raised is EvidenceLost else Outcome.ABORTED
    assert txn.outcome is wanted
    assert wanted is not Outcome.UNKNOWN or bridge.status(str(txn.token)).permanent
    assert True not in world.coordinator.ended
    send(bridge)


def test_a_commit_refused_when_its_time_was_over_says_so(world: World) -> None:
    bridge = world.connect()
    world.cluster.fail("EndTxn", K.INVALID_PRODUCER_EPOCH)
    txn = stored(bridge, SHORT)
    world.coordinator.becomes("CompleteAbort", epochs=1)
    time.sleep(SHORT)
    with pytest.raises(errors.TransactionTimedOut, match=f"the transaction timed out.*{AGAIN}"):
        writer_of(txn).commit(Deadline(TIMEOUT))
    txn.abort()


@pytest.mark.parametrize("how", ["silent", "denied"])
@pytest.mark.parametrize("code", AMBIGUOUS, ids=title)
def test_a_refused_commit_whose_outcome_the_coordinator_does_not_tell_is_unknown(world: World, code: int, how: str):
    bridge = world.connect()
    world.cluster.fail("EndTxn", code)
    txn = bridge.transaction(timeout=SHORT)
    with within(SHORT), pytest.raises(errors.OutcomeUnknown, match="Ask later") as caught:
        with txn:
            txn.send(TOPIC, b"2")
            writer_of(txn).flush(Deadline(TIMEOUT))
            world.coordinator.becomes("CompleteCommit")
            setattr(world.coordinator, how, True)
    assert txn.outcome is Outcome.UNKNOWN
    setattr(world.coordinator, how, False)
    assert bridge.status(str(caught.value.token)).state is TokenState.COMMITTED
    send(bridge)
    assert bridge.status(str(caught.value.token)).state is TokenState.COMMITTED


@pytest.mark.parametrize("how", ["silent", "denied"])
def test_an_abort_whose_outcome_the_coordinator_does_not_tell_is_unknown(world: World, bridge: Bridge, how: str):
    txn = stored(bridge, SHORT)
    world.coordinator.becomes("Ongoing")
    world.cluster.fail("EndTxn", K.INVALID_TXN_STATE)
    setattr(world.coordinator, how, True)
    with within(SHORT), pytest.raises(errors.OutcomeUnknown):
        txn.abort()
    setattr(world.coordinator, how, False)
    send(bridge)
    assert world.coordinator.ended == [False]


@pytest.mark.parametrize("code", [*FENCED, K.INVALID_TXN_STATE, K.TRANSACTION_ABORTABLE], ids=title)
def test_an_abort_that_is_refused_is_asked_for_by_another_way(world: World, bridge: Bridge, code: int) -> None:
    txn = stored(bridge)
    world.coordinator.becomes("Ongoing")
    world.cluster.fail("EndTxn", code)
    txn.abort()
    assert txn.outcome is Outcome.ABORTED
    assert world.coordinator.ended == [False]
    send(bridge)


@pytest.mark.parametrize("request_kind", ["AddPartitionsToTxn", "Produce", ACKS, "EndTxn"])
@pytest.mark.parametrize("code", [K.INVALID_PRODUCER_EPOCH, K.PRODUCER_FENCED, K.INVALID_TXN_STATE], ids=title)
def test_an_owner_fenced_by_a_newer_one_is_told_by_whom_and_stays_fenced(world: World, request_kind: str, code: int):
    older = world.connect()
    txn = older.transaction()
    newer = world.connect()
    world.fail(request_kind, code)
    with within(0), pytest.raises(Fenced, match="this owner must stop") as caught:
        with txn:
            txn.send(TOPIC, b"2")
            acknowledge(world, txn)
    assert txn.outcome is Outcome.ABORTED
    assert "pid" in str(caught.value.newer)
    with pytest.raises(Fenced, match="this owner must stop"):
        send(older)
    send(newer)


@pytest.mark.parametrize("again", [HANG_UP, K.COORDINATOR_NOT_AVAILABLE], ids=title)
@pytest.mark.parametrize("wrote", ["committed", "aborted", "nothing", "not yet"])
def test_a_commit_sent_twice_and_refused_is_what_the_coordinator_wrote_down(world: World, again: int, wrote: str):
    """The copy that was not answered, or answered with "not now", may have been carried out."""
    older = world.connect()
    pid, epoch = world.coordinator.told.pid, world.coordinator.told.epoch
    world.cluster.fail("EndTxn", again, K.INVALID_PRODUCER_EPOCH)
    txn = stored(older, SHORT)
    world.connect()
    # In the coordinator's numbers of states: 1 is open, 2 and 4 committed, 3 and 5 aborted, 0 opened again.
    first = [] if wrote == "nothing" else [(0, 0), (0, 2), (0, 4), (0, 1)]
    ends = {"committed": [(0, 2), (0, 4), (1, 0)], "aborted": [(1, 3), (1, 5), (2, 0)], "nothing": [(2, 0)]}
    all_of_it = [*first, *ends.get(wrote, [])]
    world.coordinator.steps = [StateRecord(pid, epoch + later, status, frozenset(), 7) for later, status in all_of_it]
    raised = {"committed": COMMITTED, "aborted": Fenced, "nothing": EvidenceLost}
    expected = raised.get(wrote, errors.OutcomeUnknown)
    with within(SHORT), nullcontext() if expected is None else pytest.raises(expected):
        txn.commit()
    wanted = {"committed": Outcome.COMMITTED, "aborted": Outcome.ABORTED}.get(wrote, Outcome.UNKNOWN)
    assert txn.outcome is wanted


OPENINGS: list[tuple[int, type[TxnBridgeError] | None, str]] = [
    *[(code, COMMITTED, "") for code in (*RETRIED, K.CONCURRENT_TRANSACTIONS, K.NOT_ENOUGH_REPLICAS)],
    (K.INVALID_TRANSACTION_TIMEOUT, errors.InvalidOption, r"transaction\.max\.timeout\.ms"),
    (K.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, AccessDenied, rf"opening the transactional id {ID}-\d+.0"),
    *[(code, errors.BrokerUnavailable, rf"opening the transactional id {ID}-\d+.0") for code in FENCED],
]


@pytest.mark.parametrize(("code", "raised", "says"), OPENINGS, ids=title)
def test_a_program_sees_the_listed_error_when_its_id_cannot_be_opened(world, code, raised, says):
    world.cluster.fail("InitProducerId", code)
    with told(raised, says):
        send(world.connect())
    send(world.connect())


@pytest.mark.offline
@pytest.mark.parametrize("code", [K.UNKNOWN_TOPIC_OR_PART, K.TOPIC_AUTHORIZATION_FAILED], ids=title)
def test_an_id_that_is_opened_anew_asks_about_no_topic_of_earlier_transactions(world: World, bridge: Bridge, code: int):
    with bridge.transaction() as txn:
        txn.send(INPUT, b"1")
    world.cluster.fail("EndTxn", K.INVALID_TXN_STATE)
    with pytest.raises(TransactionAborted):
        one_transaction(world, bridge)
    world.cluster.fail_topic(INPUT, code)
    send(bridge)
    with pytest.raises(errors.NotFound if code == K.UNKNOWN_TOPIC_OR_PART else AccessDenied):
        with bridge.transaction() as txn:
            txn.send(INPUT, b"2")


@pytest.mark.offline
@pytest.mark.parametrize("code", [K.UNKNOWN_TOPIC_OR_PART, K.TOPIC_AUTHORIZATION_FAILED], ids=title)
def test_an_owner_that_cannot_see_the_topic_of_positions_acknowledges(world: World, bridge: Bridge, caplog, code: int):
    world.cluster.fail_topic("__consumer_offsets", code)
    assert one_transaction(world, bridge, acks=True).outcome is Outcome.COMMITTED
    assert ("cannot be looked for" in caplog.text) is (code == K.TOPIC_AUTHORIZATION_FAILED)


@pytest.mark.offline
def test_a_transaction_that_acknowledges_in_a_deleted_topic_is_aborted_at_once_and_the_next_one_is_not(
    world: World, bridge: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_call(monkeypatch, Coordinator, "acknowledge", errors.NotFound(f"there is no topic {INPUT!r}"))
    with told(errors.Conflict, f"group {GROUP}: .*'{INPUT}' any more"):
        with (txn := bridge.transaction()):
            txn.send(TOPIC, b"2")
            acknowledge(world, txn)
            world.coordinator.becomes("Ongoing")
    assert txn.outcome is Outcome.ABORTED
    assert one_transaction(world, bridge, acks=True).outcome is Outcome.COMMITTED


def test_an_owner_that_opens_an_id_while_a_newer_one_does_is_fenced(world: World) -> None:
    armed: list[bool] = []

    def take_over(event: Event) -> None:
        # Between our last look at the log and the broker's answer to our opening.
        if armed and event.name == "step:open" and event.phase == "before":
            armed.clear()
            world.connect()
            world.cluster.fail("InitProducerId", K.PRODUCER_FENCED)

    with listening(take_over):
        bridge = world.connect()
        world.cluster.fail("AddPartitionsToTxn", K.INVALID_PRODUCER_EPOCH)
        with pytest.raises(TransactionAborted):
            send(bridge)
        armed.append(True)
        with pytest.raises(Fenced, match="this owner must stop"):
            send(bridge)
    assert not armed


def test_an_id_that_cannot_be_opened_in_time_says_so(world: World) -> None:
    world.cluster.fail("InitProducerId", *[K.NOT_COORDINATOR] * FOR_EVER)
    with within(SHORT), pytest.raises(errors.DeadlineExceeded, match=rf"opening the transactional id {ID}-\d+.0"):
        world.connect(SHORT)
    world.cluster.heal()
    send(world.connect())


@pytest.mark.parametrize("code", [*RETRIED, *NOT_STORED_YET], ids=title)
def test_a_publisher_tries_again_what_may_yet_be_stored(shared: World, code: int) -> None:
    with shared.bridges[0].publisher() as publisher:
        shared.cluster.fail("Produce", code)
        publisher.send(TOPIC, b"1")
        publisher.flush()


@pytest.mark.parametrize(
    "code",
    [K.MSG_SIZE_TOO_LARGE, K.TOPIC_AUTHORIZATION_FAILED, K.INVALID_PRODUCER_EPOCH, K.OUT_OF_ORDER_SEQUENCE_NUMBER],
    ids=title,
)
def test_a_publisher_whose_message_is_refused_stops_for_good(shared: World, code: int) -> None:
    publisher = shared.bridges[0].publisher()
    shared.cluster.fail("Produce", code)
    publisher.send(TOPIC, b"1")
    for _ in range(2):
        with within(0), pytest.raises(DeliveryFailed):
            publisher.flush()
    with pytest.raises(DeliveryFailed):
        publisher.send(TOPIC, b"2")
    publisher.close()


def looked_at_topic(bridge: Bridge, seconds: float) -> tuple[Transaction, KafkaWriter]:
    txn = bridge.transaction(timeout=seconds)
    writer_of(txn).send_many(TOPIC, [])  # so that the writer has looked at the topic
    return txn, writer_of(txn)


@pytest.mark.parametrize("many", [False, True], ids=["send", "send_many"])
def test_a_client_that_is_full_for_long_is_waited_for_until_the_deadline(world, with_timing, many):
    """Longer than Python's stack is deep."""
    with_timing(buffer_poll=0.0)
    bridge = world.connect()
    send(bridge)
    txn, writer = looked_at_topic(bridge, TIMEOUT)
    produce, refusals = writer.quick[TOPIC], iter(range(5000))

    def full(*message: object, **where: object) -> None:
        for _ in refusals:
            raise BufferError("full")
        produce(*message, **where)

    writer.quick[TOPIC] = full
    with txn:
        txn.send_many(TOPIC, [b"1", b"2"]) if many else txn.send(TOPIC, b"1")
    assert (txn.outcome, writer.messages) == (Outcome.COMMITTED, 1 + many)


@pytest.mark.parametrize("many", [False, True], ids=["send", "send_many"])
def test_a_client_that_stays_full_costs_the_transaction_at_its_deadline(world: World, bridge: Bridge, many: bool):
    txn, writer = looked_at_topic(bridge, SHORT)
    writer.quick[TOPIC] = raising(BufferError("full"))
    with within(SHORT), pytest.raises(errors.DeadlineExceeded, match="waiting for the broker to take messages"):
        with txn:
            txn.send_many(TOPIC, [b"1"]) if many else txn.send(TOPIC, b"1")
    assert txn.outcome is Outcome.ABORTED
