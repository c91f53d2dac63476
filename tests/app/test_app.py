"""One start and one stop of all functions of an app, its lifespans, and the end of asynchronous functions."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from tests.in_time import wait_until, within
from txnbridge import App, InvalidOption, InvalidState, Outgoing, Poison, Router, connect


def send(bridge, *values: bytes, topic: str = "in") -> None:
    with bridge.transaction() as txn:
        txn.send_many(topic, values)


def values(bridge, topic="out") -> list[bytes]:
    return [message.value for message in bridge.read(topic, 100)]


def test_functions_work_side_by_side_until_the_end_of_the_block_again_and_again(bridge):
    bridge.ensure_topics("middle")
    app = App()

    @app.process("in", group="first", to="middle")
    def first(value: bytes) -> bytes:
        return value + b"1"

    @app.process("middle", group="second", to="out")
    async def second(value: bytes) -> bytes:
        return value + b"2"

    for number in range(2):
        with app:
            with pytest.raises(InvalidState), app:
                pass
            send(bridge, b"%d" % number)
            wait_until(lambda: app.stats["second"].messages == 1 and app.healthy)
        assert not app.healthy
    assert values(bridge) == [b"012", b"112"]
    with pytest.raises(InvalidState, match="while it runs"):
        _ = app.bridge


def test_a_function_that_comes_after_the_start_is_refused_until_the_app_has_stopped(bridge):
    router = Router()
    app = App()
    app.include(router)

    @app.process("in", group="g")
    def take(value: bytes) -> None: ...

    def late(value: bytes) -> None: ...

    with app:
        for adds in (app, router):
            with pytest.raises(InvalidOption, match="the app runs: functions and routers are added"):
                adds.process("in", group="h")(late)
        with pytest.raises(InvalidOption, match="the app runs"):
            app.include(Router())
    router.process("in", group="h")(late)
    app.run(until_idle=True)
    assert set(app.stats) == {"take", "late"}


def test_a_paused_function_processes_nothing_until_it_is_resumed_and_others_go_on(bridge):
    app = App()

    @app.process("in", group="g", to="out")
    def ship(value: bytes) -> bytes:
        return value

    @app.process("in", group="h")
    def note(value: bytes) -> None: ...

    with pytest.raises(InvalidState, match="no function 'ship' runs"):
        app.pause("ship")
    with app:
        send(bridge, b"1")
        wait_until(lambda: values(bridge) == [b"1"])
        app.pause("ship")
        send(bridge, b"2")
        wait_until(lambda: app.stats["note"].messages == 2)
        time.sleep(1)  # four polls of a function that is not paused
        assert values(bridge) == [b"1"] and app.healthy
        app.resume("ship")
        wait_until(lambda: values(bridge) == [b"1", b"2"])
        with pytest.raises(InvalidState, match="no function 'shipp' runs; the app has ship, note"):
            app.resume("shipp")


def test_an_app_runs_in_a_test_with_another_broker(bridge, tmp_path):
    other = f"embedded:{tmp_path}/other.db"
    app = App("embedded:/nowhere/of-the-app.db", timeout=1)

    @app.process("in", group="g", to="out")
    def ship(value: bytes) -> bytes:
        return value

    with app.using(other, timeout=30), connect(other) as beside:
        send(beside, b"1")
        app.run(until_idle=True)
        assert values(beside) == [b"1"]
        with app, pytest.raises(InvalidState, match="runs already"), app.using(other):
            pass
    with pytest.raises(InvalidOption, match="no folder /nowhere"):
        app.run(until_idle=True)


def test_a_function_sends_to_another_broker_in_one_transaction_with_its_acknowledgement(bridge, tmp_path):
    app = App("embedded:/nowhere/app.db", others={"letters": "embedded:/nowhere/letters.db"})
    calls = 0

    @app.process("in", group="g", to="out", on="letters", max_attempts=2, dead_letter="dead", backoff=(0.01, 0.01))
    def write(value: bytes) -> Iterator[bytes | Outgoing]:
        nonlocal calls
        calls += 1
        yield value
        yield Outgoing("copies", value)
        if calls == 1 or value == b"2":
            raise ValueError

    with pytest.raises(InvalidOption, match="no 'broker'"):
        App(others={"broker": "embedded:letters.db"})
    described = app.describe()
    assert described["servers"].keys() == {"broker", "letters"}
    assert described["channels"]["letters/out"]["servers"] == [{"$ref": "#/servers/letters"}]
    letters = f"embedded:{tmp_path}/letters.db"
    alike = {"letters": letters, "again": bridge.url}  # an opening of the same id at the second would fence the first
    with app.using(bridge.url, alike, transactional_id="writer"), connect(letters) as beside:
        beside.ensure_topics("out", "copies")
        send(bridge, b"1", b"2", b"3")
        app.run(until_idle=True)
        assert values(beside) == values(beside, "copies") == [b"1", b"3"]
        assert (values(bridge), values(bridge, "dead")) == ([], [b"2"])
    app.process("in", group="h", to="out", on="letter")(lambda value: value)
    with app.using(bridge.url, {"letters": letters}), pytest.raises(InvalidOption, match="no such URL in others="):
        app.run(until_idle=True)


@pytest.mark.parametrize("started", ["run", "with"])
def test_if_one_function_fails_for_good_all_stop_and_its_error_is_raised(bridge, started):
    app = App()

    @app.process("in", group="good", to="out")
    def good(value: bytes) -> bytes:
        return value

    @app.process("in", group="bad")
    def bad(value):
        wait_until(lambda: values(bridge))
        raise Poison("a test says so")

    send(bridge, b"1")
    with within(0), pytest.raises(Poison, match="a test says so"):
        if started == "run":
            app.run()
        else:
            with app:
                wait_until(lambda: not app.healthy)
    assert values(bridge) == [b"1"]


PROGRAM = """
import sys, time
import txnbridge
app = txnbridge.App(stop_timeout=20)

@app.process("in", group="g", to="out")
def ship(value: bytes) -> bytes:
    print("here", flush=True)
    time.sleep(float(sys.argv[1]))
    return value

app.run()
print("ended")
"""


@pytest.mark.parametrize(
    ("takes", "signals", "code", "shipped"),
    [(0.5, [signal.SIGTERM], 0, [b"1"]), (60, [signal.SIGINT, signal.SIGTERM], 128 + signal.SIGTERM, [])],
)
def test_a_signal_lets_an_app_finish_and_a_second_signal_does_not(bridge, url, takes, signals, code, shipped):
    send(bridge, b"1", b"2")
    command = [sys.executable, "-c", PROGRAM, str(takes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        for number in signals:
            process.send_signal(number)
            time.sleep(0.1)
        rest, _ = process.communicate(timeout=15)
    assert (process.returncode, rest) == (code, "ended\n" if code == 0 else "")
    assert values(bridge) == shipped


@pytest.mark.parametrize("caught", [False, True])
def test_a_stop_cancels_an_asynchronous_function_and_aborts_its_transaction(bridge, caught):
    app = App(stop_timeout=3)
    waiting, events = threading.Event(), []

    @app.process("in", group="g", to="out")
    async def wait(value: bytes, txn) -> bytes:
        txn.send("out", b"early")
        try:
            if not waiting.is_set():
                waiting.set()
                await asyncio.sleep(60)
        except asyncio.CancelledError:
            events.append("cancelled")
            if not caught:
                raise
        return value

    send(bridge, b"1")
    with within(1), app:
        assert waiting.wait(30)
    assert events == ["cancelled"]
    assert values(bridge) == []
    app.run(until_idle=True)
    assert values(bridge) == [b"early", b"1"]


def test_a_function_that_cancels_itself_has_failed_like_any_other(bridge):
    app = App()
    attempts = []

    @app.process("in", group="g", backoff=(0.01, 0.01))
    async def cancel(value):
        attempts.append(value)
        if len(attempts) == 1:
            raise asyncio.CancelledError

    send(bridge, b"1")
    app.run(until_idle=True)
    assert attempts == [b"1", b"1"]


def test_lifespans_are_open_while_their_functions_run(bridge):
    events, loops = [], []

    def of_app(app: App) -> Iterator[str]:
        app.bridge.ensure_topics("side")
        events.append("app")
        yield "of the app"
        events.append("app ended")

    @contextmanager
    def of_router(app: App) -> Iterator[str]:
        events.append("router")
        yield "of the router"
        events.append("router ended")

    async def on_loop(app: App) -> AsyncIterator[asyncio.AbstractEventLoop]:
        events.append("loop")
        yield asyncio.get_running_loop()
        events.append("loop ended")

    app, router, later, plain = App(lifespan=of_app), Router(lifespan=of_router), Router(lifespan=on_loop), Router()

    @router.process("in", group="router")
    def in_router(value, state):
        events.append(state)

    @plain.process("in", group="plain")
    async def in_plain(value, state):
        events.append(state)

    @later.process("in", group="later")
    async def in_later(value, state):
        loops.append(state is asyncio.get_running_loop())

    app.include(router)
    router.include(later)
    app.include(plain)
    send(bridge, b"1")
    app.run(until_idle=True)
    assert events == [
        *("app", "router", "loop"),
        *("of the router", "of the app"),
        *("loop ended", "router ended", "app ended"),
    ]
    assert loops == [True]


def test_a_lifespan_that_fails_ends_the_start_and_closes_what_is_open(bridge):
    events = []

    def opening(app):
        yield
        events.append("closed")

    def failing(app):
        raise ValueError("a test says so")
        yield

    app, router = App(lifespan=opening), Router(lifespan=failing)
    app.include(router)
    app.process("in", group="g")(lambda value: None)
    with pytest.raises(ValueError, match="a test says so"):
        app.run()
    assert events == ["closed"]


@pytest.mark.parametrize("restart", [False, True])
def test_an_error_of_a_background_function_ends_the_app_or_is_followed_by_a_restart(bridge, restart):
    calls: list[str] = []

    async def refresh(what: str) -> None:
        calls.append(what)
        await asyncio.sleep(0.01)  # the loop runs although no message comes
        raise ValueError("a test says so")

    async def opening(app: App) -> AsyncIterator[None]:
        app.background(partial(refresh, "rates"), restart=restart)
        yield

    app = App(lifespan=opening)

    @app.process("in", group="g")
    async def in_app(value): ...

    if restart:
        with app:
            wait_until(lambda: len(calls) > 2)
    else:
        with pytest.raises(ValueError, match="a test says so"):
            app.run()
        assert calls == ["rates"]


async def on_loop(app: App) -> AsyncIterator[None]:
    yield


def plain_state(value, state): ...


@pytest.mark.parametrize(
    ("lifespan", "function", "sentence"),
    [
        (None, plain_state, "asks for state, but has no lifespan"),
        (on_loop, lambda value: None, "an asynchronous lifespan is for `async def` functions"),
    ],
)
def test_a_state_that_cannot_be_had_is_told_at_the_start(url, lifespan, function, sentence):
    app = App(lifespan=lifespan)
    app.process("in", group="g")(function)
    with pytest.raises(InvalidOption, match=sentence):
        app.run()


def test_a_plain_function_does_not_get_what_is_on_an_event_loop(url):
    app = App(lifespan=on_loop)
    app.process("in", group="g")(plain_state)

    @app.process("in", group="h")
    async def later(value): ...

    with pytest.raises(InvalidOption, match="asks for the state of an asynchronous lifespan"):
        app.run()
    with pytest.raises(InvalidOption, match="has one yield"):
        App(lifespan=lambda app: None)  # type: ignore[arg-type]
