"""The work of a run's processes, one function for each role. It works until its process is asked to stop."""

from __future__ import annotations

import functools
import heapq
import itertools
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

from txnbridge import Bridge, Capability, Consumer, Decision, HalfTransaction, Message, TokenState, Transaction, plugins
from txnbridge.errors import EvidenceLost, Poison
from txnbridge_conformance.history import RecordedCall
from txnbridge_conformance.run.bodies import sent_as, text_of
from txnbridge_conformance.run.client import (
    LONGEST_SALE,
    SALE_SECONDS,
    SINGLE_SECONDS,
    Client,
    ProcessorRecording,
    read_of,
)
from txnbridge_conformance.run.plan import PARTITIONS
from txnbridge_conformance.run.sales import Sales

# One message in this many is poison, and the handler fails for this share of the others.
_POISON_EVERY = 25
_FAILURE_SHARE = 0.005
# The delays of retries, in seconds: as many messages each need one of them, two, or more than there are.
_RETRIES = (0.2, 0.5)
# The newest part of the file of tokens, in bytes.
_NEWEST_TOKENS = 20_000
# The threads of the role "write" that share one bridge: more than its writers, so that they commit together.
_THREADS = 4
# The longest pause of most transactions: in it another owner can open the id, or the broker can be restarted.
_LONGEST_PAUSE = 2.0
# The calls of the role "finish" for one token. The outcome that a status tells has to be that of the next calls.
_WISHES = (("commit",), ("commit", "abort"), ("abort",), ("abort", "commit"), ("status", "commit", "status"))
# The share of tokens that the role "finish" puts off, and for how many seconds at most: half of them until long after
# most holds, at whose ends brokers abort transactions.
_LATE_SHARE, _LATEST = 0.2, (8.0, 50.0)
# The shares of the messages with a member of a group that shares partitions which one transaction acknowledges; how
# often such a member sleeps, and the longest sleep in seconds, behind which others have got its messages.
_PARTS, _SLEEPING_SHARE, _LONGEST_SLEEP = (0.1, 0.5, 1), 0.05, 6.0
# The share of polls of which a member gives messages back.
_GIVING_BACK_SHARE = 0.05
# The share of prepared transactions whose member leaves its group before they are decided, and the longest time until
# anybody can decide them; and the share of those behind which the member reads on, with the chance of each poll to be
# the last one before the decision.
_LEAVING_SHARE = 0.25
_READING_ON_SHARE, _DECIDING_SHARE = 0.3, 0.3
_LATE_SECONDS = 6.0
# The deadlines of transactions that oversleep them, and of some that are prepared, in seconds.
_SHORT_DEADLINE, _HELD_DEADLINE = 1.0, 2.0
# The deadline of half messages about which the local work and the check-back answer differently, in seconds.
_DISPUTED_DEADLINE = 0.5


def write(client: Client) -> None:
    """Run random transactions without a transactional id in several threads: some commit, some abort, some prepare."""
    with client.bridge(writers=2) as bridge:
        _work_in_threads(client, bridge, _THREADS, pauses=0.05, leaving=0)


def own(client: Client) -> None:
    """Run random transactions under an id that two processes share; return at times, so that the id is opened again."""
    with client.bridge(transactional_id=client.plan.named("owner"), writers=2) as bridge:
        # What an owner does that was fenced must not take effect, also while the new owner is idle.
        client.stop.wait(client.random.choice((0, client.random.uniform(0, _LONGEST_PAUSE))))
        # In a pause the other owner may open the id: what is then prepared or committed must not take effect.
        _work_in_threads(client, bridge, 2, pauses=0.3, leaving=0.2)


def _work_in_threads(client: Client, bridge: Bridge, threads: int, pauses: float, leaving: float) -> None:
    """Run random transactions until the run stops.

    After a failed transaction return with the probability `leaving`. A transaction pauses with the probability
    `pauses`.
    """
    over = threading.Event()

    def work(thread: int) -> None:
        while not over.is_set() and not client.stop.wait(client.random.uniform(0, 0.02)):
            if not _one(client, bridge, pauses, thread) and client.random.random() < leaving:
                over.set()

    numbers = range(1 if client.plan.raw else threads)
    with ThreadPoolExecutor(len(numbers)) as pool:
        list(pool.map(work, numbers))


def _one(client: Client, bridge: Bridge, pauses: float, thread: int) -> bool:
    """Run a transaction, chosen at random: committed, aborted, prepared, or failing before it is prepared.

    `pauses` is the share of transactions that pause. Return whether the transaction was committed or prepared.
    """
    can_prepare = bool(bridge.capabilities[Capability.PREPARE])
    ways = ("commit", "abort", "prepare", "fail")
    way = client.random.choices(ways, (5, 2, 2, 1) if can_prepare else (5, 2, 0, 0))[0]
    topics = client.plan.named("left"), client.plan.named("right")
    single = way == "commit" and client.random.random() < 0.3
    sends = client.single(*topics) if single else client.sends(*topics)
    abort, prepare = way in ("abort", "fail"), way in ("prepare", "fail")
    # A few come close to their deadline, or pass it: then brokers ask back, and the end is late.
    longest = client.plan.timeout * 1.1 if client.random.random() < 0.1 else _LONGEST_PAUSE
    pause = client.random.uniform(0, longest) if client.random.random() < pauses else 0.0
    # Some are prepared with a short deadline: they have to be held beyond it.
    timeout = SINGLE_SECONDS if single else client.random.choice((None, _HELD_DEADLINE)) if prepare else None
    txn = client.transact(bridge, sends, abort=abort, prepare=prepare, timeout=timeout, pause=pause, thread=thread)
    client.publish_token(txn)
    return txn is not None


def oversleep(client: Client) -> None:
    """Run transactions with a short deadline, and request their end after it: they must not take effect."""
    with client.bridge(writers=1) as bridge:
        while not client.stop.is_set():
            sends = client.sends(client.plan.named("left"), client.plan.named("right"))
            pause = _SHORT_DEADLINE + client.random.uniform(0, 1)
            prepare = bool(bridge.capabilities[Capability.PREPARE]) and client.random.random() < 0.3
            client.publish_token(client.transact(bridge, sends, prepare=prepare, timeout=_SHORT_DEADLINE, pause=pause))


def decide(client: Client) -> None:
    """Claim random decisions on ids of a decision log: on new ids, as other processes do, too, and on older ones."""
    with client.bridge(writers=1, application=client.plan.named("owner")) as bridge:
        decisions = bridge.decisions()
        while not client.stop.wait(client.random.uniform(0, 0.1)):
            name = f"{client.plan.prefix}-{int(time.time() * 10) - client.random.choice((0, 0, 0, 1, 30))}"
            wish = client.random.choice((Decision.COMMIT, Decision.ABORT))
            fields = {"transaction": name, "wish": wish.value, "deadline": client.plan.timeout}
            with client.recorded("claim", **fields) as call:
                claim = decisions.claim(name, wish)
                call.note(outcome="committed" if claim.decision is Decision.COMMIT else "aborted")


def feed(client: Client) -> None:
    """Send messages to the topic that the copiers read."""
    with client.bridge(writers=1) as bridge:
        while not client.stop.wait(client.random.uniform(0.02, 0.2)):
            source = client.plan.named("source")
            many = {(source, client.random.randrange(PARTITIONS)): client.values(client.random.randint(2, 50))}
            client.transact(bridge, many if client.random.random() < 0.3 else client.sends(source))


def publish(client: Client) -> None:
    """Send messages without transactions to the topic that the copiers read.

    If the broker keeps sequences, send also messages with one that an earlier process has used: they take no effect.
    """
    source = client.plan.named("source")
    with client.bridge() as bridge, ExitStack() as stack:
        name = client.plan.named("publisher") if bridge.capabilities[Capability.RESUME_SEQUENCE] else None
        publisher = stack.enter_context(bridge.publisher(name))
        to: Any = publisher
        if name:
            try:
                last = publisher.last_sequence(source)
            except EvidenceLost:  # a message has failed
                publisher, last = stack.enter_context(bridge.publisher(client.values(1)[0])), None
            if last is not None:
                call = client.recorder.start("publish")
                client.send(_numbered(publisher, itertools.repeat(last)), call, client.sends(source))
                publisher.flush()
                call.end("fail")
            to = _numbered(publisher, itertools.count(0 if last is None else last + 1))
        while not client.stop.wait(client.random.uniform(0.02, 0.2)):
            with client.recorded("publish", deadline=client.plan.timeout) as call:
                client.send(to, call, client.sends(source))
                publisher.flush()


def _numbered(publisher: Any, numbers: Iterator[int]) -> Any:
    return SimpleNamespace(send=lambda *sent, **how: publisher.send(*sent, **how, sequence=next(numbers)))


def share(client: Client) -> None:
    """Copy messages as `copy` does, in a group whose members share partitions; a transaction takes a part of them."""
    copy(client, "sharers")


def copy(client: Client, name: str = "copiers") -> None:
    """Copy messages as a member of a group: acknowledge the input and send the output in one transaction.

    A transaction that was prepared is ended by its token. If it is then not committed, return: the program calls this
    again, and the new consumer gets the messages again. Sometimes the member leaves its group before that, so that the
    next member meets acknowledgements that are not decided yet, and sometimes the member itself reads on before.
    """
    plan = client.plan
    with client.bridge(writers=1) as bridge:
        group, sharing = plan.named(name), plan.sharing(plan.named(name), bridge.capabilities)
        with bridge.consumer(plan.named("source"), group, sharing=sharing) as consumer:
            left = _copy_until_undecided(client, bridge, consumer, group, sharing)
        if left is not None:
            client.stop.wait(client.random.uniform(0, _LATE_SECONDS))
            client.publish_token(left)


def _copy_until_undecided(
    client: Client, bridge: Bridge, consumer: Consumer, group: str, sharing: str
) -> Transaction | None:
    """Copy messages until a prepared transaction is not committed. Return it if nobody knows its token yet."""
    plan = client.plan
    undecided: Transaction | None = None
    held: dict[object, Message] = {}  # those that no transaction has taken yet, by topic, partition and position
    unsure: set[int] = set()  # partitions of which a transaction failed since the last one that was committed
    while not client.stop.is_set():
        closing = plan.closing.exists()  # a long run leaves much behind: it is copied without pauses
        messages: Sequence[Message] = consumer.poll(50 if closing else client.random.choice((1, 5, 50)), timeout=0.2)
        messages = _part_of(client, held, messages) if sharing != "partition" else messages
        if undecided is not None and client.random.random() < _DECIDING_SHARE:
            _end_prepared(client, bridge, undecided)
            undecided = None
        if not closing and undecided is None and len(messages) and client.random.random() < _GIVING_BACK_SHARE:
            messages = _give_back(client, bridge, consumer, messages, unsure, sharing)
        if messages:
            sends = {(plan.named("target"), m.partition): [] for m in messages}  # type: ignore[var-annotated]
            for message in messages:
                sends[plan.named("target"), message.partition] += client.values(1)
            prepares = 3 if bridge.capabilities[Capability.PREPARE] else 0
            way = client.random.choices(("commit", "abort", "prepare"), (7, 2, prepares))[0]
            abort, prepare = not closing and way == "abort", not closing and way == "prepare"
            pause = 0 if closing else client.random.choice((0, 0, 0, client.random.uniform(0, _LONGEST_PAUSE)))
            ack = (group, messages)
            txn = client.transact(bridge, sends, abort=abort, prepare=prepare, ack=ack, sharing=sharing, pause=pause)
            (unsure.difference_update if txn else unsure.update)({each.partition for each in messages})
            if txn and prepare:
                if client.random.random() < _LEAVING_SHARE:
                    return txn
                client.publish_token(txn)
                if undecided is None and client.random.random() < _READING_ON_SHARE:
                    undecided = txn
                elif not _end_prepared(client, bridge, txn):
                    return None
    return None


def _part_of(client: Client, held: dict[object, Message], polled: Iterable[Message]) -> list[Message]:
    """Add messages to those that a member holds; remove and return a random part of them, at the end of a run all."""
    held.update((message[:3], message) for message in polled)
    closing = client.plan.closing.exists()
    if not closing and client.random.random() < _SLEEPING_SHARE:
        client.stop.wait(client.random.uniform(0, _LONGEST_SLEEP))
    part = 1 if closing else client.random.choice(_PARTS)
    return [held.pop(key) for key in list(held) if client.random.random() < part]


def _give_back(
    client: Client, bridge: Bridge, consumer: Consumer, messages: Sequence[Message], unsure: set[int], sharing: str
) -> Sequence[Message]:
    """Give back messages from a random one on by a nack, or all by a seek, if the broker can. Return those it keeps.

    A seek in the `unsure` partitions would pass over messages that no transaction has acknowledged.
    """
    at, can = client.random.randrange(len(messages)), bridge.capabilities
    if client.plan.raw or not (can[Capability.REDELIVERY] and can[Capability.REPLAY]):
        return messages
    with client.recorded("give back"):
        seeks = sharing == "partition" and unsure.isdisjoint(each.partition for each in messages)
        if seeks and client.random.random() < 0.5:
            at = 0
            consumer.seek({(each.topic, each.partition): each.position for each in reversed(messages)})
        else:
            consumer.nack(messages[at:])
    return messages[:at]


def _end_prepared(client: Client, bridge: Bridge, txn: Transaction) -> bool:
    """End a prepared transaction, unless the role "finish" has ended it before. Return whether it is committed."""
    client.stop.wait(client.random.uniform(0, 0.5))
    wish = "commit" if client.plan.closing.exists() else client.random.choice(("commit", "commit", "abort"))
    client.finish(bridge, txn.id, str(txn.token), wish, deadline=client.plan.timeout)
    return bridge.status(str(txn.token)).state is TokenState.COMMITTED


def process(client: Client) -> None:
    """Run a processor in a group of its own: some messages are poison, and some calls of its handler fail."""
    plan = client.plan

    def each(message: Message, txn: Transaction) -> None:
        poison = zlib.crc32(text_of(message).encode()) % _POISON_EVERY == 0
        call = recording.handle(message, poison)
        if poison:
            raise Poison("this message is poison in every attempt")
        if client.random.random() < _FAILURE_SHARE:
            raise RuntimeError("the handler failed")
        client.send(txn, call, {(plan.named("processed"), message.partition): client.values(1)})

    recording = ProcessorRecording(client, plan.named("processors"), plan.dead_letters)
    with plugins.registered(recording), client.bridge(writers=1) as bridge:
        processor = bridge.processor(
            plan.named("source"),
            group=plan.named("processors"),
            each=each,
            dead_letter=plan.dead_letters,
            max_dead_letters_in_a_row=None,
            max_messages=client.random.choice((1, 10, 100)),
            max_wait=0.05,
            backoff=(0.05, 1.0),
            stop_timeout=plan.timeout,
        )
        with processor:
            while processor.healthy and not client.stop.wait(0.2):
                pass


def finish(client: Client) -> None:
    """Commit or abort prepared transactions of other processes by token, or ask for their status; some twice."""
    with client.bridge(writers=1) as bridge:
        for transaction, token in _tokens(client):
            for wish in client.random.choice(_WISHES):
                if not client.stop.is_set():  # with a broker that is away each call takes its whole deadline
                    client.finish(bridge, transaction, token, wish, deadline=client.plan.timeout)


def _tokens(client: Client) -> Iterator[tuple[str, str]]:
    """Yield transaction and token for a random part of the lines in `Plan.tokens`, as the file grows: some late.

    Most calls begin near the end of the file: in a long run one that begins with the oldest tokens never reaches the
    newest.
    """
    late: list[tuple[float, str, str]] = []  # with the time from which on to yield each
    client.plan.tokens.touch()
    with open(client.plan.tokens, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _NEWEST_TOKENS) if client.random.random() < 0.8 else 0)
        file.readline()  # skips the rest of a line, or the first token of a whole file
        while not client.stop.is_set():
            if late and late[0][0] < time.monotonic():
                yield heapq.heappop(late)[1:]
            line = file.readline()
            if not line.endswith(b"\n"):
                file.seek(-len(line), 1)
                client.stop.wait(0.05)
            elif client.random.random() < 0.6:
                transaction, token = line.decode().split()
                if client.random.random() < _LATE_SHARE:
                    due = time.monotonic() + client.random.uniform(0, client.random.choice(_LATEST))
                    heapq.heappush(late, (due, transaction, token))
                else:
                    yield transaction, token


def watch(client: Client) -> None:
    """Read, without a group, the topics of the roles "write", "own" and "span", and record each poll."""
    _watch(client, client.plan.named("left"), client.plan.named("right"), client.plan.spanned[0])


def witness(client: Client) -> None:
    """Read, without a group, the second topic of the role "span", on the second broker, and record each poll."""
    _watch(client.at_second(), client.plan.spanned[1])


def _watch(client: Client, *topics: str) -> None:
    with client.bridge() as bridge, bridge.consumer(list(topics)) as consumer:
        known: object = None
        while not client.stop.is_set():
            with client.recorded("poll", deadline=client.plan.timeout) as call:
                if (now := consumer.assignment) != known:
                    call.assign(known := now)
                call.poll([read_of(message) for message in consumer.poll(500, timeout=0.5)])


def sell(client: Client) -> None:
    """Store half messages whose local work commits, aborts, fails, is late or undecided. Answer most check-backs.

    For a few transactions, whose deadline is short, `check` answers ABORT after the deadline, and `execute` answers
    COMMIT, mostly later. The broker must say to both which answer was the first.
    """
    sales = Sales(client.plan.sales)
    chance = client.random.random

    def execute(txn: HalfTransaction, call: RecordedCall) -> Decision:
        call.note(transaction=txn.id, begun=time.monotonic_ns())
        if txn.deadline <= _DISPUTED_DEADLINE:
            sales.decide(txn.id, Decision.UNDECIDED)
            client.stop.wait(_DISPUTED_DEADLINE + client.random.uniform(0.2, 1.2))
            call.note(ending=time.monotonic_ns())
            return Decision.COMMIT
        if chance() < 0.1:
            raise RuntimeError("the local work failed")
        if chance() < 0.02:
            client.stop.wait(LONGEST_SALE)
        decision = sales.decide(txn.id, Decision.COMMIT if chance() < 0.7 else Decision.ABORT)
        if chance() < 0.1:
            raise RuntimeError("the process failed after the local work")
        call.note(ending=time.monotonic_ns())
        return Decision.UNDECIDED if chance() < 0.1 else decision

    def check(transaction: str, messages: Sequence[Message]) -> Decision:
        client.note_check(transaction, messages)
        if chance() < 0.1:
            raise RuntimeError("the database is away")
        # Only the first time, because a broker may wait longer from one check-back to the next.
        again = messages[0].deliveries < 2 and chance() < 0.5
        return Decision.UNDECIDED if again else sales.decide(transaction, Decision.ABORT)

    with client.bridge(writers=1) as bridge:
        with bridge.half_messages(client.plan.named("sellers"), execute=execute, check=check) as halves:
            while not client.stop.wait(client.random.uniform(0, 0.1)):
                if chance() < 0.3:
                    client.sell(halves, SINGLE_SECONDS, client.single(*client.plan.sold))
                else:
                    timeout = _DISPUTED_DEADLINE if chance() < 0.1 else SALE_SECONDS
                    client.sell(halves, timeout, client.sends(*client.plan.sold))


def span(client: Client) -> None:
    """Run random transactions over the run's broker and the second one: committed, aborted, failing in their block."""
    second = client.at_second()
    with client.bridge() as bridge, second.bridge() as other:
        here, there = client.plan.spanned
        while not client.stop.wait(client.random.uniform(0, 0.05)):
            client.span(((client, bridge, here), (second, other, there)))


def serve(client: Client) -> None:
    """Run a processor with retries, one with a database, which also gets the first one's dead letters, and a relay.

    Each call of a handler is recorded as a transaction with an unknown result: its output shows whether it took effect.
    """
    import sqlalchemy

    from txnbridge.sql import Outbox

    plan = client.plan
    source, failed, servers, keepers = map(plan.named, ("source", "failed", "servers", "keepers"))
    engine = sqlalchemy.create_engine(f"sqlite:///{plan.folder}/services.db", connect_args={"timeout": 60})
    outbox = Outbox("services")
    outbox.create(engine)

    def take(message: Message, group: str, to: Any, topic: str) -> None:
        call = client.recorder.start("transaction")
        call.ack(group, [text_of(message)])
        client.send(to, call, {(plan.named(topic), message.partition): client.values(1)})
        call.end("unknown")

    def answer(message: Message, txn: Transaction) -> None:
        failures = zlib.crc32(sent_as(message).encode()) % _POISON_EVERY
        if message.deliveries <= (_POISON_EVERY if failures == 0 else failures if failures <= len(_RETRIES) else 0):
            raise RuntimeError("the handler failed")
        take(message, servers, txn, "processed")

    def keep(message: Message, db: Any) -> None:
        group = servers if message.topic == failed else keepers
        take(message, group, SimpleNamespace(send=functools.partial(outbox.send, db)), "target")

    with client.bridge(writers=2, create_topics=PARTITIONS) as bridge, ExitStack() as stack:
        more: Any = {"max_dead_letters_in_a_row": None, "backoff": (0.05, 1.0), "stop_timeout": plan.timeout}
        many: Any = {"retry": _RETRIES, "concurrency": client.random.choice((1, 4))}
        services = (
            bridge.processor(source, group=servers, each=answer, dead_letter=failed, **many, **more),
            bridge.processor([source, failed], group=keepers, each=keep, db=engine, **more),
            bridge.relay(outbox, engine),
        )
        for service in services:
            stack.enter_context(service)
        while all(service.healthy for service in services) and not client.stop.wait(0.2):
            pass


_ROLES = (write, own, oversleep, decide, feed, publish, copy, share, process, finish, watch, sell, span, witness, serve)
WORK: dict[str, Callable[[Client], None]] = {role.__name__: role for role in _ROLES}
