"""Messages that a handler could not process wait in a retry topic, on the embedded broker."""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from txnbridge_conformance.observing import eventually

import txnbridge
from tests.conformance.broken import around
from tests.core.processor_kit import WITHIN_A_TRANSACTION, Fresh, numbers, url_of, values
from tests.failing import raising
from tests.inside import consumers_of, reader_of
from txnbridge import Batch, Bridge, Message, Outcome, Topic, Transaction, codecs, errors
from txnbridge._base.messages import Headers
from txnbridge._process.input_topics import InputTopics
from txnbridge._process.inputs import ProcessorInputs, RetryConsumer
from txnbridge._process.origin import origin_headers
from txnbridge._process.processor import Processor
from txnbridge._process.redrive import Redrive
from txnbridge._process.retries import PREFIX, WaitingMessage, retry_group, retry_topic
from txnbridge.testing import next_commit

NEVER = 3600.0  # seconds: longer than any test
SOON = 0.2
HEADERS = {"kind": "new"}
INPUT = InputTopics([Topic("in")], ())


@pytest.fixture
def url(tmp_path: Path) -> str:
    return url_of(tmp_path)


@pytest.fixture
def bridge(url: str) -> Iterator[Bridge]:
    with txnbridge.connect(url) as opened:
        opened.ensure_topics("in", "out", "dead")
        yield opened


def feed(bridge: Bridge, *values: bytes, topic: str = "in") -> None:
    with bridge.transaction() as txn:
        for value in values:
            txn.send(topic, value, key=b"k" + value, headers=HEADERS)


def put_waiting(
    bridge: Bridge, value: bytes, delay: float, due_in: float = 0.0, topic: str = "in", at: int = 0, number: int = 1
) -> None:
    """Send a message to a retry topic, as if it had failed some time ago."""
    original = Message(topic, 0, (at,), None, value, Headers(), 42, 1, None)
    headers = [
        *origin_headers(PREFIX, original, "g", KeyError("no stock"), 1, "t"),
        (PREFIX + "number", b"%d" % number),
        (PREFIX + "due", b"%d" % ((time.time() + due_in) * 1000)),
    ]
    with bridge.transaction() as txn:
        txn.send(retry_topic("g", delay), value, headers=headers)


class Failing:
    """Copies messages, but fails for the value `bad` so many times."""

    def __init__(self, times: int = 1_000_000) -> None:
        self.times = times
        self.tried: list[Message] = []

    def __call__(self, message: Message, txn: Transaction) -> None:
        if message.value == b"bad":
            self.tried.append(message)
            if len(self.tried) <= self.times:
                raise KeyError("no stock")
        txn.send("out", message.value)


def run(bridge: Bridge, **settings: object) -> Processor:
    given = {"inputs": "in", "group": "g", "dead_letter": "dead", "backoff": (0.01, 0.05), **settings}
    processor: Processor = bridge.processor(**given)  # type: ignore[arg-type]
    processor.run(until_idle=True)
    return processor


def run_until(bridge: Bridge, true: Callable[[], bool], **settings: object) -> Processor:
    """Run again and again, as a process that restarts: what waits is due some time."""
    deadline = time.monotonic() + 60
    while True:
        processor = run(bridge, **settings)
        if true():
            return processor
        assert time.monotonic() < deadline


def test_a_failed_message_goes_to_the_retry_topic_in_the_transaction_that_acknowledges_it(bridge):
    feed(bridge, b"0", b"bad", b"2")
    processor = run(bridge, each=Failing(), retry=[NEVER])  # it does not wait for what is not due
    assert values(bridge, "out") == [b"0", b"2"]
    # What comes before it is committed first.
    assert (processor.stats.transactions, processor.stats.messages, processor.stats.delayed) == (2, 3, 1)
    (waiting,) = bridge.read("g-retry-3600s", limit=10)
    origin = WaitingMessage.of(waiting)
    assert origin is not None
    assert (waiting.value, waiting.key, waiting.headers["kind"]) == (b"bad", b"kbad", "new")
    assert (origin.topic, origin.position, origin.group, origin.attempts) == ("in", (1,), "g", 1)
    assert (origin.number, origin.reason) == (1, "KeyError: 'no stock'")
    assert abs(origin.due / 1000 - time.time() - NEVER) < 600


def test_a_message_that_is_due_is_processed_as_the_original(bridge):
    bridge.admin.create_topic("in")
    feed(bridge, b"bad")
    handler = Failing(times=1)
    run_until(bridge, lambda: values(bridge, "out") == [b"bad"], each=handler, retry=[SOON])
    first, second = handler.tried
    assert second[:7] == first[:7] == bridge.read("in", limit=1)[0][:7]
    assert second.deliveries > first.deliveries


def test_no_message_is_processed_before_it_is_due(bridge):
    feed(bridge, b"bad")
    at: list[float] = []

    def fail_once(message: Message, txn: Transaction) -> None:
        at.append(time.time())
        if len(at) == 1:
            raise ValueError

    with bridge.processor("in", group="g", each=fail_once, retry=[1.5]):
        eventually(lambda: len(at) == 2, "it was not tried again")
    assert at[1] - at[0] >= 1.5


def test_a_message_is_decoded_as_those_of_its_original_topic(bridge):
    feed(bridge, b'{"n": 1}', topic="json")
    seen: list[object] = []

    def fail_once(message: Message, txn: Transaction) -> None:
        seen.append(message.value)
        if len(seen) == 1:
            raise ValueError

    run_until(bridge, lambda: len(seen) == 2, inputs=Topic("json", codecs.json), each=fail_once, retry=[SOON])
    assert seen == [{"n": 1}] * 2


def test_a_message_that_waits_holds_only_its_retry_partition(bridge):
    put_waiting(bridge, b"waits", NEVER, due_in=NEVER)
    put_waiting(bridge, b"behind", NEVER)
    put_waiting(bridge, b"due", SOON)
    feed(bridge, b"0")
    run(bridge, each=Failing(), retry=[SOON, NEVER])
    assert sorted(values(bridge, "out")) == [b"0", b"due"]


def test_a_due_time_that_is_later_than_the_delay_holds_no_partition_for_longer(bridge):
    for number in range(3):
        put_waiting(bridge, b"%d" % number, SOON, due_in=NEVER)
    put_waiting(bridge, b"later", NEVER, due_in=NEVER)
    with bridge.processor("in", group="g", each=Failing(), retry=[SOON, NEVER]):
        eventually(lambda: values(bridge, "out") == numbers(3), "what is overdue waits on")


@pytest.fixture
def polled(url: str, broken_broker: Callable[..., str]) -> Iterator[Callable[..., Bridge]]:
    """Return a function that opens a bridge to the broker, of whose readers' polls a function gets each."""
    with ExitStack() as opened:

        def connect(poll: Callable[..., list[Message]]) -> Bridge:
            scheme = broken_broker(Reading=around(poll=poll))
            return opened.enter_context(txnbridge.connect(url.replace("embedded", scheme)))

        yield connect


@contextmanager
def fetching(bridge: Bridge) -> Iterator[RetryConsumer]:
    """A consumer of a retry topic that has fetched what waits there."""
    consumer = RetryConsumer._open(consumers_of(bridge), retry_topic("g", NEVER), "readers", "earliest")
    with consumer:
        eventually(lambda: [consumer.take(10, 0.05), consumer._waiting][1], "nothing is fetched")
        yield consumer


def test_no_message_is_fetched_behind_one_that_waits(bridge):
    put_waiting(bridge, b"waits", NEVER, due_in=NEVER)
    topic = retry_topic("g", NEVER)
    with fetching(bridge) as consumer:
        put_waiting(bridge, b"behind", NEVER)
        assert consumer.take(10, 0.5) == [] == consumer.take(10, 0.5)
        assert reader_of(consumer).positions() == {(topic, 0): (1,)}


def test_the_reader_is_polled_also_while_messages_are_left_that_became_due_together(bridge, polled):
    found, taken = list[Message](), list[int]()
    for number in range(3):
        put_waiting(bridge, b"%d" % number, NEVER, due_in=2)

    def poll(inner: Any, *given: Any) -> list[Message]:
        taken.append(len(found))
        return inner.poll(*given)  # type: ignore[no-any-return]

    with fetching(polled(poll)) as consumer:
        taken.clear()

        def take_one() -> bool:
            found.extend(consumer.take(1, 0.05))
            return len(found) == 3

        eventually(take_one, "they are not due")
    assert [message.value for message in found] == numbers(3)
    assert {0, 1, 2} <= {*taken}


def test_messages_that_become_due_later_stay_behind_those_that_are_left(bridge):
    for number, due_in in enumerate((1, 1, 2)):
        put_waiting(bridge, b"%d" % number, NEVER, due_in)
    with fetching(bridge) as consumer:
        time.sleep(1)
        found = consumer.take(1, 0.05)
        ((_, position),) = consumer.positions().items()
        time.sleep(1)
        found += consumer.take(1, 0.05) + consumer.take(1, 0.05)
    assert [message.value for message in found] == numbers(3)
    assert position == found[1].position


def test_inputs_of_which_always_a_rest_is_left_do_not_keep_due_messages_waiting(bridge):
    feed(bridge, b"0")
    put_waiting(bridge, b"due", NEVER)
    inputs = ProcessorInputs(consumers_of(bridge), INPUT, [retry_topic("g", NEVER)], "g", "earliest")
    seen: set[bytes] = set()

    def take_and_leave() -> bool:
        seen.update(message.value for message in inputs.take(10, 0.05))
        inputs.take_back(failed=False)
        return seen == {b"0", b"due"}

    eventually(take_and_leave, "only one kind of messages comes")
    inputs.close(None)


def test_until_idle_a_member_without_a_retry_partition_does_not_wait_for_what_is_not_due(bridge, with_timing):
    with_timing(without_partition=0.5)
    put_waiting(bridge, b"0", NEVER, due_in=NEVER)
    processor = bridge.processor("in", group="g", each=Failing(), retry=[NEVER])
    with bridge.consumer(retry_topic("g", NEVER), retry_group("g")) as holder, ThreadPoolExecutor() as pool:
        assert len(holder.poll(timeout=60)) == 1
        running = pool.submit(processor.run, True)
        try:
            eventually(lambda: holder.poll(timeout=0.05) or running.done(), "it has ended")
        finally:
            processor.stop()


def test_until_idle_processes_all_that_is_due(bridge):
    for number in range(7):
        put_waiting(bridge, b"%d" % number, NEVER)
    run(bridge, each=Failing(), retry=[NEVER], max_messages=2)
    assert values(bridge, "out") == numbers(7)


def test_a_failed_commit_with_a_due_message_keeps_what_waits_behind_it(bridge):
    """The retry partition goes back to the due message, and what was fetched behind it is fetched again."""
    put_waiting(bridge, b"due", NEVER)
    put_waiting(bridge, b"later", NEVER, due_in=2)
    with next_commit(bridge, Outcome.ABORTED):
        run_until(bridge, lambda: len(values(bridge, "out")) == 2, each=Failing(), retry=[NEVER])
    assert values(bridge, "out") == [b"due", b"later"]


def test_the_number_of_tries_survives_restarts_and_after_the_last_delay_it_is_a_dead_letter(url):
    handler = Failing()
    with txnbridge.connect(url) as bridge:
        bridge.ensure_topics("out", "dead")
        feed(bridge, b"bad")
    deadline = time.monotonic() + 60
    while len(handler.tried) < 4:
        assert time.monotonic() < deadline
        with txnbridge.connect(url) as bridge:
            run(bridge, each=handler, retry=[SOON, SOON, 0.3])
    with txnbridge.connect(url) as bridge:
        (original,) = bridge.read("in", limit=10)
        (dead,) = bridge.read("dead", limit=10)
        assert [len(bridge.read(f"g-retry-{delay}", limit=10)) for delay in ("200ms", "300ms")] == [2, 1]
        ours = {name.removeprefix("txnbridge-dead-"): text for name, text in dead.headers.items()}
        assert ours.pop("transaction") and ours == {
            "kind": "new",
            "reason": "KeyError: 'no stock'",
            "topic": "in",
            "partition": "0",
            "position": "[0]",
            "timestamp": str(original.timestamp),
            "group": "g",
            "attempts": "4",
        }
        assert Redrive(bridge, "dead").run() == (1, 0, 0, 0)
        assert bridge.read("in", limit=10)[1][3:7] == original[3:7]  # key, value, headers, timestamp


def test_a_processor_without_a_dead_letter_topic_stops_after_the_last_delay_with_advice(bridge):
    feed(bridge, b"bad", b"1")
    handler = Failing()
    with pytest.raises(errors.Poison) as raised:
        run_until(bridge, lambda: False, each=handler, retry=[SOON], dead_letter=None)
    assert re.fullmatch(
        r"<Message in\[0\] at \(0,\), 3 bytes> cannot be processed \(KeyError at .*test_processor_retry.py:\d+,"
        r" 2 attempts\), and there is no dead_letter= topic to set it aside in. It waits in 'g-retry-200ms'."
        r" Set dead_letter=, or fix the handler, and start again",
        str(raised.value),
    )
    assert isinstance(raised.value.__cause__, KeyError)
    assert len(handler.tried) == 2
    assert values(bridge, "out") == [b"1"]


def test_max_attempts_are_made_in_place_before_each_wait(bridge):
    feed(bridge, b"bad")
    handler = Failing()
    run_until(bridge, lambda: values(bridge, "dead") == [b"bad"], each=handler, retry=[SOON], max_attempts=3)
    assert len(handler.tried) == 6
    assert bridge.read("dead", limit=1)[0].headers["txnbridge-dead-attempts"] == "6"


def test_poison_goes_to_the_dead_letters_at_once(bridge):
    feed(bridge, b"0", b"1")

    def refuse(message: Message, txn: Transaction) -> None:
        raise errors.Poison("a test says so") if message.value == b"0" else ValueError

    run(bridge, each=refuse, retry=[NEVER], poison=ValueError)
    assert values(bridge, "dead") == [b"0", b"1"]


@pytest.mark.parametrize("error", [errors.Abort(), txnbridge.BrokerUnavailable("a test says so")])
def test_an_abort_and_an_error_of_the_broker_are_repeated_in_place(bridge, error):
    feed(bridge, b"0")
    failures = [error] * 3

    def fail(message: Message, txn: Transaction) -> None:
        if failures:
            raise failures.pop()
        txn.send("out", message.value)

    assert run(bridge, each=fail, retry=[NEVER]).stats.delayed == 0
    assert values(bridge, "out") == [b"0"]


def test_a_message_that_fails_in_place_is_given_up_also_if_another_one_waits_behind_it(bridge):
    """After a failure the partition is read again a little later: an empty poll meanwhile is no success."""
    put_waiting(bridge, b"bad", NEVER)
    put_waiting(bridge, b"waits", NEVER, due_in=NEVER, at=1)

    settings = {"inputs": "in", "group": "g", "retry": [NEVER], "backoff": (0.01, 0.05), "retry_for": 2.0}
    processor = bridge.processor(each=raising(errors.Abort), **settings)
    watch = Timer(60, processor.stop)
    watch.start()
    with pytest.raises(errors.TransactionAborted):
        processor.run()
    watch.cancel()


def test_the_messages_of_a_failed_attempt_are_waited_for_also_after_a_failed_poll(bridge, polled):
    feed(bridge, b"0")
    answers: list[list[Message] | None] = []

    def poll(inner: Any, *given: Any) -> list[Message]:
        answer = answers.pop() if answers else inner.poll(*given)
        if answer is None:
            raise txnbridge.BrokerUnavailable("a test says so")
        return answer

    inputs = ProcessorInputs(consumers_of(polled(poll)), INPUT, [], "g", "earliest")
    eventually(lambda: inputs.take(1, 0.05), "no message comes")
    inputs.take_back()
    answers += [[], [], None]
    with pytest.raises(txnbridge.BrokerUnavailable):
        inputs.take(1, 0.05)
    inputs.take_back()
    assert inputs.take(1, 0.05) == [] == inputs.take(1, 0.05)
    assert inputs.awaits_failed
    eventually(lambda: inputs.take(1, 0.05), "it does not come again")
    assert not inputs.awaits_failed
    inputs.close(None)


@pytest.mark.parametrize("value", [b"due", b"new"])
def test_a_member_whose_messages_fail_in_place_polls_in_its_other_group_too(bridge, polled, with_timing, value):
    feed(bridge, b"new")
    put_waiting(bridge, b"due", NEVER)
    with_timing(idle_poll=0.0)
    found, polls = list[bytes | None](), list[object]()

    def poll(inner: Any, *given: Any) -> list[Message]:
        polls.append(inner)
        return inner.poll(*given)  # type: ignore[no-any-return]

    inputs = ProcessorInputs(consumers_of(polled(poll)), INPUT, [retry_topic("g", NEVER)], "g", "earliest")

    def take(fails: bool) -> list[bytes | None]:
        found[:] = [message.value for message in inputs.take(1, 0.05)]
        inputs.take_back(failed=fails)
        return found

    eventually(lambda: take(fails=False) == [value], "this kind does not come")
    (other,) = [each for each in inputs._consumers() if each is not inputs._source]
    polls.clear()
    inputs.take_back(failed=True)
    eventually(lambda: take(fails=True) == [value] and polls.count(reader_of(other).inner) > 1, "it does not poll")
    eventually(lambda: take(fails=False) not in ([], [value]), "what was fetched meanwhile is lost")
    inputs.close(None)


def test_a_batch_is_split_to_find_what_goes_to_the_retry_topic(bridge):
    feed(bridge, b"0", b"1", b"bad", b"3")

    def copy(batch: Batch, txn: Transaction) -> None:
        for message in batch:
            if message.value == b"bad":
                raise ValueError
            txn.send("out", message.value)

    run(bridge, batch=copy, retry=[NEVER])
    assert values(bridge, "out") == [b"0", b"1", b"3"]
    assert values(bridge, "g-retry-3600s") == [b"bad"]


def test_poison_that_a_batch_handler_names_needs_no_splitting_also_from_a_retry_topic(bridge):
    for value in (b"0", b"bad"):
        put_waiting(bridge, value, NEVER, at=int(value == b"bad"))
    sizes: list[int] = []

    def refuse(batch: Batch, txn: Transaction) -> None:
        sizes.append(len(batch))
        for message in batch:
            if message.value == b"bad":
                raise errors.Poison("a test says so", message=message)

    run(bridge, batch=refuse, retry=[NEVER])
    assert sizes == [2, 1]
    assert values(bridge, "dead") == [b"bad"]


def test_messages_that_are_delayed_neither_make_nor_end_a_row_of_dead_letters(bridge):
    feed(bridge, b"dead", b"bad", b"dead", b"bad", b"dead")

    def refuse(message: Message, txn: Transaction) -> None:
        raise errors.Poison("no") if message.value == b"dead" else ValueError

    with pytest.raises(errors.Poison, match="more than max_dead_letters_in_a_row"):
        run(bridge, each=refuse, retry=[NEVER], max_dead_letters_in_a_row=2)
    run(bridge, each=refuse, retry=[NEVER], max_dead_letters_in_a_row=3)
    assert (values(bridge, "dead"), values(bridge, "g-retry-3600s")) == ([b"dead"] * 3, [b"bad"] * 2)


def test_another_member_processes_what_waits_when_the_first_leaves(url, bridge):
    put_waiting(bridge, b"waits", NEVER, due_in=3)
    with txnbridge.connect(url) as second:
        with bridge.processor("in", group="g", each=Failing(), retry=[NEVER]) as processor:
            eventually(lambda: waiting_partitions(processor), "it has not fetched the message")
        run_until(second, lambda: values(second, "out") == [b"waits"], each=Failing(), retry=[NEVER])


def waiting_partitions(processor: Processor) -> object:
    inputs: Any = processor._inputs
    return inputs._retries._waiting


def is_bad(value: bytes) -> bool:
    return int(value) % 3 == 1


def fail_or_copy(message: Message, txn: Transaction) -> None:
    txn.send("out", message.value)
    if is_bad(message.value):
        raise ValueError


def run_to_the_end(url: str) -> None:
    with txnbridge.connect(url) as bridge:
        while len(values(bridge, "out")) + len(values(bridge, "dead")) < 4:
            run(bridge, each=fail_or_copy, retry=[0.001, 0.002], max_messages=2)


def check(url: str) -> None:
    with txnbridge.connect(url) as bridge:
        assert Counter(values(bridge, "out")) == Counter(v for v in numbers(4) if not is_bad(v))
        assert values(bridge, "dead") == [b"1"]
        assert values(bridge, "g-retry-1ms") == values(bridge, "g-retry-2ms") == [b"1"]


def make_input(url: str) -> None:
    with txnbridge.connect(url) as bridge:
        bridge.ensure_topics("in", "out", "dead")
        feed(bridge, *numbers(4))


@pytest.mark.timeout(400)
def test_killed_at_any_event_each_message_is_in_one_place(tmp_path, kill_walk):
    kill_walk(run_to_the_end, check, Fresh(tmp_path, make_input), least=WITHIN_A_TRANSACTION)


def test_a_redrive_for_one_group_is_seen_by_no_other_group(bridge):
    bridge.ensure_topics("g-retry-100ms")  # of a delay that is no longer used
    feed(bridge, b"bad", b"1")
    handler = Failing(times=2)
    run_until(bridge, lambda: values(bridge, "dead") == [b"bad"], each=handler, retry=[SOON])
    run(bridge, group="h", each=Failing(), max_attempts=1, dead_letter="dead", max_dead_letters_in_a_row=None)
    audited: list[Message] = []
    audit = {"group": "audit", "each": lambda message, txn: audited.append(message)}
    run(bridge, **audit)
    with bridge.processor("in", group="g", each=handler, retry=[SOON], dead_letter="dead") as processor:
        eventually(lambda: processor.lag == 0, "it has its partitions")
        redrive = Redrive(bridge, "dead", group="g")
        assert (redrive.retry_topic, redrive.run()) == ("g-retry-200ms", (1, 1, 0, 0))
        assert Redrive(bridge, "dead", group="g").run() == (0, 1, 0, 0)
        eventually(lambda: processor.stats.messages == 1, "it is processed")
    assert values(bridge, "out") == [b"1", b"1", b"bad"]
    assert handler.tried[-1][:7] == bridge.read("in", limit=1)[0][:7]
    run(bridge, **audit)
    assert [message.value for message in audited] == [b"bad", b"1"]
    with pytest.raises(errors.NotFound, match="there is no retry topic of group 'audit'"):
        Redrive(bridge, "dead", group="audit")


def test_a_missing_retry_topic_is_told_at_the_start_with_the_command_that_creates_it(url):
    with txnbridge.connect(url) as bridge:
        bridge.ensure_topics("in", "dead", "g-retry-10s")
    with txnbridge.connect(url, create_topics=0) as strict:
        with pytest.raises(errors.NotFound, match="txnbridge topics create g-retry-60s"):
            run(strict, each=Failing(), retry=[10, 60])
        strict.ensure_topics("g-retry-60s")
        run(strict, each=Failing(), retry=[10, 60])


def test_messages_that_wait_for_a_removed_delay_are_reported_at_the_start(bridge, caplog):
    put_waiting(bridge, b"waits", 10, due_in=NEVER)
    run(bridge, each=Failing(), retry=[10, 20])
    assert caplog.records == []
    run(bridge, each=Failing(), retry=[NEVER])
    (told,) = (record for record in caplog.records if record.name == "txnbridge")
    assert "does not read g-retry-10s, of which 1 messages" in told.getMessage()


@pytest.mark.parametrize("number", [None, -5])
def test_a_message_without_valid_headers_in_a_retry_topic_is_poison(bridge, number):
    if number is None:
        feed(bridge, b"foreign", topic="g-retry-3600s")
    else:
        put_waiting(bridge, b"foreign", NEVER, number=number)
    run(bridge, each=Failing(), retry=[NEVER])
    (dead,) = bridge.read("dead", limit=10)
    assert (dead.value, dead.headers["txnbridge-dead-topic"]) == (b"foreign", "g-retry-3600s")


def test_a_waiting_message_from_a_topic_that_is_no_input_is_not_processed(bridge):
    put_waiting(bridge, b"0", NEVER, topic="another")
    with pytest.raises(errors.InvalidOption, match="'another', which is no input of this processor"):
        run(bridge, each=Failing(), retry=[NEVER])
    run(bridge, inputs=["in", "another"], each=Failing(), retry=[NEVER])
    assert values(bridge, "out") == [b"0"]


@pytest.mark.parametrize("retry", [[], "10", 10, [0], [-1], [None], [0.0001], [True]])
def test_delays_that_make_no_sense_are_refused(bridge, retry):
    with pytest.raises(errors.InvalidOption):
        bridge.processor("in", group="g", each=Failing(), retry=retry)


@pytest.mark.parametrize(
    "settings", [{"dead_letter": "g-retry-10s"}, {"inputs": ["in", "g-retry-10s"]}, {"group": "two words"}]
)
def test_a_retry_topic_is_neither_an_input_nor_a_dead_letter_topic(bridge, settings):
    with pytest.raises(errors.InvalidOption):
        run(bridge, each=Failing(), retry=[10], **settings)
