"""`Settling`: after a run's work, open transactions are ended, and groups read on until they have read everything."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import txnbridge
from txnbridge import Bridge, Capability, Decision, Message
from txnbridge.errors import NotFound, TxnBridgeError
from txnbridge_conformance.checker import COMMITTED, Findings, fates
from txnbridge_conformance.history import CHANGED, History, Operation, read_history
from txnbridge_conformance.run.bodies import sent_as
from txnbridge_conformance.run.client import Client
from txnbridge_conformance.run.plan import PARTITIONS
from txnbridge_conformance.run.sales import Sales

_log = logging.getLogger("txnbridge")

# More messages than a topic of a run contains.
ALL = 100_000_000

# Roles whose processes stop first: the others still have their messages to read and their tokens to finish.
_SOURCES = ("write", "own", "oversleep", "decide", "feed", "publish", "sell", "span")
_MEMBERS = ("copy", "process", "share", "serve")
# The longest time to wait for open transactions, and for groups.
_SETTLING_SECONDS = 90.0
# The time in which the broker ends a transaction that its process has aborted.
_ABORTING_SECONDS = 20.0
# A prepared acknowledgement may count in a group's position, so an abort after the group has read everything would give
# messages back that nobody reads any more.
_ONLY_COMMIT = ("commit",)
# The pause between two looks at the histories of a group's members.
_LOOK_SECONDS = 3.0
# A group has read everything if a new member receives nothing for this time.
_QUIET_SECONDS = 10.0
# The errors with which a call is recorded whose process has aborted its transaction, and got no error of the broker.
_ABORTED_BY_PROCESS = ("Abort", "InvalidState")


@dataclass(eq=False, repr=False)
class Settling:
    """Ends transactions that a run's processes leave open after their work, and waits until groups have read all.

    `roles` are those of the run's processes. `stop` stops the processes of some roles, `replace_dead` starts processes
    again that have ended. `raw` is True if the processes use the broker's plain client.
    """

    _client: Client
    _bridge: Bridge
    _roles: Collection[str]
    _stop: Callable[[Collection[str]], None]
    _replace_dead: Callable[[], None]
    raw: bool
    _next_look: float = 0.0
    _left: int = 0  # the number of messages that a group has not read

    def __post_init__(self) -> None:
        self._plan, self._recorder = self._client.plan, self._client.recorder
        # RocketMQ sends check-backs to the plain clients that stored half messages: these run until none come any more.
        self._answerers = ("sell",) if self.raw else ()

    def settle(self) -> None:
        """Stop the processes, and end each transaction that they left open or prepared. Members of groups stop last."""
        self._plan.closing.touch()
        self._stop([role for role in _SOURCES if role not in self._answerers])
        self._stop(("finish",))
        self._end_spans()
        history = read_history([self._plan.folder])
        self._finish_all(history)
        with self._answered_check_backs(history):
            self._await(
                functools.partial(self._ended_is_closed, history),
                "aborted transactions are still open",
                _ABORTING_SECONDS,
            )
            self._await(self._ended_all(), "transactions of the run are still open")
        groups = self._plan.groups(self._roles)
        drained = [self._wait(functools.partial(self._is_drained, group, self._sent(history))) for group in groups]
        if "watch" in self._roles:
            self._await(self._is_watched, "a reader without a group has not received all", _SETTLING_SECONDS)
        if self._bridge.capabilities[Capability.GROUP_ADMIN]:
            done = [group for group, failure in zip(groups, drained, strict=True) if failure is None]
            self._await(lambda: all(map(self._is_listed, done)), "a group, or a partition of one, is not listed")
        self._stop((*_MEMBERS, "watch", "witness"))
        for group, failure in zip(groups, drained, strict=True):
            self._note_drained(group, failure)
        self._finish_all(read_history([self._plan.folder]), _ONLY_COMMIT)
        self._await(self._ended_all(), "transactions of groups are still open")
        if not self._answerers:
            # A killed broker may leave control markers out. A bridge that uses the partitions writes them 20 s later.
            with self._bridge.consumer(self._plan.all_topics):
                self._await(self._is_repaired, "ended transactions hold readers back")

    def _await(self, condition: Callable[[], bool], what: str, seconds: float = _SETTLING_SECONDS) -> None:
        """Wait until a condition is true, for `seconds` at most. Record the wait and its result in the history.

        `what` says in the history what is wrong if the condition stays false.
        """
        call = self._recorder.start("settle", condition=what)
        failure = self._wait(condition, seconds)
        call.end("ok" if failure is None else "fail", error=failure)

    def _wait(self, condition: Callable[[], bool], seconds: float = _SETTLING_SECONDS) -> str | None:
        """Wait until a condition is true. Return None, or the last error as text, perhaps "", if it stays false.

        The time begins again whenever fewer messages are `_left` than ever before, because a long run leaves much to
        read, and a busy machine reads slowly. A group that only repeats its transactions does not prolong the wait.
        """
        until, self._left = time.monotonic() + seconds, ALL
        least, failure = ALL, ""
        while time.monotonic() < until:
            self._replace_dead()
            try:
                if condition():
                    return None
            except TxnBridgeError as error:
                failure = f"{type(error).__name__}: {error}"
            if self._left < least:
                until, least = time.monotonic() + seconds, self._left
            time.sleep(0.2)
        return failure

    # --- transactions -------------------------------------------------------------------------------------------------

    def _finish_all(self, history: History, wishes: Sequence[str] = ("commit", "abort")) -> None:
        """Ask for the status of each transaction with an unknown outcome. End the prepared ones as one of `wishes`."""
        finish = functools.partial(self._finish, _without_outcome(history), wishes)
        self._await(finish, "transactions have no outcome")

    def _finish(self, left: dict[str, Operation], wishes: Sequence[str]) -> bool:
        """Ask for or decide the outcome of these transactions, and remove each whose outcome is final.

        Return whether none is left. A prepared transaction's status is asked first: it shows an abort that nobody
        wanted.
        """
        for transaction, ended in list(left.items()):
            calls = ("status", self._client.random.choice(wishes)) if ended.outcome == "prepared" else ("status",)
            if any(self._client.finish(self._bridge, transaction, ended.fields["token"], wish) for wish in calls):
                del left[transaction]
        return not left

    def _ended_all(self) -> Callable[[], bool]:
        """Return a condition: all transactions that were open on the run's topics when it was first asked have ended.

        Meanwhile members of groups may work on and begin others.
        """
        left: set[str] | None = None

        def ended() -> bool:
            nonlocal left
            now = open_on(self._bridge, self._plan.topics)
            left = now if left is None else left & now
            return not left

        return ended

    def _ended_is_closed(self, history: History) -> bool:
        """Return whether the broker lists no transaction as open that its process has aborted."""
        if not self._bridge.capabilities[Capability.LIST_OPEN]:
            return True
        ended = {each.transaction for each in history.operations if each.fields.get("error") in _ABORTED_BY_PROCESS}
        return ended.isdisjoint(each.transaction for each in self._bridge.admin.transactions())

    def _is_repaired(self) -> bool:
        """Return whether the doctor finds no transaction that has ended, but not in each of the run's partitions."""
        found: list[str] = []
        with suppress(TxnBridgeError):  # a right may be missing
            found += [each.text for each in self._bridge.admin.doctor() if "transactions repair" in each.remedy]
        return not any(f"{topic}[" in text for text in found for topic in self._plan.all_topics)

    def _end_spans(self) -> None:
        """Let a resolver end transactions over two brokers that processes left prepared; wait until none is left."""
        if "span" not in self._roles:
            return
        with self._client.at_second().bridge() as second:
            bridges, topics = (self._bridge, second), frozenset(self._plan.spanned)
            txnbridge.spanning(*bridges)  # this process is a resolver as long as both bridges are open
            self._await(lambda: not any(open_on(each, topics) for each in bridges), "parts of spans are still open")

    # --- half messages ------------------------------------------------------------------------------------------------

    @contextmanager
    def _answered_check_backs(self, history: History) -> Iterator[None]:
        """During the block, publish each half message whose work was done, and let check-backs be answered.

        Record at the end what was decided about half messages. RocketMQ asks only a bridge of the same application
        about a transaction, so a bridge of the owners' application is open meanwhile.
        """
        with self._client.bridge(application=self._plan.named("owner")):
            if "sell" not in self._roles:
                yield
                return
            sales = Sales(self._plan.sales)

            def check(transaction: str, messages: Sequence[Message]) -> Decision:
                self._client.note_check(transaction, messages)
                return sales.decide(transaction, Decision.ABORT)

            answering: AbstractContextManager[object] = nullcontext()
            if not self._answerers:
                answering = self._bridge.resolver(self._plan.named("sellers"), check=check)
            with answering:
                self._await(
                    lambda: self._values(*self._plan.sold) >= _wanted(history, sales), "half messages are not published"
                )
                yield
            self._stop(self._answerers)
        for transaction, decision in sales.all().items():
            if decision is not Decision.UNDECIDED:
                call = self._recorder.start("decided", transaction=transaction)
                call.end("ok", outcome="committed" if decision is Decision.COMMIT else "aborted")

    def _values(self, *topics: str) -> set[str]:
        return {sent_as(message) for topic in topics for message in self._bridge.read(topic, ALL)}

    def _is_watched(self) -> bool:
        """Return whether processes of the role "watch" have received all messages that can be read of their topics."""
        polls = read_history([self._plan.folder]).polls
        received = {value.removeprefix(CHANGED) for _, _, messages in polls for *_, value in messages if value}
        self._left = len(self._values(self._plan.named("left"), self._plan.named("right")) - received)
        return not self._left

    # --- groups -------------------------------------------------------------------------------------------------------

    def _sent(self, history: History) -> set[str]:
        """Return the values of the messages that groups have to read."""
        source = self._plan.named("source")
        return {
            value
            for order, (topic, _), values in history.sends
            if topic == source and history.operations[order].result == "ok"
            for value in values
        }

    def _note_drained(self, group: str, failure: str | None) -> None:
        """Record that a group without members has read everything, or a finding if it has not.

        Without a `failure`, the group's positions have shown this. With a `failure`, the positions could not be
        compared, so a new member must receive nothing.
        """
        call = self._recorder.start("drained", group=group, topics=[self._plan.named("source")])
        if failure is not None and not self._receives_nothing(group):
            call.end("unknown", error=failure)
            self._recorder.start("settle", condition=f"{group} has not read everything").end("fail", error=failure)
        else:
            call.end("ok")

    def _receives_nothing(self, group: str) -> bool:
        """Return whether a member that has all partitions of the source topic receives nothing for some seconds."""
        until = time.monotonic() + _SETTLING_SECONDS
        while time.monotonic() < until:
            with suppress(TxnBridgeError), self._client.bridge() as bridge:
                sharing = self._plan.sharing(group, bridge.capabilities)
                with bridge.consumer(self._plan.named("source"), group, sharing=sharing) as consumer:
                    quiet_since = time.monotonic()
                    while (now := time.monotonic()) < until:
                        if consumer.poll(1, timeout=1):
                            return False
                        if len(consumer.assignment) < PARTITIONS:
                            quiet_since = time.monotonic()
                        elif now > quiet_since + _QUIET_SECONDS:
                            return True
            time.sleep(_LOOK_SECONDS)  # a call failed, perhaps because the machine is busy
        return False

    def _is_drained(self, group: str, sent: Collection[str]) -> bool:
        lag: list[int] = []  # a partition of which the group has acknowledged nothing is missing in it
        if self._bridge.capabilities[Capability.GROUP_ADMIN] and "serve" not in self._roles:  # retries wait elsewhere
            with suppress(NotFound):
                lag += self._bridge.admin.group(group).lag.values()
        return lag == [0] * PARTITIONS or self._has_acknowledged(group, sent)

    def _is_listed(self, group: str) -> bool:
        """Return whether the broker lists a group that has read everything, and each partition that it has read."""
        source = self._plan.named("source")
        read = {(source, message.partition) for message in self._bridge.read(source, ALL)}
        return group in self._bridge.admin.groups() and read <= self._bridge.admin.group(group).lag.keys()

    def _has_acknowledged(self, group: str, sent: Collection[str]) -> bool:
        """Return whether committed transactions have acknowledged all messages of the source topic for a group.

        First end the transactions that the group's members have prepared. A transaction also counts as committed if its
        output can be read, because its process may have been killed before it recorded the commit. The group's lag
        cannot be used: some brokers count control markers in it.
        """
        if time.monotonic() < self._next_look:
            return False
        writers = (*_MEMBERS, "finish", "run")
        history = read_history([file for each in writers for file in Path(self._plan.folder).glob(f"{each}*.jsonl")])
        self._finish(_without_outcome(history), _ONLY_COMMIT)
        readable = {sent_as(message) for message in self._bridge.read(self._plan.named("source"), ALL)}
        left = readable.union(sent) - acknowledged(history, group)
        if left:
            outputs = (self._plan.named("target"), self._plan.named("processed"), self._plan.dead_letters)
            seen = {sent_as(message) for topic in outputs for message in self._bridge.read(topic, ALL)}
            left -= acknowledged(history, group, seen)
        self._next_look = time.monotonic() + _LOOK_SECONDS
        self._left = len(left)
        return not left


def open_on(bridge: Bridge, topics: Collection[str]) -> set[str]:
    """Return the transactions that a broker lists as open or prepared on these topics."""
    if not bridge.capabilities[Capability.LIST_OPEN]:
        return set()
    listed = bridge.admin.transactions()
    return {each.transaction for each in listed if any(topic in topics for topic, _ in each.partitions)}


def delete_topics(bridge: Bridge, part: str) -> None:
    """Delete the topics with `part` in their names; abort before what is open on them. Log a topic that stays."""
    topics: list[str] = []
    with suppress(TxnBridgeError):
        topics += [each.name for each in bridge.admin.topics() if part in each.name]
        for transaction in open_on(bridge, topics):  # left by killed processes
            with suppress(TxnBridgeError):
                bridge.admin.abort(transaction, reason="conformance run")
    for topic in topics:
        try:
            bridge.admin.delete_topic(topic)
        except TxnBridgeError as error:
            _log.warning("the topic %s is left: %s", topic, error)


def _wanted(history: History, sales: Sales) -> set[str]:
    """Return the values of the half messages that must be published: their local work was done."""
    done = {transaction for transaction, decision in sales.all().items() if decision is Decision.COMMIT}
    halves = {each.order: each for each in history.operations if each.what == "half"}
    return {
        value
        for order, _, values in history.sends
        if order in halves and (halves[order].transaction in done or halves[order].outcome == "committed")
        for value in values
    }


def _without_outcome(history: History) -> dict[str, Operation]:
    """Return, by transaction, the calls that returned a token, if no call has returned the transaction's outcome."""
    known = {each.transaction for each in history.operations if each.outcome in ("committed", "aborted")}
    return {
        each.transaction: each
        for each in history.operations
        if each.transaction and each.fields.get("token") and each.transaction not in known
    }


def acknowledged(history: History, group: str, seen: Collection[str] = ()) -> set[str]:
    """Return the values acknowledged for a group by transactions that are committed, or of which a message was seen."""
    fate = fates(history.operations, Findings())
    shown = {order for order, _, values in history.sends if not set(values).isdisjoint(seen)}
    taken = [each for each in history.acks if each[1] == group and (fate[each[0]] == COMMITTED or each[0] in shown)]
    return {value for _, _, values in taken for value in values}
