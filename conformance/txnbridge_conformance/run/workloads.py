"""What the processes of a run do, by role. Each function works until its process is asked to stop."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

from txnbridge import Bridge, Decision, HalfTransaction, Message, Transaction, plugins
from txnbridge.errors import Poison, TxnBridgeError
from txnbridge_conformance.history import RecordedCall
from txnbridge_conformance.run.client import Client, read_of, text_of
from txnbridge_conformance.run.processing import ProcessorRecording
from txnbridge_conformance.run.sales import Sales

# One message of so many is poison, and the handler fails for this share of the others.
_POISON_EVERY = 25
_FAILURE_SHARE = 0.005


def write(client: Client) -> None:
    """Run random transactions without a transactional id: committed, aborted and prepared ones."""
    with client.bridge(writers=2) as bridge:
        while not client.stop.wait(client.random.uniform(0, 0.02)):
            _one(client, bridge)


def own(client: Client) -> None:
    """Run random transactions under a transactional id that two processes share. Return to open the id again."""
    with client.bridge(transactional_id=client.plan.owner, writers=1) as bridge:
        while not client.stop.wait(client.random.uniform(0, 0.05)):
            if not _one(client, bridge) and client.random.random() < 0.2:
                return  # open the id again


def _one(client: Client, bridge: Bridge) -> bool:
    """Run a transaction that randomly commits, aborts or prepares. Return whether it was committed or prepared."""
    # A plain client has no prepared transactions.
    way = client.random.choices(("commit", "abort", "prepare"), (5, 2, 0 if client.plan.raw else 2))[0]
    sends = client.sends(client.plan.topic("left"), client.plan.topic("right"))
    return client.transact(bridge, sends, abort=way == "abort", prepare=way == "prepare")


def feed(client: Client) -> None:
    """Send messages to the topic that the copiers read."""
    with client.bridge(writers=1) as bridge:
        while not client.stop.wait(client.random.uniform(0.02, 0.2)):
            client.transact(bridge, client.sends(client.plan.topic("source")))


def publish(client: Client) -> None:
    """Send messages without transactions to the topic that the copiers read."""
    with client.bridge() as bridge, bridge.publisher() as publisher:
        while not client.stop.wait(client.random.uniform(0.02, 0.2)):
            client.publish(publisher, client.sends(client.plan.topic("source")))


def copy(client: Client) -> None:
    """Copy messages as a member of a group: acknowledge the input and send the output in one transaction."""
    plan = client.plan
    with client.bridge(writers=1) as bridge, bridge.consumer(plan.topic("source"), plan.copiers) as consumer:
        while not client.stop.is_set():
            if messages := consumer.poll(client.random.choice((1, 5, 50)), timeout=0.2):
                sends = {(plan.topic("target"), m.partition): [] for m in messages}  # type: ignore[var-annotated]
                for message in messages:
                    sends[plan.topic("target"), message.partition] += client.values(1)
                client.transact(bridge, sends, abort=client.random.random() < 0.2, ack=(plan.copiers, messages))


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
        client.send(txn, call, {(plan.topic("processed"), message.partition): client.values(1)})

    recording = ProcessorRecording(client, plan.processors, plan.dead_letters)
    with plugins.registered(recording), client.bridge(writers=1) as bridge:
        processor = bridge.processor(
            plan.topic("source"),
            group=plan.processors,
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
            for _ in range(client.random.choice((1, 1, 2))):
                wish = client.random.choice(("commit", "commit", "abort", "status"))
                client.finish(bridge, transaction, token, wish)


def _tokens(client: Client) -> Iterator[tuple[str, str]]:
    """Yield transaction and token for a random part of the lines in `Plan.tokens`, as the file grows."""
    client.plan.tokens.touch()
    with open(client.plan.tokens, "rb") as file:
        while not client.stop.is_set():
            line = file.readline()
            if not line.endswith(b"\n"):
                file.seek(-len(line), 1)
                client.stop.wait(0.05)
            elif client.random.random() < 0.6:
                transaction, token = line.decode().split()
                yield transaction, token


def watch(client: Client) -> None:
    """Read, without a group, the two topics of the roles "write" and "own", and record each poll."""
    plan = client.plan
    with client.bridge() as bridge, bridge.consumer([plan.topic("left"), plan.topic("right")]) as consumer:
        known: list[object] = []
        while not client.stop.is_set():
            call = client.recorder.start("poll")
            client.note_assignment(call, consumer, known)
            try:
                messages = consumer.poll(500, timeout=0.5)
            except TxnBridgeError as error:
                call.end("unknown", error=type(error).__name__)
                raise
            call.poll([read_of(message) for message in messages])
            call.end("ok")


def sell(client: Client) -> None:
    """Store half messages whose local work commits, aborts, fails or leaves the decision open. Answer check-backs."""
    sales = Sales(client.plan.sales)

    def execute(txn: HalfTransaction, call: RecordedCall) -> Decision:
        call.note(transaction=txn.id)
        way = client.random.random()
        if way < 0.1:
            raise RuntimeError("the local work failed")
        decision = sales.decide(txn.id, Decision.COMMIT if way < 0.7 else Decision.ABORT)
        return Decision.UNDECIDED if client.random.random() < 0.2 else decision

    def check(transaction: str, messages: object) -> Decision:
        return sales.decide(transaction, Decision.ABORT)

    with client.bridge(writers=1) as bridge:
        with bridge.half_messages(client.plan.sellers, execute=execute, check=check) as halves:
            while not client.stop.wait(client.random.uniform(0, 0.1)):
                client.sell(halves)


WORK: dict[str, Callable[[Client], None]] = {
    "write": write,
    "own": own,
    "feed": feed,
    "publish": publish,
    "copy": copy,
    "process": process,
    "finish": finish,
    "watch": watch,
    "sell": sell,
}
