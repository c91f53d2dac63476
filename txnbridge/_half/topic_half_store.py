"""`LaneStore`: half messages on brokers that have none, in lanes: topics of our own, each written by one process.

Each process that sends halves of a group owns a lane (`_half.lane`), and publishes its halves. The application's
decision log has the list of a group's lanes: for each its owner's name, empty if nobody owns it, and its topic's id. A
process without a lane takes a free one, or adds one. A resolver opens a lane whose end stands still although halves are
not done.
"""

from __future__ import annotations

import logging
import random
import re
import string
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from txnbridge._base.connection import random_name
from txnbridge._base.deadline import Deadline
from txnbridge._base.messages import Position
from txnbridge._base.token import Decision, Outcome
from txnbridge._decisions.logs import DecisionLogs
from txnbridge._half.index import LaneIndex
from txnbridge._half.lane import Lane, is_lost
from txnbridge._read.open_consumers import Consumers
from txnbridge.errors import EvidenceLost, Fenced, InvalidOption, NotFound, PositionLost, TxnBridgeError
from txnbridge.spi import Advice, Half, HalfMessage, HalfStore, Identity, LedgerValue, TopicRules

_log = logging.getLogger("txnbridge")

# The pause of the thread that tends lanes, while no check-back is due.
_IDLE_SECONDS = 0.1
_RETRY_SECONDS = 0.1
# The time for which a topic's rules are believed.
_TARGET_SECONDS = 60.0
_LONGEST_NAME = 100
_PREFIX = "half."
_PLAIN = (string.ascii_letters + string.digits + "-").encode()


class LaneStore(HalfStore):
    """The half store of a bridge whose broker has no half messages: a `LaneGroup` for each group. Thread-safe."""

    def __init__(self, consumers: Consumers, logs: DecisionLogs) -> None:
        self._consumers = consumers
        self._connection = consumers.connection
        self._logs = logs
        self._guard = threading.Lock()
        self._groups: dict[str, LaneGroup] = {}
        # By topic and partition: what the topic refuses, and until when that is believed.
        self._targets: dict[tuple[str, int | None], tuple[float, TopicRules]] = {}

    def group(self, group: str) -> LaneGroup:
        with self._guard:
            if group not in self._groups:
                application = self._connection.identity.application
                self._groups[group] = LaneGroup(self._consumers, self._logs, application, group)
            return self._groups[group]

    def ready(self, group: str, deadline: Deadline) -> None:
        self.group(group).own_lane(deadline)

    def put(self, half: Half, deadline: Deadline) -> Half:
        self._check_targets(half, deadline)
        return self.group(half.group).store(half, deadline)

    def _check_targets(self, half: Half, deadline: Deadline) -> None:
        """Raise an error, before the local work, for a message that its topic would refuse after the work."""
        broker, now = self._connection.broker, time.monotonic()
        for topic, number in {(message.topic, message.partition) for message in half.messages}:
            if now > self._targets.get((topic, number), (0.0,))[0]:
                rules = broker.require_topic(topic, deadline)
                if number is not None and (topic, number) not in broker.admin.bounds([topic], deadline):
                    raise NotFound(f"topic {topic!r} has no partition {number}")
                self._targets[topic, number] = now + _TARGET_SECONDS, rules
        for message in half.messages:
            _, rules = self._targets[message.topic, message.partition]
            if rules.keyed and message.key is None:
                raise InvalidOption(f"topic {message.topic!r} is compacted, so each of its messages needs a key")
            if rules.message_bytes is not None and (size := _size(message)) > rules.message_bytes:
                text = f"a message of {size} bytes for topic {message.topic!r}, which takes {rules.message_bytes}"
                raise InvalidOption(text)

    def end(self, half: Half, decision: Decision, deadline: Deadline) -> Outcome:
        return self.group(half.group).end(half, decision, deadline)

    def checks(self, group: str, limit: int, deadline: Deadline) -> list[Half]:
        return self.group(group).checks(limit, deadline)

    def tend(self, group: str, deadline: Deadline) -> None:
        self.group(group).checks(0, Deadline(0))

    def leave(self, group: str, deadline: Deadline) -> None:
        self.group(group).leave(deadline)

    def parked(self, group: str, deadline: Deadline) -> list[Half]:
        return self.group(group).parked(deadline)

    def resume(self, half: Half, deadline: Deadline) -> None:
        self.group(half.group).resume(half, deadline)

    def close(self) -> None:
        for group in list(self._groups.values()):
            group.close()

    def check(self, deadline: Deadline) -> list[Advice]:
        """Return the doctor's findings about half messages of all applications."""
        prefix = self._connection.broker.admin.internal_name(_PREFIX)
        names = [topic.name for topic in self._connection.broker.admin.topics(deadline)]
        found = {name.removeprefix(prefix).rpartition(".")[0] for name in names if name.startswith(prefix)}
        parts = [name.partition(".") for name in sorted(found)]
        return [each for a, _, group in parts for each in self._check(_unescaped(a), _unescaped(group), deadline)]

    def _check(self, application: str, group: str, deadline: Deadline) -> Iterator[Advice]:
        lanes = LaneGroup(self._consumers, self._logs, application, group)
        subject, arguments = f"half messages of group {group!r}", f"--group {group} --application {application}"
        if halves := lanes.parked(deadline):
            text = f"{len(halves)} are parked: their check-backs had no decision, or they cannot be published"
            yield Advice("problem", subject, text, f"txnbridge resolver parked {arguments}")
        if late := lanes.late(deadline):
            database = re.fullmatch(r"(.+)-db-[0-9a-f]{8}", group)  # of transactions with db=
            if database is not None:
                arguments = f"--group {database[1]} --application {application} --database URL"
            else:
                arguments += " --check MODULE:NAME"
            text = f"{late} are late: perhaps no process of the group is open to answer check-backs"
            yield Advice("warning", subject, text, f"txnbridge resolver run {arguments}")


@dataclass
class _Seen:
    """A topic of half messages (a lane) as last seen: since when it is unchanged, and whether nothing in it is open."""

    end: Position
    since: float
    settled: bool = False


class LaneGroup:
    """Stores and ends the half messages of one group in lanes, topics each of which one process writes. Thread-safe."""

    def __init__(self, consumers: Consumers, logs: DecisionLogs, application: str, group: str) -> None:
        self._consumers = consumers
        self._connection = consumers.connection
        self._logs = logs
        self._application = application
        self._group = group
        self._list = LedgerValue(logs.ledger(application, f"half/{group}"))
        self._own: tuple[int, str] | None = None  # the number of the own lane, and its owner's name
        self._lanes: dict[int, Lane] = {}  # those that this process holds, as far as it knows
        self._outcomes: OrderedDict[str, Outcome] = OrderedDict()
        self._guard = threading.Lock()  # of `_lanes`, while it is changed
        self._opening = threading.Lock()
        self._turn = threading.Lock()  # of the thread that tends the lanes
        self._seen: dict[int, _Seen] = {}
        self._look_at = self._tended_at = 0.0

    # --- the list of lanes ------------------------------------------------------------------------------------------

    def topic(self, number: int) -> str:
        """Return the name of the topic of half messages (lane) `number`, and of its transactional id: unique."""
        name = f"{_PREFIX}{_escaped(self._application)}.{_escaped(self._group)}.{number}"
        return self._connection.broker.admin.internal_name(name)

    def _listed(self, deadline: Deadline) -> dict[int, dict[str, Any]]:
        """Return the group's topics of half messages (lanes), each as a dict of fields, by number.

        The fields are `owner` (empty if no process owns the lane), `id`, that of the topic, and `kept`: the nonce of a
        heartbeat in the topic that is never removed, empty if the lane was never opened.
        """
        return _lanes_of(self._list.read(deadline))

    def _list_lane(self, number: int, before: str, deadline: Deadline, **fields: Any) -> bool:
        """Change a lane's fields if its owner is `before`; return whether so. A lane is a topic of half messages."""

        def change(value: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
            lanes = _lanes_of(value)
            lane = lanes.get(number, {"owner": ""})
            if lane["owner"] != before:
                return None
            return {"lanes": {str(n): each for n, each in {**lanes, number: {**lane, **fields}}.items()}}

        listed = _lanes_of(self._list.update(change, deadline))
        return bool(listed.get(number, {"owner": ""})["owner"] == fields.get("owner", before))

    # --- opening ----------------------------------------------------------------------------------------------------

    def own_lane(self, deadline: Deadline) -> Lane:
        """Return this process's topic of half messages (lane); if it has none, take one without owner or a new one."""
        if (own := self._own) is not None and (lane := self._held(*own)) is not None:
            return lane
        with self._opens(deadline):
            while True:
                if self._own is None:
                    self._own = self._take(deadline)
                try:
                    return self._open(*self._own, deadline)
                except EvidenceLost:  # it was given to another process
                    self._own = None

    def _take(self, deadline: Deadline) -> tuple[int, str]:
        while True:
            deadline.check(f"taking a lane of group {self._group!r}")
            listed = self._listed(deadline)
            free = [number for number, each in listed.items() if not each["owner"]]
            number, name = min(free, default=len(listed)), random_name(8)
            fields = {} if number in listed else {"id": self._topic_id(number, deadline), "kept": ""}
            if self._list_lane(number, "", deadline, owner=name, **fields):
                return number, name

    def _topic_id(self, number: int, deadline: Deadline) -> str:
        """Create the topic of half messages with this number, unless it exists; return the topic's id."""
        admin, topic = self._connection.broker.admin, self.topic(number)
        admin.create_internal_topic(topic, deadline)
        return admin.topic_ids([topic], deadline).get(topic, "")

    def _held(self, number: int, name: str) -> Lane | None:
        lane = self._lanes.get(number)
        return lane if lane is not None and lane.how["owner"] == name else None

    def _lane(self, number: int, name: str, deadline: Deadline) -> Lane:
        """Return lane `number` (a topic of half messages), opened here. Raise `EvidenceLost` unless `name` owns it."""
        if (lane := self._held(number, name)) is not None:
            return lane
        with self._opens(deadline):
            return self._open(number, name, deadline)

    def _opens(self, deadline: Deadline) -> AbstractContextManager[None]:
        return deadline.holding(self._opening, f"another thread opened a lane of group {self._group!r}")

    def _open(self, number: int, name: str, deadline: Deadline) -> Lane:
        """Open lane `number` (a topic of half messages) as the owner `name`. The caller has locked `_opening`."""
        while (lane := self._held(number, name)) is None:
            id, listed = self._topic_id(number, deadline), self._listed(deadline).get(number)
            if listed is None or listed["owner"] != name:
                raise EvidenceLost(f"lane {number} of group {self._group!r} was given to another process")
            identity = Identity(self.topic(number), True, self._application, self._connection.identity.host)
            how = {"lane": number, "owner": name}
            keep = lambda kept, deadline: self._list_lane(number, name, deadline, kept=kept)  # noqa: E731
            lane = Lane(self._consumers, self._logs, self._new_index(number), identity, how, keep)
            try:
                nonce = lane.open(deadline)
                self._check_complete(number, name, id, lane.index, nonce, deadline)
                with self._guard:
                    before, self._lanes[number] = self._lanes.get(number), lane
                if before is not None:  # of an owner before
                    before.close()
            except BaseException as error:
                lane.close()
                if not isinstance(error, PositionLost) or deadline.expired:
                    raise  # else the holder before has removed old records meanwhile
        return lane

    def _check_complete(
        self, number: int, name: str, id: str, index: LaneIndex, nonce: str, deadline: Deadline
    ) -> None:
        """Log an error if a topic of half messages, or records in it that txnbridge never removes, were deleted."""
        listed = self._listed(deadline)[number]  # the present one: the holder before may have removed records meanwhile
        renewed = id != listed["id"]
        lost = listed["kept"] and (renewed or listed["kept"] not in index.nonces)
        if lost:
            deleted = "it was" if renewed else "records of it were"
            _log.error("half messages in the topic %s are lost: %s deleted", self.topic(number), deleted)
        if lost or not listed["kept"]:
            self._list_lane(number, name, deadline, id=id, kept=nonce)

    def _is_own(self, lane: Lane) -> bool:
        return self._own == (lane.how["lane"], lane.how["owner"])

    def _new_index(self, number: int) -> LaneIndex:
        return LaneIndex(self._consumers, self.topic(number), self._outcomes)

    def _drop(self, lane: Lane) -> None:
        """Close and forget a topic of half messages: another process may own it by now, or all in it has ended."""
        with self._guard:  # not `_opening`, with which another thread may ask the broker beyond the caller's deadline
            for number, each in list(self._lanes.items()):
                if each is lane:
                    del self._lanes[number]
        lane.close()

    # --- halves -----------------------------------------------------------------------------------------------------

    def store(self, half: Half, deadline: Deadline) -> Half:
        while True:
            lane = self.own_lane(deadline)
            try:
                lane.store(half, deadline)
            except BaseException as error:
                self._give_up(lane, error, deadline)
            else:
                return replace(half, how=lane.how)

    def end(self, half: Half, decision: Decision, deadline: Deadline) -> Outcome:
        while True:
            how = half.how  # empty if the answer to its storing was lost
            lane = self._lane(how["lane"], how["owner"], deadline) if how else self.own_lane(deadline)
            try:
                outcome = lane.end(half, decision, deadline)
                if time.monotonic() - self._tended_at > self._connection.timing.lane_untended:
                    self._remove_old(lane, deadline)
            except BaseException as error:
                self._give_up(lane, error, deadline)
            else:
                return outcome

    def _remove_old(self, lane: Lane, deadline: Deadline) -> None:
        """Remove half messages' old records in a process without a resolver, such as one with an `AsyncSession`."""
        held: list[bool] = []
        try:
            if Deadline(0).acquire(self._turn, held):
                with suppress(TxnBridgeError):  # the half is ended, and a later call tries again
                    lane.remove_old(deadline)
        finally:
            if held:
                self._turn.release()

    def _give_up(self, lane: Lane, error: BaseException, deadline: Deadline) -> None:
        """Close a topic of half messages if the error means that another process may own it; raise any other error."""
        if is_lost(error):
            self._drop(lane)
        if not (is_lost(error) and isinstance(error, TxnBridgeError)) or deadline.left() <= _RETRY_SECONDS:
            raise error
        time.sleep(_RETRY_SECONDS)

    # --- check-backs ------------------------------------------------------------------------------------------------

    def checks(self, limit: int, deadline: Deadline) -> list[Half]:
        held: list[bool] = []
        try:
            if not deadline.acquire(self._turn, held):
                return []
            while True:
                due = self._tend(limit)
                try:
                    self._look(self._connection.deadline())
                except TxnBridgeError:
                    if not due:
                        raise
                if due or deadline.expired:
                    return due
                time.sleep(min(_IDLE_SECONDS, deadline.left()))
        finally:
            if held:
                self._turn.release()

    def _tend(self, limit: int) -> list[Half]:
        """Tend this process's lanes (topics of half messages); return up to `limit` due halves."""
        self._tended_at = time.monotonic()
        due: list[Half] = []
        failed: TxnBridgeError | None = None
        for lane in list(self._lanes.values()):
            try:
                lane.tend(self._connection.deadline())
                due += lane.next_halves(self._group, limit - len(due), self._connection.deadline())
                if not self._is_own(lane) and not lane.waits:  # nothing is left to do in the lane of a dead process
                    self._drop(lane)
            except TxnBridgeError as error:
                if is_lost(error):
                    self._drop(lane)
                else:
                    failed = error
        if failed is not None and not due:
            raise failed
        return due

    def _look(self, deadline: Deadline) -> None:
        """Look for lanes, topics of half messages, whose process seems dead, and take them over."""
        now, timing = time.monotonic(), self._connection.timing
        if now < self._look_at:
            return
        listed = self._listed(deadline)
        ends = self._ends(listed, deadline)
        for number, each in listed.items():
            end = ends.get(number, ())  # () if its topic was deleted
            seen = self._seen.get(number)
            if seen is None or seen.end != end:
                self._seen[number] = _Seen(end, now, settled=not end)
            elif not each["owner"] or ((lane := self._lanes.get(number)) is not None and lane.waits):
                pass
            elif seen.settled:
                if now - seen.since > timing.lane_free:
                    self._list_lane(number, each["owner"], deadline, owner="")
            elif now - seen.since > timing.lane_takeover + random.uniform(0, timing.lane_look):  # not all at once
                self._take_over(number, each["owner"], seen, now - seen.since, deadline)
        self._look_at = time.monotonic() + timing.lane_look

    def _ends(self, numbers: Iterable[int], deadline: Deadline) -> dict[int, Position]:
        """Return the end positions of topics of half messages, given and returned by number; without missing topics."""
        topics = {self.topic(number): number for number in numbers}
        admin = self._connection.broker.admin
        try:
            bounds = admin.bounds(list(topics), deadline)
        except NotFound:
            bounds = {}
            for topic in topics:
                with suppress(NotFound):
                    bounds |= admin.bounds([topic], deadline)
        return {topics[topic]: end for (topic, _), (_, end) in bounds.items()}

    def _take_over(self, number: int, owner: str, seen: _Seen, still: float, deadline: Deadline) -> None:
        with closing(self._new_index(number)) as index, suppress(PositionLost):  # its holder removes records: it lives
            index.read_all(deadline)
            if all(each.parked for each in index.undone.values()) and not index.freed():
                seen.settled = True
            elif still > index.patience:
                _log.info("lane %d of group %r stands still: this process takes it over", number, self._group)
                if (lane := self._lanes.get(number)) is not None:  # resumed by an administrator
                    self._drop(lane)
                seen.since = time.monotonic()  # if this fails, the next attempt waits
                with suppress(EvidenceLost, Fenced):
                    for lane in list(self._lanes.values()):
                        if lane.waits:
                            lane.beat(deadline.left(), deadline)  # this thread may be busy for so long
                    self._lane(number, owner, deadline)

    def leave(self, deadline: Deadline) -> None:
        """Close this process's topics of half messages; free its own for others if no half message in it is open."""
        with deadline.holding(self._turn, f"another thread tended {self._group!r}"), self._opens(deadline):
            for number, lane in list(self._lanes.items()):
                with suppress(TxnBridgeError), closing(lane):
                    if self._is_own(lane) and not lane.index.undone:
                        lane.tend(deadline)
                        lane.close()  # before the next look, so that no other thread stores a half behind it
                        if not lane.index.undone:
                            self._list_lane(number, lane.how["owner"], deadline, owner="")
                            self._own = None
                self._lanes.pop(number, None)
            self._seen.clear()

    def close(self) -> None:
        """Leave all topics of half messages to other processes, when the bridge is closed."""
        for lane in list(self._lanes.values()):
            lane.close()

    # --- parked halves ----------------------------------------------------------------------------------------------

    def parked(self, deadline: Deadline) -> list[Half]:
        found = []
        for number, owner, index in self._indexes(deadline):
            ids = [id for id, each in index.undone.items() if each.parked]
            bodies = index.bodies(ids, deadline)
            for id in ids:
                each, how = index.undone[id], {"lane": number, "owner": owner}
                messages = bodies.get(id, [])
                found.append(Half(self._group, id, messages, each.check_at, each.deadline_at, each.checks, how))
        return found

    def late(self, deadline: Deadline) -> int:
        """Return how many transactions' check-backs are late for longer than a takeover from a dead process takes."""
        before = (time.time() - 4 * self._connection.timing.lane_takeover) * 1000
        count = 0
        for _, _, index in self._indexes(deadline):
            count += sum(not each.parked and each.check_at < before for each in index.undone.values())
        return count

    def _indexes(self, deadline: Deadline) -> Iterator[tuple[int, str, LaneIndex]]:
        listed = self._listed(deadline)
        for number in self._ends(listed, deadline):
            with closing(self._read_index(number, deadline)) as index:
                yield number, listed[number]["owner"], index

    def _read_index(self, number: int, deadline: Deadline) -> LaneIndex:
        while True:
            index = self._new_index(number)
            try:
                index.read_all(deadline)
            except BaseException as error:
                index.close()
                if not isinstance(error, PositionLost) or deadline.expired:
                    raise  # else its holder has just removed old records
            else:
                return index

    def resume(self, half: Half, deadline: Deadline) -> None:
        while True:
            lane = self._lane(half.how["lane"], half.how["owner"], deadline)
            try:
                return lane.park(half.transaction, "", deadline)
            except TxnBridgeError as error:
                self._give_up(lane, error, deadline)


def _size(message: HalfMessage) -> int:
    headers = sum(len(name) + len(value or b"") for name, value in message.headers)
    return len(message.value or b"") + len(message.key or b"") + headers


def _lanes_of(value: Mapping[str, Any] | None) -> dict[int, dict[str, Any]]:
    return {int(number): dict(each) for number, each in ((value or {}).get("lanes") or {}).items()}


def _escaped(text: str) -> str:
    """Return text in the characters that all brokers allow in a topic's name; others become `_` and two digits."""
    name = "".join(chr(c) if c in _PLAIN else f"_{c:02x}" for c in text.encode())
    digest = sha256(text.encode()).hexdigest()[:16]
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - len(digest) - 1]}_{digest}"


def _unescaped(name: str) -> str:
    return re.sub(
        "((?:_[0-9a-f]{2})+)", lambda found: bytes.fromhex(found[0].replace("_", "")).decode(errors="replace"), name
    )
