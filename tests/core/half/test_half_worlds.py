"""Random worlds of half messages in lanes: processes that are killed, paused and taken over at each of their steps."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.core import half_topic_backend
from tests.core.half.test_half_lanes import drop_lane, lanes, listed, open_lane
from tests.failing import replace_method
from txnbridge import Bridge, Decision, TxnBridgeError, connect, plugins
from txnbridge._base.deadline import Deadline
from txnbridge._half import lane as half_lane
from txnbridge._half.lane import Lane
from txnbridge._half.topic_half_store import LaneGroup
from txnbridge._write.writers import Writers
from txnbridge.spi import Half, HalfMessage

COMMIT, ABORT = Decision.COMMIT, Decision.ABORT


class Killed(BaseException):
    """Ends an actor's thread wherever it is."""


class World:
    """Sellers and resolvers on one broker. One of them moves at a time, from one transaction of a lane to the next."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.random = random.Random(seed)
        self.works: dict[str, bool] = {}  # by half, whether its work was done first, or refused for ever
        self.actors: list[Actor] = []
        self.bridges = ExitStack()

    def bridge(self) -> Bridge:
        return self.bridges.enter_context(connect(self.url, create_topics=1, timeout=8))

    def play(self) -> None:
        for number in range(3):
            bridge = self.bridge()
            group = lanes(bridge, "g")
            self.actors.append(Actor(self, group, f"s{number}", Actor.sell))
            self.actors.append(Actor(self, group if number == 0 else self.other(), f"r{number}", Actor.resolve))
        for _ in range(120):
            ready = [actor for actor in self.actors if actor.at_gate.is_set()]
            if not ready:
                break
            actor = self.random.choice(ready)
            actor.dies = self.random.random() < 0.02
            actor.move()
        for actor in self.actors:
            actor.free = True
            actor.move()
        for actor in self.actors:
            actor.thread.join(30)

    def other(self) -> LaneGroup:
        return lanes(self.bridge(), "g")

    def settle(self) -> Counter[str]:
        """Let a last resolver end what is left; return what is published, and how often."""
        bridge = self.bridge()
        bridge.ensure_topics("orders")  # in some worlds nothing was committed
        last = Actor(self, lanes(bridge, "g"), "last", lambda _: None)
        last.free = True
        deadline = Deadline(60)
        while not last.resolve_all():  # others may still hold lanes, and fence this one
            deadline.check("ending what is left")
        return Counter(str(message.value, "ascii") for message in bridge.read("orders", 1000))


class Actor:
    def __init__(self, world: World, group: LaneGroup, name: str, program: Callable[[Actor], None]) -> None:
        self.world, self.group, self.name = world, group, name
        self.at_gate, self.go = threading.Event(), threading.Semaphore(0)
        self.dies = self.free = False
        self.thread = threading.Thread(target=self._run, args=(program,), daemon=True)
        self.thread.start()

    def _run(self, program: Callable[[Actor], None]) -> None:
        _here.actor = self
        try:
            self.gate()
            program(self)
        except Killed:
            pass
        finally:
            self.at_gate.clear()

    def gate(self) -> None:
        if self.free:
            return
        self.at_gate.set()
        self.go.acquire()
        if self.dies:
            raise Killed

    def move(self) -> None:
        """Let the actor move to its next gate; one that waits for another actor is left waiting."""
        self.at_gate.clear()
        self.go.release()
        for _ in range(60):
            if self.at_gate.wait(0.002) or not self.thread.is_alive():
                return

    # --- programs ---------------------------------------------------------------------------------------------------

    def sell(self) -> None:
        for number in range(4):
            id = f"{self.name}-{number}"
            half = Half("g", id, [HalfMessage("orders", id.encode(), None, ())], 0, 0)
            try:
                half = self.group.store(half, Deadline(8))
            except TxnBridgeError:
                continue
            self.gate()
            done = self.world.works.setdefault(id, True)
            self.gate()
            if self.world.random.random() < 0.8:
                self.end(half, COMMIT if done else ABORT)

    def end(self, half: Half, decision: Decision) -> None:
        with suppress(TxnBridgeError):  # then somebody else ends it
            self.group.end(half, decision, Deadline(8))

    def resolve(self) -> None:
        for _ in range(3):
            self.resolve_all()
            self.gate()

    def resolve_all(self) -> bool:
        """Open each lane, whether its holder lives or not, and end what is not done; return whether all of it was."""
        deadline, lane, opened = Deadline(8), None, list[Lane]()
        try:
            for number in listed(self.group, deadline):
                lane = open_lane(self.group, number, deadline)
                opened.append(lane)
                with _turns.setdefault(id(lane), threading.Lock()):  # one actor reads a lane, as one thread tends it
                    bodies = lane.bodies(list(lane.index.undone), deadline)
                for name, messages in bodies.items():
                    self.gate()
                    done = self.world.works.setdefault(name, False)
                    self.end(Half("g", name, messages, 0, 0, how=lane.how), COMMIT if done else ABORT)
                lane.tend(deadline)
        except TxnBridgeError as error:
            if half_lane.is_lost(error) and lane is not None:
                drop_lane(self.group, lane)
            return False
        return not any(lane.index.undone for lane in opened)


_here = threading.local()
_turns: dict[int, threading.Lock] = {}


@pytest.fixture(autouse=True)
def _gates(monkeypatch: pytest.MonkeyPatch, with_timing: Callable[..., None]) -> Iterator[None]:
    commit = Lane._commit

    def gated(self: Lane, sends: Any, deadline: Any) -> None:
        actor = getattr(_here, "actor", None)
        if actor is not None:
            actor.gate()
        commit(self, sends, deadline)
        if actor is not None:
            actor.gate()

    monkeypatch.setattr(Lane, "_commit", gated)
    with_timing(lane_trim=0.0)
    with plugins.registered(half_topic_backend):
        yield


@contextmanager
def played(folder: Path, seed: int) -> Iterator[World]:
    folder.mkdir()
    world = World(f"half-topic:{folder}/broker.db?lease_seconds=6", seed)
    with world.bridges:
        world.play()
        yield world


def wrong(folder: Path, seed: int) -> str:
    """Play a world; return what is lost or published twice, empty if nothing is."""
    with played(folder, seed) as world:
        published = world.settle()
        wanted = Counter(id for id, done in world.works.items() if done)
        return "" if published == wanted else f"seed {seed}: {wanted - published} lost, {published - wanted} too many"


@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(100, 400), marks=[pytest.mark.full, pytest.mark.timeout(1800)])]
)
def test_in_random_worlds_each_work_done_has_its_message_once(tmp_path: Path, seeds: range) -> None:
    assert not [found for seed in seeds if (found := wrong(tmp_path / str(seed), seed))]


def _no_fence(open: Any, self: Writers, deadline: Deadline) -> None:
    """Open lanes without fencing the holder before."""
    self._identity = replace(self._identity, owned=False)
    open(self, deadline)


def _trim_at_once(_: Any, self: Lane, deadline: Deadline) -> None:
    """Remove all records up to the end, whether their halves are done or not."""
    _, end = self._connection.broker.admin.bounds([self.topic], deadline)[self.topic, 0]
    self._trim(end, deadline)


def _forgets_done(commit: Any, self: Lane, sends: Any, deadline: Any) -> None:
    """Store the end of a half in another transaction than its messages."""
    sends = list(sends)
    apart = len(sends) > 1 and {send[0] for send in sends} != {self.topic}
    for part in (sends[:-1], sends[-1:]) if apart else (sends,):
        commit(self, part, deadline)


RULES = [(Writers, "open", _no_fence), (Lane, "remove_old", _trim_at_once), (Lane, "_commit", _forgets_done)]


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("owner", "name", "by"), RULES)
def test_without_a_rule_some_world_goes_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner, name, by) -> None:
    replace_method(monkeypatch, owner, name, by)
    assert any(wrong(tmp_path / str(seed), seed) for seed in range(60))
