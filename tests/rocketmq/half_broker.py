"""A broker of a few lines that keeps halves as RocketMQ does: it publishes a half again at each commit."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from txnbridge_rocketmq.client.errors import Disconnected, RemotingError
from txnbridge_rocketmq.client.groups import Membership, Queue
from txnbridge_rocketmq.client.protocol.codes import DISCARDED_TOPIC, HALF_TOPIC, Property, RequestCode, ResponseCode
from txnbridge_rocketmq.client.protocol.frames import RemotingCommand, RpcRequest
from txnbridge_rocketmq.client.protocol.records import OffsetId, decode_records, unpack_properties
from txnbridge_rocketmq.client.protocol.send_requests import CheckBack, HalfAddress
from txnbridge_rocketmq.cluster import RocketMQCluster
from txnbridge_rocketmq.outcome.check_back import CheckBackHandler
from txnbridge_rocketmq.outcome.end_transaction import HalfEnder
from txnbridge_rocketmq.outcome.producer_groups import CheckBackRouter, ProducerGroups
from txnbridge_rocketmq.settings import RocketMQTiming
from txnbridge_rocketmq.settings.broker_config import BrokerConfig
from txnbridge_rocketmq.write.owner import RocketMQOwner
from txnbridge_rocketmq.write.writer import RocketMQPreparedWriter, RocketMQWriter

from tests.core.decisions_kit import MemoryLog
from tests.rocketmq.kit import context_for, java_hash, pairs, settings_for, stored
from txnbridge._decisions.decisions import Decisions
from txnbridge.spi import Begin, Deadline, Identity

HOME = "broker-1"
# The durations for this broker, which answers and indexes at once. All processes have one clock.
FAST = RocketMQTiming(
    clocks_differ=0.0, index_delay=0.0005, index_timeout=0.05, publish_look_up_pause=0.0005, end_pause=0.0005
)
# The immunity time never ends in a test, and unanswered requests expire at once.
TOLD = {"transactionTimeOut": "60000", "waitTimeMillsInTransactionQueue": "1"}


class Killed(BaseException):
    """Raised where a test kills the process."""


@dataclass
class Kept:
    """A half in the half topic, or a copy that the broker wrote for a check-back."""

    topic: str
    queue: int
    properties: dict[str, str]
    body: bytes
    queue_offset: int
    log_offset: int
    born: int = 0
    stored_at: int = field(default_factory=lambda: int(time.time() * 1000))

    @property
    def key(self) -> str:
        return self.properties[Property.UNIQUE_KEY]


@dataclass
class HalfBroker:
    """Answers the requests of many clients. `fault` returns what goes wrong with a request, or None."""

    halves: list[Kept] = field(default_factory=list)
    open: set[int] = field(default_factory=set)  # the offsets in the half topic of open halves
    discarded: list[Kept] = field(default_factory=list)
    published: list[tuple[str, int, dict[str, str], bytes]] = field(default_factory=list)
    locks: dict[str, str] = field(default_factory=dict)
    told: dict[str, str] = field(default_factory=lambda: dict(TOLD))
    fault: Callable[[RpcRequest[Any]], str | int | None] = lambda request: None
    first: int = 0  # the offset in the half topic of the first half that was not dropped by age
    producers: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # by group: client ids and languages
    late: bool = False  # whether the immunity time of all halves is past

    def answer(self, request: RpcRequest[Any]) -> RemotingCommand:
        match request.code:
            case RequestCode.SEND_MESSAGE_V2:
                return self._store(request)
            case RequestCode.END_TRANSACTION:
                return self._end(request.fields)
            case RequestCode.QUERY_MESSAGE:
                return self.found(request.fields)
            case RequestCode.PULL_MESSAGE:
                return self._pull(request.fields)
            case RequestCode.LOCK_BATCH_MQ | RequestCode.UNLOCK_BATCH_MQ:
                return self._lock(request)
            case RequestCode.GET_PRODUCER_CONNECTION_LIST:
                members = [
                    {"clientId": id, "language": language}
                    for id, language in self.producers.get(request.fields["producerGroup"], ())
                ]
                return RemotingCommand(0, 0, 1, body=json.dumps({"connectionSet": members}).encode())
        raise AssertionError(f"{request.action}: nobody asks this here")

    def _store(self, request: RpcRequest[Any]) -> RemotingCommand:
        assert request.fields["f"] == "4", "only halves are sent here"
        properties = unpack_properties(request.fields["i"])
        born = int(request.fields["g"])
        half = self.keep(request.fields["b"], int(request.fields["e"]), dict(properties), request.body, born)
        offset_id = OffsetId("127.0.0.1", 1, half.log_offset)
        return _ok(msgId=str(offset_id), queueId=half.queue, queueOffset=half.queue_offset)

    def keep(self, topic: str, queue: int, properties: dict[str, str], body: bytes, born: int = 0) -> Kept:
        number = len(self.halves)
        self.halves.append(Kept(topic, queue, properties, body, number, 1000 + number, born))
        self.open.add(number)
        return self.halves[-1]

    def half_of(self, fields: Mapping[str, str]) -> Kept:
        return self.halves[int(fields["commitLogOffset"]) - 1000]

    def _end(self, fields: Mapping[str, str]) -> RemotingCommand:
        half = self.half_of(fields)
        assert half.queue_offset == int(fields["tranStateTableOffset"])
        assert half.properties[Property.GROUP] == fields["producerGroup"]
        if self.late and fields["fromTransactionCheck"] != "true":
            return RemotingCommand(ResponseCode.ILLEGAL_OPERATION, 0, 1, remark="immunity is over")
        if fields["commitOrRollback"] == "8":
            self.published.append((half.topic, half.queue, half.properties, half.body))
        self.open.discard(half.queue_offset)
        return _ok()

    def found(self, fields: Mapping[str, str]) -> RemotingCommand:
        """Answer a look-up by key: the newest index entries with the key's hash, 32 or as many as requested."""
        topic, wanted, most = fields["topic"], java_hash(fields["key"]), int(fields["maxNum"])
        if topic == HALF_TOPIC:
            left = self.halves[self.first :]
            found = [self._record(half) for half in left if java_hash(half.key) == wanted]
        else:
            found = [
                stored(body, topic, pairs(**properties), queue=queue, log_offset=5000 + number)
                for number, (at, queue, properties, body) in enumerate(self.published)
                if at == topic and java_hash(properties[Property.UNIQUE_KEY]) == wanted
            ]
        body = b"".join(found[-min(most, 64) :])
        return RemotingCommand(ResponseCode.SUCCESS if found else ResponseCode.QUERY_NOT_FOUND, 0, 1, body=body)

    def _record(self, half: Kept, topic: str = HALF_TOPIC) -> bytes:
        own = {Property.REAL_TOPIC: half.topic, "REAL_QID": str(half.queue)}
        properties = pairs(**half.properties, **own)
        return stored(
            half.body,
            topic,
            properties,
            queue=0,
            queue_offset=half.queue_offset,
            log_offset=half.log_offset,
            born=half.born,
            stored_at=half.stored_at,
        )

    def discard(self) -> None:
        """Discard the open halves, as after the last check-back."""
        self.discarded += [half for half in self.halves if half.queue_offset in self.open]
        self.open.clear()

    def _pull(self, fields: Mapping[str, str]) -> RemotingCommand:
        at, topic = int(fields["queueOffset"]), fields["topic"]
        halves, first = (self.discarded, 0) if topic == DISCARDED_TOPIC else (self.halves, self.first)
        bounds = {"minOffset": str(first), "maxOffset": str(len(halves))}
        if at < first:
            return RemotingCommand(ResponseCode.PULL_OFFSET_MOVED, 0, 1, {"nextBeginOffset": str(first), **bounds})
        found = halves[at:][: int(fields["maxMsgNums"])]
        code = ResponseCode.SUCCESS if found else ResponseCode.PULL_NOT_FOUND
        body = b"".join(self._record(half, topic) for half in found)
        return RemotingCommand(code, 0, 1, {"nextBeginOffset": str(at + len(found)), **bounds}, body=body)

    def age(self, keep: int = 0) -> None:
        """Drop what is published and all halves but the last `keep`, as retention does."""
        self.published.clear()
        self.first = len(self.halves) - keep

    def _lock(self, request: RpcRequest[Any]) -> RemotingCommand:
        asked = json.loads(request.body)
        held = []
        for each in asked["mqSet"]:
            if request.code == RequestCode.UNLOCK_BATCH_MQ:
                if self.locks.get(each["topic"]) == asked["clientId"]:
                    del self.locks[each["topic"]]
            elif self.locks.setdefault(each["topic"], asked["clientId"]) == asked["clientId"]:
                held.append(each)
        return RemotingCommand(0, 0, 1, body=json.dumps({"lockOKMQSet": held}).encode())

    def ask(self) -> list[CheckBack]:
        """Run a round of check-backs: write each open half again, and return a check-back for each."""
        asked = []
        for number in sorted(self.open):
            old = self.halves[number]
            times = int(old.properties.get(Property.CHECKS, 0)) + 1
            self.open.discard(number)
            half = self.keep(old.topic, old.queue, {**old.properties, Property.CHECKS: str(times)}, old.body, old.born)
            (record,) = decode_records(self._record(half))
            group = half.properties[Property.GROUP]
            place = HalfAddress(half.topic, group, half.queue_offset, half.log_offset, half.key)
            asked.append(CheckBack(place, record, HOME))
        return asked

    def seen(self, topic: str, queue: int = 0) -> list[bytes]:
        """Return the bodies in a queue, with all duplicates."""
        return [body for at, number, _, body in self.published if (at, number) == (topic, queue)]


def _ok(**fields: object) -> RemotingCommand:
    return RemotingCommand(0, 0, 1, {name: str(value) for name, value in fields.items()})


def same_hash(key: str) -> str:
    """Return another key with the same hash."""
    return key[:-2] + chr(ord(key[-2]) - 1) + chr(ord(key[-1]) + 31)


class HalfClient:
    """The connection of one process to a `HalfBroker`."""

    def __init__(self, broker: HalfBroker, client_id: str) -> None:
        self.broker, self.client_id = broker, client_id
        self.is_member = True

    def brokers(self, timeout: float) -> dict[str, str]:
        return {HOME: "127.0.0.1:1"}

    def join(self, membership: Membership, timeout: float) -> None:
        """Do nothing: the tests pass the check-backs themselves."""

    def submit(self, broker: str, request: RpcRequest[Any], timeout: float) -> Any:
        return _Call(self.broker, request)

    def call(self, broker: str, request: RpcRequest[Any], timeout: float) -> Any:
        return _Call(self.broker, request).result()

    def call_all(self, asked: Sequence[tuple[str, RpcRequest[Any]]], timeout: float) -> list[Any]:
        return [_Call(self.broker, request).result_or_error() for _, request in asked]


class _Call:
    """A request, carried out at once. "lose request", "lose answer", or a response code, is the fault that it meets."""

    def __init__(self, broker: HalfBroker, request: RpcRequest[Any]) -> None:
        self.request = request
        self._error = Disconnected(f"{request.action}: lost", may_have_had_effect=True)
        fault = broker.fault(request)
        self._heard = fault is None or isinstance(fault, int)
        if isinstance(fault, int):
            kept = fault == ResponseCode.FLUSH_DISK_TIMEOUT  # the broker has stored it, but not on its disk
            self._answer = RemotingCommand(fault, 0, 1, broker.answer(request).fields if kept else {})
        elif fault != "lose request":
            self._answer = broker.answer(request)

    def result(self) -> Any:
        if not self._heard:
            raise self._error
        return self.request.result(self._answer)

    def result_or_error(self) -> Any:
        try:
            return self.result()
        except RemotingError as error:
            return error


class _Topics:
    home = HOME
    names: Sequence[str] = ()

    def all(self, deadline: Deadline) -> Sequence[str]:
        return self.names

    def require(self, topic: str, partition: int | None, deadline: Deadline) -> tuple[Queue, ...]:
        return tuple(Queue(topic, HOME, number) for number in range(2))


@dataclass
class _Brokers:
    broker: HalfBroker

    def names(self, deadline: Deadline) -> list[str]:
        return [HOME]

    def config(self, name: str, deadline: Deadline, fresh: bool = False) -> BrokerConfig:
        return BrokerConfig(name, self.broker.told)


class Process:
    """One process of an application: all of the writing side except the connection."""

    def __init__(self, broker: HalfBroker, log: MemoryLog, name: str, id: str | None = None, **timing: float) -> None:
        self.decisions = Decisions(log, timeout=5, name="tests", host=name)
        client = cast(Any, HalfClient(broker, name))
        context = context_for(ledger=lambda application, id: self.decisions.ledger(id))
        self.cluster = RocketMQCluster(
            "cluster",
            settings_for("rocketmq://x:1", timing=replace(FAST, **cast(Any, timing))),
            client,
            cast(Any, _Topics()),
            cast(Any, _Brokers(broker)),
            ProducerGroups(client, CheckBackRouter()),
            context,
        )
        self.ender = HalfEnder(self.cluster)
        self.checks = CheckBackHandler(self.ender)
        identity = Identity(id or name, id is not None, "tests", name)
        self.owner = RocketMQOwner(self.cluster, identity, self.decisions.ledger(identity.name), self.ender)
        self.id = identity.name

    def end_discarded(self) -> float:
        """End the half messages that the broker has discarded; return the seconds until that is due again."""
        return self.checks._end_discarded_once()

    def begin(self, number: int = 1, timeout: float = 5, hold: float | None = None) -> RocketMQWriter:
        """Return a writer with an open transaction, which is to be prepared if `hold` is given."""
        deadline = Deadline(5)
        if hold is None:
            (writer,) = self.owner.open_writers(1, deadline)
        else:
            writer = self.owner.prepare_writer(deadline)
        assert isinstance(writer, RocketMQWriter | RocketMQPreparedWriter)
        writer.begin(Begin(f"{self.id}/x/{number}", Deadline(timeout), hold is not None, hold))
        return writer


def send(writer: RocketMQWriter, topic: str, *values: bytes) -> None:
    for value in values:
        writer.send(topic, value, None, None, 0, None)


def once(broker: HalfBroker, code: int, fault: str | int, nth: int = 1) -> None:
    """Let the `nth` request of a kind meet a fault."""
    count = 0

    def found(request: RpcRequest[Any]) -> str | int | None:
        nonlocal count
        count += request.code == code
        return fault if request.code == code and count == nth else None

    broker.fault = found


def wait_for_deadline(writer: Any) -> None:
    while time.time() * 1000 <= writer.evidence().expires_at:
        time.sleep(0.001)
