"""A waiting reader wakes soon and costs next to nothing, whether the operating system tells it of writes or not."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from txnbridge_embedded.client import change_notification

from tests.core.reading_kit import Listener
from tests.embedded import kit
from tests.in_time import within
from txnbridge.spi import Broker, Deadline, Subscription
from txnbridge.testing import Child, tell


@pytest.fixture(params=["told", "blind"])
def told(request, monkeypatch):
    """Whether the operating system tells of writes."""
    if request.param == "blind":
        monkeypatch.setattr(change_notification, "_watch", lambda path: -1)
    return request.param == "told"


def open_told(path: Path, told: bool) -> Broker:
    """Open the file in a process to which the operating system tells of writes, or does not."""
    if not told:
        change_notification._watch = lambda path: -1
    return kit.open_broker(path)


def read_and_tell(path: Path, told: bool) -> None:
    """Tell of each message; an empty one is the last."""
    broker = open_told(path, told)
    reader = kit.alone(broker)
    tell("waiting")
    last = False
    while not last:
        (message,) = reader.poll(1, Deadline(100))
        tell(message.value)
        last = message.value == b""
    reader.close(Deadline(10))
    broker.close(Deadline(10))


@pytest.mark.parametrize("told", [True, False], ids=["told", "blind"])
def test_a_reader_in_another_process_wakes_for_each_commit(broker, path, told):
    writer = kit.open_writer(broker)
    with Child(read_and_tell, path, told) as child:
        assert child.told() == "waiting"
        with within(0):  # who does not wake looks again when the time of its poll is over
            for number in range(30):
                time.sleep(0.02 + number / 1000)  # not at a fixed phase of its looking
                value = b"" if number == 29 else b"order"
                kit.commit(writer, "orders", value)
                assert child.told() == value
        child.result()


def rest(path: Path, told: bool, group: str | None) -> float:
    """Wait for nothing; what part of a core that takes, with all threads."""
    broker = open_told(path, told)
    reader = broker.reader(Subscription(("orders",), group), Listener(), Deadline(10)) if group else kit.alone(broker)
    reader.poll(1, Deadline(0.1))
    used, begun = time.process_time(), time.monotonic()
    assert reader.poll(1, Deadline(1.5)) == []
    part = (time.process_time() - used) / (time.monotonic() - begun)
    reader.close(Deadline(10))
    broker.close(Deadline(10))
    return part


@pytest.mark.parametrize("told", [True, False], ids=["told", "blind"])
@pytest.mark.parametrize("group", [None, "shipping"])
def test_waiting_costs_next_to_nothing(path, told, group):
    with Child(rest, path, told, group) as child:
        # Blind, it is 1.5 % of a core here, more where others wear out the caches. Who does not rest takes all of it.
        assert child.result() < 0.2


def test_a_reader_wakes_for_what_its_own_process_commits(broker, told):
    reader = kit.alone(broker)
    writer = kit.open_writer(broker)
    thread = threading.Timer(0.1, kit.commit, [writer, "orders", b"order"])
    thread.start()
    with within(0.1):
        assert [message.value for message in reader.poll(1, Deadline(100))] == [b"order"]
    thread.join()
    reader.close(Deadline(10))


def test_a_commit_that_takes_long_is_still_noticed(broker, opened, told, path):
    """The write that is told of comes long before its commit, with nothing in between."""
    other = opened()
    with broker.session(Deadline(10)) as connection, other.session(Deadline(10)) as writing:
        watch = change_notification.ChangeNotification(connection, path)
        watch.remember_version()
        writing.execute("PRAGMA cache_size = 1")  # so that pages are written before the commit
        committing = threading.Event()

        def write() -> None:
            with other.store.writing(writing, Deadline(10), "writing slowly"):
                writing.executemany("INSERT INTO logs(name) VALUES (?)", ((str(n),) for n in range(5000)))
                time.sleep(0.5)
                committing.set()

        with ThreadPoolExecutor(1) as pool:
            pool.submit(write)
            with within(0.5):
                watch.wait(100)
            assert committing.is_set()
        watch.close()


def test_a_reader_that_is_let_go_keeps_no_descriptor(broker):
    def open_and_close() -> int:
        reader = kit.alone(broker)
        reader.close(Deadline(60))
        gc.collect()  # descriptors of earlier tests
        return len(list(Path("/proc/self/fd").iterdir()))

    before = open_and_close()
    assert [open_and_close() for _ in range(5)][-1] < before + 5
