"""The checker: small histories for what no simulated defect plants, the verdict, and the form of a history."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.resources import files
from typing import Any
from unittest.mock import create_autospec

import pytest
from jsonschema import Draft202012Validator
from txnbridge_conformance.checker import MEANINGS, Findings, check
from txnbridge_conformance.checker._clocks import RealTime
from txnbridge_conformance.history import History, HistoryError
from txnbridge_conformance.report.promises import rows
from txnbridge_conformance.run.verdict import EXCUSED_BY, Verdict, evidence, judge

from txnbridge import Capability

T0, T1 = ("t", 0), ("t", 1)
SCHEMA = Draft202012Validator(json.loads((files("txnbridge_conformance") / "history.schema.json").read_bytes()))


class Story:
    """Builds a history: time passes by `tick` with each line, and positions are given in the order of `commit`.

    `ahead` are processes on other hosts, with the time by which the clocks there are ahead.
    """

    def __init__(self, tick: int = 1, **ahead: int) -> None:
        self._lines: dict[str, list[dict[str, Any]]] = {}
        self._now = itertools.count(tick, tick)
        self._ahead = ahead
        self._numbers = itertools.count()

    def write(self, process: str, **line: Any) -> None:
        if process not in self._lines:
            client = "c" if process == "official" else "txnbridge 1"
            head = {"history": 1, "process": process, "client": client, "pid": 1, "mono": 0, "wall": 0}
            self._lines[process] = [{**head, "host": f"h{self._ahead.get(process, '')}"}]
        if process in self._ahead and "mono" in line:
            line["mono"] += self._ahead[process]
        self._lines[process].append(line)

    def begin(self, process: str, what: str = "transaction", **fields: Any) -> int:
        number = next(self._numbers)
        self.write(process, start=number, what=what, mono=next(self._now), wall=0, **fields)
        return number

    def send(self, process: str, call: int, *values: str, to: tuple[str, int] = T0) -> None:
        self.write(process, send=call, to=list(to), values=list(values))

    def stored(self, process: str, call: int, value: str, position: int, to: tuple[str, int] = T0) -> None:
        self.write(process, stored=call, to=list(to), values=[value], positions=[[position]])

    def poll(self, process: str, call: int, *log: str, to: tuple[str, int] = T0, at: int = 0) -> None:
        """Receive a log of values from the position `at` on; "-" is a position without a message."""
        messages = [[*to, [at + place], value] for place, value in enumerate(log) if value != "-"]
        self.write(process, poll=call, group=None, messages=messages)

    def assign(self, process: str, call: int, *keys: tuple[str, int]) -> None:
        self.write(process, assign=call, keys=list(keys))

    def ack(self, process: str, call: int, *values: str) -> None:
        self.write(process, ack=call, group="g", values=list(values))

    def end(self, process: str, call: int, result: str = "ok", **fields: Any) -> None:
        self.write(process, end=call, result=result, mono=next(self._now), wall=0, **fields)

    def txn(
        self,
        process: str,
        *values: str,
        p1: str = "",
        stored: tuple[str, int] | None = None,
        polls: Iterable[str] = (),
        acks: Iterable[str] = (),
        what: str = "transaction",
        result: str | None = "ok",
        **fields: Any,
    ) -> Story:
        """A whole call: what it sends to one partition and to the other, receives and acknowledges; None has no end."""
        told = {name: fields.pop(name) for name in ("outcome", "error", "thread") if name in fields}
        call = self.begin(process, what, **fields)
        if values:
            self.send(process, call, *values)
        if p1:
            self.send(process, call, *p1.split(), to=T1)
        if stored:
            self.stored(process, call, *stored)
        if polls:
            self.poll(process, call, *polls)
        if acks:
            self.ack(process, call, *acks)
        if result:
            self.end(process, call, result, **told)
        return self

    def drained(self) -> Story:
        return self.txn("run", what="drained", group="g", topics=["t"])

    def read(self, *log: str, result: str = "ok", by: str = "reader", **logs: str) -> Story:
        """A reader that reads everything in both partitions of the topic: the first in `log`, the other in `p1=`."""
        call = self.begin(by, "read", topics=["t"])
        self.poll(by, call, *log)
        self.poll(by, call, *logs.get("p1", "").split(), to=T1)
        self.end(by, call, result)
        return self

    def rename(self, process: str, name: str) -> None:
        self._lines[process][0]["process"] = name

    def lines(self, process: str) -> list[bytes]:
        return [json.dumps(line).encode() + b"\n" for line in self._lines[process]]

    def history(self) -> History:
        history = History()
        for process in self._lines:
            history.add(self.lines(process), process)
        return history

    def found(self) -> list[str]:
        return check(self.history()).names


def test_a_committed_message_below_what_was_read_is_lost_and_one_of_unknown_position_unseen():
    story = Story().txn("a", "1", "2", stored=("1", 0)).txn("a", "3").read("-", "2", "3")
    assert story.found() == ["lost-write", "torn-transaction"]
    assert Story().txn("a", "1", "2").read("1").found() == ["unseen", "torn-transaction"]


def test_an_undecided_acknowledgement_may_hold_its_message():
    for prepare, found in ((True, []), (False, ["half-ack"])):
        story = Story().txn("feed", "1").txn("a", "2", acks=["1"], prepare=prepare, result=None)
        assert story.drained().read("1").found() == found


def test_a_group_owes_a_message_that_anybody_received_whatever_is_known_of_its_call():
    for seen, found in ((["1"], ["half-ack"]), ([], [])):
        story = Story().txn("feed", "1", what="publish", result=None).txn("watch", what="poll", polls=seen)
        assert story.drained().read(*seen).found() == found


@pytest.mark.parametrize(
    ("prepare", "again", "found"),
    [
        (False, "1", ["replay-duplicate"]),
        (False, "1 2", []),  # it is aborted
        (False, "", []),  # it is committed
        (True, "1", []),  # it may be undecided, and hold its messages
        (False, "later", []),
    ],
)
def test_acknowledgements_of_one_transaction_count_together(prepare, again, found):
    story = Story().txn("feed", "1", "2").txn("a", acks=["1", "2"], prepare=prepare, result=None)
    if again == "later":
        story.drained()
    if again:
        story.txn("b", acks=["1"] if again == "later" else again.split())
    if again != "later":
        story.drained()
    assert story.read("1", "2").found() == found


def test_a_member_that_was_killed_before_it_asked_for_its_commit_has_acknowledged_nothing():
    cases: list[tuple[dict[str, Any], list[str]]] = [({}, ["half-ack"]), ({"ending": 6}, [])]
    for asked, found in cases:
        story = Story().txn("feed", "1").txn("c", begun=3, ending=3)  # the client tells when it asks
        story.txn("watch", what="poll", polls=["1"]).txn(
            "a", acks=["1"], transaction="x", begun=6, result=None, **asked
        )
        assert story.drained().found() == found


def test_a_reader_in_the_middle_may_miss_what_is_committed_meanwhile_and_no_other_message():
    for committed_before in (True, False):
        story = Story()
        call = story.begin("a")
        story.send("a", call, "1")
        story.send("a", call, "2", to=T1)
        if committed_before:
            story.txn("feed", "x").end("a", call)
            story.read("1", "x")
        else:
            story.txn("feed", "x", acks=["x"]).read("x").drained().end("a", call)
        found = story.read(*(("1", "x") if committed_before else ("x", "1")), p1="2").found()
        assert found == (["unseen", "torn-transaction"] if committed_before else [])


def test_a_message_that_was_read_once_and_is_absent_later_was_of_an_aborted_transaction():
    assert Story().txn("a", "1", result=None).txn("b", what="poll", polls=["1"]).read().found() == ["G1a"]


def test_a_message_that_was_received_is_in_every_later_full_read_whatever_is_known_of_its_call():
    for what, first, found in (
        ("transaction", "read", ["lost-write"]),
        ("publish", "poll", ["lost-write"]),
        ("publish", None, []),
    ):
        story = Story().txn("a", "1", what=what, result=None)
        if first == "read":
            story.read("1", by="early")
        elif first:
            story.txn("b", what=first, polls=["1"])
        assert story.txn("c", "2").read("-", "2").found() == found
    story = Story().txn("a", "1", what="publish", result=None)
    reading = story.begin("reader", "read", topics=["t"])
    story.txn("b", what="poll", polls=["1"]).end("reader", reading)
    assert story.found() == []  # it was stored while the read went on


def test_a_copy_that_our_readers_drop_is_told_and_no_other_copy():
    for log, copied, found in (
        (("1", "2", "-", "3"), ("1", "2", "1", "3"), "foreign-duplicate"),
        (("1", "2", "1", "3"), ("1", "2", "1", "3"), "duplicate"),
        (("-", "-", "1"), ("1", "-", "1"), "duplicate"),
    ):
        story = Story().txn("a", *sorted(set(copied) - {"-"})).read(*log).read(*copied, by="official")
        assert story.found() == [found] if found == "foreign-duplicate" else found in story.found()
    assert "duplicate" in Story().txn("official", "1").read("1").read("1", "1", by="official").found()


def test_a_reader_without_positions_finds_what_is_missing_and_what_comes_twice():
    story = Story().txn("a", "1", "2", "3")
    call = story.begin("official", "read", topics=["t"])
    story.write("official", poll=call, group=None, messages=[["t", 0, None, value] for value in ("1", "2", "1")])
    story.end("official", call)
    assert story.found() == ["unseen", "duplicate", "torn-transaction"]


def test_a_transaction_does_not_receive_what_it_sends_and_one_that_was_committed_is_there():
    assert Story().txn("a", "1", polls=["1"]).found() == ["precommitted-read"]
    assert Story().txn("a", "1").read().found() == ["unseen", "outcome-lie"]


def test_a_prepared_transaction_whose_commit_was_not_answered_may_be_there_or_not():
    for log in ((), ("1",)):
        assert prepared_story().txn("b", what="finish", transaction="x", result=None).read(*log).found() == []


def test_an_outcome_that_was_told_is_not_lost_later():
    for final, error, lies in ((False, None, 0), (True, None, 1), (None, "EvidenceLost", 1)):
        story = prepared_story().txn("b", what="finish", transaction="x", wish="commit", outcome="committed")
        told = {"error": error} if error else {"outcome": "unknown", "final": final}
        assert story.txn("b", what="status", transaction="x", **told).found() == ["split-decision"] * lies


@pytest.mark.parametrize(("seconds", "found"), [(20, []), (200, ["hang"])])
def test_a_prepared_transaction_that_nobody_ends_is_not_there_long_after_its_hold(seconds, found):
    story = Story(tick=10**9).txn("a", "1", transaction="x", hold=5, deadline=5, outcome="prepared")
    for _ in range(seconds // 2):  # a call takes two ticks
        story.txn("b", what="poll")
    assert story.txn("b", what="status", transaction="x", outcome="prepared").found() == found


def test_a_transaction_whose_own_call_told_its_outcome_is_not_prepared_later():
    for result, outcome, lies in (
        ("ok", "prepared", 1),
        ("fail", "prepared", 1),
        (None, "prepared", 0),
        ("ok", "unknown", 0),
    ):
        story = Story().txn("a", "1", transaction="x", result=result)
        story.txn("b", what="status", transaction="x", outcome=outcome, final=True)
        assert story.found() == ["split-decision"] * lies


def test_calls_for_one_transaction_are_not_each_compared_with_all_others(monkeypatch):
    compared = create_autospec(RealTime.ended_before, side_effect=RealTime.ended_before)
    monkeypatch.setattr(RealTime, "ended_before", compared)
    story = prepared_story()
    for number in range(200):
        story.txn("b", what="status", transaction="x", outcome="prepared" if number % 2 else "committed")
    assert check(story.history()).counts["split-decision"] == 100
    assert sum(len(each.args[1]) for each in compared.call_args_list) < 1000


def test_a_check_back_shows_the_messages_of_its_transaction():
    cases = [("x", "x", "2 1", 0), ("x", "x", "1", 1), ("x", "x", "1 2 2", 1), ("x", "y", "1 2", 1)]
    # Of one whose process was killed before it knew the name.
    cases += [("", "y", "1", 0), ("", "y", "1 3", 1), ("", "y", "", 1)]
    for stored, asked, shown, lies in cases:
        story = Story().txn("a", "1", "2", what="half", transaction=stored or None, result=None)
        story.txn("b", what="check", transaction=asked, values=shown.split())
        assert story.found() == ["checkback-lie"] * lies


def test_half_messages_that_their_process_had_not_named_are_published_if_a_check_back_says_so():
    for outcome, found in ("aborted", ["phantom-commit"]), ("committed", []), (None, ["early-read"]):
        story = Story().txn("a", "0", what="half", ending=1).txn("a", "1", what="half", result=None)
        if outcome:
            story.txn("b", what="check", transaction="x", values=["1"])
        assert story.txn("run", what="decided", transaction="x", outcome=outcome).read("0", "1").found() == found


def test_a_run_whose_condition_never_comes_true_hangs():
    for result, found in (("fail", ["hang"]), (None, [])):  # the run was cut off
        story = Story().txn("run", what="settle", condition="transactions are still open", result=result)
        assert story.found() == found
        assert verdict_without("deadline", story) is (Verdict.BROKEN if found else Verdict.KEPT)


@pytest.mark.parametrize(("deadline", "fault", "found"), [(8, "", ["hang"]), (8, "kill", []), (30, "", [])])
def test_a_call_without_an_end_hangs_also_if_its_process_records_nothing_more(deadline, fault, found):
    story = Story(tick=10**10).txn("a", "1", deadline=deadline, result=None)
    if fault:
        story.write("run", fault=fault, target="a", phase="begin", mono=11 * 10**9, wall=0)
    assert story.txn("b", "2").found() == found


def test_a_pause_is_that_of_the_process_on_the_host_that_tells_it():
    # On the other host is a process "a", too; where it is not, the length of the pause counts.
    for fault_on, is_there, found in (("run", True, []), ("far", True, ["hang"]), ("far", False, [])):
        story = Story(far=10**12, other=10**12)
        story.write("a", start=0, what="transaction", mono=0, wall=0, deadline=8)
        for phase, mono in (("begin", 1), ("end", 15 * 10**9)):
            story.write(fault_on, fault="pause at commit/before", target="a", phase=phase, mono=mono, wall=0)
        story.write("a", end=0, result="ok", mono=20 * 10**9, wall=0)
        if is_there:
            story.txn("other").rename("other", "a")
        assert story.found() == found


def test_the_time_in_which_the_program_works_does_not_count_for_its_call():
    for what, ending, found in (
        ("transaction", None, []),
        ("transaction", 1, ["hang"]),
        ("transaction", 10, []),
        ("finish", None, ["hang"]),
    ):
        story = Story().txn("a", what=what, deadline=8, result=None)
        if ending:
            story.write("a", note=0, ending=ending * 10**9)
        story.write("a", end=0, result="fail", mono=14 * 10**9, wall=0)
        assert story.found() == found, (what, ending)


def test_a_process_that_ended_by_itself_has_crashed():
    for result, found in (("ok", []), ("fail", ["crash"])):
        assert Story().txn("run", what="process", name="copy0-1", result=result).found() == found


def test_a_transaction_whose_end_is_requested_behind_its_deadline_must_not_take_effect():
    for seconds, result, found in ((7, "ok", []), (9, "ok", ["hang"]), (9, "fail", [])):
        story = Story().txn("a", deadline=8, begun=0, ending=seconds * 10**9, result=result)
        assert story.found() == found
    # The work for half messages may last longer: a check-back drops them then, or it does not.
    assert Story().txn("a", what="half", deadline=8, begun=0, ending=9 * 10**9).found() == []


def test_a_reading_that_does_not_come_to_the_end_is_stuck_and_proves_nothing_missing():
    assert Story().txn("a", "1", "2").read("1", result="unknown").found() == ["stuck-reader"]
    assert Story().txn("a", "1", "2").txn("run", what="read", topics=["t"], polls=["1"], result=None).found() == []


def poll_calls(*logs: tuple[int, tuple[str, ...]], assigns: bool = False, **opens: Any) -> list[str]:
    """Return the findings if a consumer receives these logs in one call each, all of 1, 2, 3, 4 being committed."""
    story = Story().txn("a", "1", "2", "3", "4").read("1", "2", "3", "4")
    for at, log in logs:
        if opens:
            story.txn("b", **opens)
        call = story.begin("b", "poll")
        if assigns:
            story.assign("b", call)
            story.assign("b", call, T0)
        story.poll("b", call, *log, at=at)
        story.end("b", call)
    return story.found()


def test_skips_and_steps_back_of_a_reader_are_found_within_a_call_and_between_two():
    assert poll_calls((0, ("1", "2")), (2, ("3", "4"))) == []
    assert poll_calls((0, ("1", "-", "3"))) == ["int-poll-skip"]
    assert poll_calls((0, ("1",)), (2, ("3",))) == ["poll-skip"]
    assert poll_calls((0, ("1", "2")), (1, ("2",))) == ["nonmonotonic-poll"]
    assert poll_calls((0, ("1", "2")), (1, ("2",)), assigns=True) == []
    assert poll_calls((0, ("1", "2")), (0, ("1", "2")), what="open") == []
    assert poll_calls((0, ("1", "2")), (0, ("1", "2")), what="open", owner="o") == ["nonmonotonic-poll"]


@pytest.mark.parametrize("polls", [("13",), ("1", "3")])
@pytest.mark.parametrize("other", [None, "before", "later", "aborted"])
def test_a_member_of_a_group_does_not_skip_what_no_member_has_begun_to_process(polls, other):
    story = Story().txn("a", "1", "2", "3").read("1", "2", "3")

    def take(process: str, log: str, result: str = "ok") -> None:
        call = story.begin(process)
        story.write(process, poll=call, group="g", messages=[[*T0, [int(value) - 1], value] for value in log])
        story.ack(process, call, *log)
        story.end(process, call, result, error="Abort" if result == "fail" else None)

    if other == "before":
        take("c", "2", "fail")  # the broker may still keep it for this member
    for log in polls:
        if other == "aborted":
            take("b", "2", "fail")  # it comes again next
        take("b", log)
    if other == "later":
        take("b", "2")  # a group may go back
    assert story.found() == ([] if other == "before" else ["group-skip"])


def test_a_step_back_within_a_call_is_found():
    story = Story().txn("a", "1", "2").read("1", "2")
    call = story.begin("b", "poll")
    story.poll("b", call, "2", at=1)
    story.poll("b", call, "1")
    story.end("b", call)
    assert story.found() == ["int-nonmonotonic-poll"]


@pytest.mark.parametrize(
    ("p0", "p1", "found"),
    [
        ("", "0 1 2", []),
        ("0 1 2", "", []),
        ("0", "1 2", ["wrong-partition"]),
        ("0 2 1", "", ["nonmonotonic-send", "G0-realtime"]),
        ("0 1", "", ["unseen", "outcome-lie"]),
    ],
)
def test_messages_of_a_key_are_in_order_in_one_partition_whichever_the_broker_chooses(p0, p1, found):
    story = Story()
    for value in "012":
        call = story.begin("a")
        story.send("a", call, value, to=("t", -2))
        story.end("a", call)
    assert story.read(*p0.split(), p1=p1).found() == found


def test_a_thread_sends_in_order_and_a_message_between_two_is_told():
    assert Story().txn("a", "1").txn("a", "2").read("2", "1").found() == ["nonmonotonic-send", "G0-realtime"]
    assert Story().txn("a", "1", result="unknown").txn("a", "2").read("2", "1").found() == []
    assert Story().txn("a", "1", thread=1).txn("a", "2", thread=2).read("2", "1").found() == ["G0-realtime"]
    assert "int-send-skip" in Story().txn("a", "1", "3").txn("b", "2").read("1", "2", "3").found()


def two_writers(p0: tuple[str, ...], p1: str) -> list[str]:
    """Return the findings if two transactions write to both partitions, which end up as these logs."""
    story = Story()
    first, second = story.begin("a"), story.begin("b")
    for process, call in (("a", first), ("b", second)):
        story.send(process, call, f"{process}0")
        story.send(process, call, f"{process}1", to=T1)
    story.end("a", first)
    story.end("b", second)
    story.read(*p0, p1=p1)
    return story.found()


def test_transactions_that_each_write_before_the_other_are_a_write_cycle():
    assert two_writers(("a0", "b0"), "a1 b1") == []
    assert two_writers(("a0", "b0"), "b1 a1") == ["G0"]


def test_a_later_transaction_whose_messages_lie_before_an_earlier_ones_contradicts_real_time():
    assert two_writers(("b0", "a0"), "b1 a1") == []  # at the same time either order is right
    assert Story().txn("a", "1").txn("b", "2").read("2", "1").found() == ["G0-realtime"]
    story = Story().txn("a", "1", transaction="t", result="unknown").txn("b", "2")
    story.txn("a", what="finish", transaction="t", wish="commit", outcome="committed").read("2", "1")
    assert story.found() == []  # it was committed later


def test_a_long_transaction_may_lie_before_another_one_and_behind_a_later_one():
    story = Story()
    long = story.begin("a")
    story.send("a", long, "a0")
    story.txn("b", "b0")
    story.txn("c", p1="c1")
    story.send("a", long, "a1", to=T1)
    story.end("a", long)
    story.read("a0", "b0", p1="c1 a1")
    assert story.found() == []


def test_transactions_that_read_from_each_other_are_circular():
    story = Story()
    first, second = story.begin("a"), story.begin("b")
    story.send("a", first, "1")
    story.send("b", second, "2", to=T1)
    story.poll("b", second, "1")
    assert story.found() == []
    story.poll("a", first, "2", to=T1)
    story.end("a", first)
    story.end("b", second)
    assert story.found() == ["G1c"]


@pytest.mark.parametrize("host", [{}, {"p": 10**15}, {"p": -(10**15)}])
@pytest.mark.parametrize(("late", "found"), [("a", []), ("b", ["zombie-write"])])
def test_a_new_owner_fences_the_older_one_also_from_another_host_and_without_a_transaction(host, late, found):
    """A message from each host to the other one shows that the id was opened between two transactions."""
    story = Story(10**9, **host).txn("o", what="open", owner="o", session="s").txn("o", "1", owner="o", session="s")
    if late == "a":
        story.txn("o", "3", owner="o", session="s")
    story.txn("p", what="poll", polls=["1"]).txn("p", what="poll").txn("p", what="open", owner="o", session="z")
    story.txn("p", "2").txn("o", what="poll", polls=["1", "2"]).txn("o", what="poll")
    if late == "b":
        story.txn("o", "3", owner="o", session="s")
    assert [name for name in story.found() if name == "zombie-write"] == found


@pytest.mark.parametrize(("late", "found"), [(False, []), (True, ["torn-transaction"])])
def test_a_transaction_is_torn_also_if_two_processes_have_read_a_topic_each(late, found):
    story, other = Story(), ("other", 0)
    call = story.begin("a")
    story.send("a", call, "1")
    story.send("a", call, "2", to=other)
    reads = [lambda: story.read("1"), lambda: story.txn("b", what="read", topics=["other"])]
    for read in reads if late else reads[::-1]:
        read()
    assert story.found() == found


def test_an_anomaly_of_a_capability_declared_absent_is_reported_and_breaks_no_promise():
    for absent, verdict in (([], Verdict.BROKEN), (["fencing"], Verdict.KEPT)):
        story = Story().txn("run", what="declares", absent=absent)
        history = story.txn("a", "1", result="fail", error="Fenced").txn("a", "2").read("1", "2").history()
        findings = check(history)
        findings.counts.pop("outcome-lie")
        judgement = judge(history, findings, {"committed": 1})
        assert (judgement.verdict, findings.names) == (verdict, ["zombie-write"])
    assert judge(history, findings, {"committed": 2}).verdict is Verdict.THIN


def verdict_without(absent: str, story: Story) -> Verdict:
    return judge(story.txn("run", what="declares", absent=[absent]).history(), check(story.history()), {}).verdict


def test_an_excuse_covers_only_what_it_explains():
    for kill, verdict in ((0, Verdict.BROKEN), (9, Verdict.KEPT)):
        story = Story().txn("a", "1").read()
        story.write("run", fault="broker kill", target="node 1", phase="begin", mono=kill, wall=0)
        assert verdict_without("survives-broker-kill", story) is verdict
    for seconds, verdict in ((20, Verdict.KEPT), (None, Verdict.BROKEN)):
        story = Story()
        story.write("a", start=0, what="transaction", mono=0, wall=0, deadline=1)
        if seconds:
            story.write("a", end=0, result="ok", mono=seconds * 10**9, wall=0)
        else:
            story.write("a", start=1, what="poll", mono=20 * 10**9, wall=0)
        assert verdict_without("deadline", story) is verdict
    assert verdict_without("atomic-topics", Story().txn("a", "1", p1="2", result=None).read("1")) is Verdict.KEPT
    assert verdict_without("atomic-topics", Story().txn("a", "1", "2", result=None).read("1")) is Verdict.BROKEN
    within = Story().txn("a", "1", "2", p1="3", result=None).read("1", p1="3")
    assert verdict_without("atomic-topics", within) is Verdict.BROKEN


def test_one_cause_is_named_once_and_its_consequences_are_told():
    history = Story().txn("a", "1", p1="2").read("1").history()
    judgement = judge(history, check(history), {})
    assert judgement.sentence.startswith("Broken: torn-transaction, in")
    assert (judgement.broken, judgement.causes) == (
        ("unseen", "torn-transaction"),
        {"unseen": frozenset({"torn-transaction"})},
    )
    half = Story().txn("a", "1", what="half", transaction="x")
    for story, cause in (
        (Story().txn("a", "1", "2").read("1"), "unseen"),  # one message of several in a partition was lost
        (Story().txn("a", "1", "2").read("1", "2", "1", by="official"), "duplicate"),
        (Story().txn("a", "1", "2").read("1", "2", p1="1"), "wrong-partition"),
        (Story().txn("a", "1").txn("a", "2").txn("b", acks=["2"]).drained().read("2"), "unseen"),  # nor acknowledged
        (Story().txn("a", "1", deadline=8, begun=0, ending=9 * 10**9).read(), "unseen"),  # told committed
        (half.read("changed:1").txn("b", what="check", transaction="x", values=["changed:1"]), "changed"),
    ):
        assert judge(story.history(), check(story.history()), {}).sentence.startswith(f"Broken: {cause}, in")


@pytest.mark.parametrize(
    ("result", "seen", "found"),
    [
        ("ok", ["1 2", ""], []),  # the second part becomes visible later
        ("ok", ["1 2"], ["unseen", "torn-span"]),
        ("fail", ["1 2"], ["G1a", "torn-span"]),
        ("unknown", ["1 2"], ["torn-span"]),
        (None, ["1 2"], ["torn-span"]),
        (None, ["1 2", "1 2", ""], []),
        (None, ["1"], ["torn-transaction"]),  # torn within a part
    ],
)
def test_a_span_is_torn_if_one_part_is_there_and_another_is_not_when_all_work_has_ended(result, seen, found):
    """`seen` are the messages of the first part in each reading; an empty one stands for a whole one."""
    story, other = Story(), ("other", 0)
    call = story.begin("a", span=True)
    story.send("a", call, "1", "2")
    story.send("a", call, "3", to=other)
    if result:
        story.end("a", call, result)
    for number, values in enumerate(seen):
        read = story.begin("reader", "read", topics=["t", "other"])
        story.poll("reader", read, *(values or "1 2").split())
        story.poll("reader", read, *([] if values else ["3"]), to=other)
        story.end("reader", read)
        if number < len(seen) - 1:
            story.txn("b", f"b{number}", result="fail")
    history = story.history()
    judgement = judge(history, findings := check(history), {})
    assert findings.names == found
    assert judgement.sentence.startswith(f"Broken: {found[-1]}, in" if found else "Kept: ")


def test_a_report_of_findings_that_break_no_promise_does_not_say_that_nothing_is_wrong():
    history = Story().txn("a", "1", "3").txn("b", "2", result="unknown").read("1", "2", "3").history()
    sentence = judge(history, check(history), {}).sentence
    assert sentence.startswith("Kept: nothing is wrong but int-send-skip (breaks no promise) in 1 committed")


LEAST = {"committed": 20, "aborted": 5, "read": 100, "full reads": 1, "faults": 3}
LEAST |= {"killed and committed": 3, "killed and aborted": 3}


def test_evidence_is_counted_by_what_could_have_been_broken():
    story = Story().txn("a", "1", result="fail", acks=["i"]).txn("a", "2", acks=["i"]).txn("b", "3", acks=["i"])
    for process, asked, values in ("c", 9, "4"), ("d", 9, "5"), ("e", 0, "6"):  # those who asked and were not told
        fields: dict[str, Any] = {"ending": asked} if asked else {}
        call = story.begin(process, **fields)
        story.send(process, call, values)
        story.ack(process, call, values)
    story.txn("o", what="open", owner="o", session="s").txn("o", "7", owner="o", session="s", result=None)
    story.txn("p", what="open", owner="o", session="z").txn("p", "8", owner="o", session="z")
    story.txn("q", "9", transaction="x", outcome="prepared").txn("r", what="finish", transaction="x")
    story.txn("s", "10", what="half", result=None).txn("l", "11", p1="12", begun=0, ending=2 * 10**9, deadline=1)
    call = story.begin("t", span=True)
    story.send("t", call, "13")
    story.send("t", call, "14", to=("other", 0))
    story.end("t", call)
    history = story.read("2", "3", "4", "8").history()
    once: tuple[str, ...] = ("over topics", "killed and committed", "killed and aborted", "taken again", "takeovers")
    once += ("finished by others", "overslept", "killed undecided", "spans")
    assert evidence(history, check(history)) == {**dict.fromkeys(once, 1), "acks with outputs": 6}


def test_a_promise_of_which_two_cases_were_tried_is_not_kept():
    story = Story().txn("a", "1", result="fail", acks=["i"]).txn("a", "2", acks=["i"]).read("2")
    for number in range(2):
        story.txn("a", f"p{number}", transaction=f"{number}", outcome="prepared")
        story.txn("b", what="finish", transaction=f"{number}", outcome="committed")
    findings = check(story.history())
    verdicts = {row.promise.name: row for row in rows(findings, judge(story.history(), findings), ())}
    row = verdicts["exactly once"]
    assert (row.verdict, row.evidence) == ("too thin", "1 committed, 1 read, 2 acks with outputs, 1 taken again")
    assert verdicts["resolvable"].verdict == "too thin"


def test_a_capability_that_a_broker_has_not_hides_no_other_finding_of_its_promise():
    absent = ["atomic-ack", "survives-broker-kill"]
    history = Story().txn("run", what="declares", absent=absent).txn("a", "1").read().history()
    judgement = judge(history, findings := check(history))
    verdicts = {row.promise.name: row.verdict for row in rows(findings, judgement, absent)}
    assert (verdicts["exactly once"], verdicts["durable"]) == ("broken", "declared absent")


def test_a_decision_that_nobody_claimed_is_found_where_every_claim_tells_its_wish():
    for wishes, found in ((("commit", "commit"), 1), (("commit", "abort"), 1), (("abort", "commit"), 0), ((None,), 0)):
        story = Story()
        for wish in wishes:
            story.txn("a", what="claim", transaction="x", wish=wish, outcome="aborted")
        assert check(story.history()).counts.get("split-decision", 0) == found


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ({}, ["false-fence"]),
        ({"what": "open", "owner": "o", "session": "z"}, []),
        ({"what": "open", "owner": "o", "session": "z", "result": None}, []),
        ({"what": "open", "owner": "another", "session": "z"}, ["false-fence"]),
        ({"owner": "o", "session": "s", "deadline": 0, "result": "fail"}, []),
        ({"owner": "o", "session": "s", "deadline": 1, "outcome": "prepared"}, ["false-fence"]),
        ({"owner": "o", "session": "s", "deadline": 0, "hold": 1e-9, "outcome": "prepared"}, []),
        ("a", []),
        ("unknown", []),
        ("b", ["false-fence"]),
    ],
)
def test_an_owner_is_only_fenced_by_a_newer_one_an_administrator_or_a_time_out(other, found):
    story = Story().txn("p", what="open", owner="o", session="old").txn("p", "0", transaction="b")
    call = story.begin("o", "open", owner="o", session="s")
    story.end("o", call)
    fenced = story.begin("o", owner="o", session="s", deadline=1, transaction="a")
    if isinstance(other, str):
        story.write("run", fault="administrator's abort", target=other, phase="begin", mono=99, wall=0)
    elif other:
        story.txn("o", **other)
    story.end("o", fenced, "fail", error="Fenced")
    assert story.read("0").found() == found


def test_a_message_with_other_content_is_named_and_counts_as_read():
    story = Story().txn("a", "1", "2").read("1", "changed:2").txn("b", acks=["1", "changed:2"])
    assert story.drained().found() == ["changed"]
    assert Story().txn("a", "1").read("1", "changed:2").found() == ["phantom-message"]


@pytest.mark.parametrize(
    ("sharing", "found"), [("partition", ["group-skip", "int-nonmonotonic-poll"]), ("message", []), ("key", [])]
)
def test_only_members_that_share_the_messages_of_a_partition_receive_them_in_any_order(sharing, found):
    story = Story().txn("feed", "0", "1", "2").read("0", "1", "2")
    story.write(
        "a", poll=story.begin("a", sharing=sharing), group="g", messages=[[*T0, [at], f"{at}"] for at in (0, 2, 1)]
    )
    assert story.found() == found


def test_each_workload_has_a_floor_of_what_it_does():
    for workload, missing in (
        ("half-messages", {"published": 5, "read": 100, "full reads": 1, "killed undecided": 2, "faults": 3}),
        ("decisions", {"claims": 20, "faults": 3}),
        ("owners", {**LEAST, "over topics": 20, "takeovers": 3}),
        ("groups", {**LEAST, "acks with outputs": 20, "taken again": 5}),
        ("sharing", {**LEAST, "acks with outputs": 20, "taken again": 5}),
        ("a dance", {**LEAST, "over topics": 20}),
    ):
        story = Story().txn("run", what="declares", absent=[], workloads=[workload], kills=True)
        for number, outcome in enumerate(["committed"] * 4 + ["aborted"] * 2 + ["unknown"]):
            story.txn("a", f"{number}", what="half", outcome=outcome)
        for _ in range(19):
            story.txn("a", what="claim", transaction="1", outcome="committed")
        history = story.history()
        judgement = judge(history, Findings())
        assert (judgement.verdict, judgement.missing) == (Verdict.THIN, missing)
        assert "4 published instead of 5" in judgement.sentence or workload != "half-messages"


def prepared_story() -> Story:
    return Story().txn("a", "1", transaction="x", hold=60, outcome="prepared")


def test_a_message_is_read_too_early_also_if_the_answer_to_its_prepare_was_lost_or_its_reader_was_killed():
    story = Story(tick=10**10).txn("a", "1", transaction="x", prepare=True, ending=2, result="unknown")
    story.txn("b", what="poll", polls=["1"], result=None)
    story.write("run", fault="kill", target="b", phase="begin", mono=4 * 10**10, wall=0)
    story.begin("run", "open")
    assert story.txn("c", what="finish", transaction="x", outcome="committed").found() == ["early-read"]


@pytest.mark.parametrize("ahead", [10**15, -(10**15)])
def test_clocks_of_two_hosts_are_compared_by_the_messages_between_them(ahead):
    for lost, found in ((False, []), (True, ["lost-write", "int-poll-skip", "outcome-lie"])):
        story = Story(tick=10**10, b=ahead).txn("a", "1", transaction="x", hold=60, outcome="prepared")
        story.txn("a", what="finish", transaction="x", outcome="committed").txn("a", "2").txn("a", "3", stored=("3", 2))
        story.txn("b", what="poll", polls=["1", "2", "3"])
        last = story.begin("a")
        story.send("a", last, "4")
        story.read("1", *("-" if lost else "2"), "3", by="b")
        story.end("a", last)
        assert story.found() == found


@pytest.mark.parametrize(
    ("target", "seconds", "lost"),
    [
        ("x", 0, False),
        ("x.p1", 0, False),  # the transactional id that its writer has at the broker
        ("x.p1", 2, False),  # recorded behind the answer of another call, on a loaded machine
        ("x.p1", 9, True),
        ("another name", 2, False),  # listed before it was prepared, under the name of its writer
        ("another name", 9, True),
    ],
)
def test_an_administrators_abort_explains_that_a_prepared_transaction_is_aborted(target, seconds, lost):
    story = prepared_story()
    story.write("run", fault="administrator's abort", target=target, phase="begin", mono=3 + seconds * 10**9, wall=0)
    for wish in ("commit", "abort"):  # whoever asks for an abort afterwards is not the reason
        story.txn("b", what="finish", transaction="x", wish=wish, outcome="aborted")
    assert story.found() == (["lost-prepare"] if lost else [])


def test_a_hundred_cases_of_a_name_are_counted_and_some_are_kept():
    story = Story()
    for number in range(100):
        story.txn("a", f"{number}")
    story.read()
    found = check(story.history())
    assert found.counts["unseen"] == 100
    assert len([case for case in found.cases if case.name == "unseen"]) == Findings().most


def test_a_partial_last_line_is_of_a_process_that_was_killed():
    *lines, last = Story().txn("a", "1").lines("a")
    history = History()
    history.add([*lines, last[:-5]], "a")
    assert [operation.result for operation in history.operations] == ["unknown"]


def broken_lines() -> Iterator[tuple[list[bytes], str]]:
    head = b'{"history":1,"process":"a","client":"c","host":"h","pid":1,"mono":0,"wall":0}\n'
    yield [b"nonsense\n"], "a, line 1: not JSON"
    yield [b'{"start":0,"what":"x","mono":1}\n'], "line 1: the first line"
    yield [b'{"history":2}\n'], "format 2"
    yield [head, b'{"end":0,"result":"ok","mono":1}\n'], "line 2: 0 is missing, or its call has no start line"
    yield [head, b'{"what":1}\n'], "a line begins with one of history, start"
    yield [head, head], "line 2: the first line, and no other"
    begin = b'{"start":0,"what":"x","mono":1}\n'
    for line in (b"{}", b"[]", b"1", b"[" * 100_000, b'{"end":0,"result":"ok","mono":1,"outcome":"COMMITTED"}'):
        yield [head, begin, line + b"\n"], "a, line 3: "
    for more in b'"deadline":"1" "hold":1e400 "ending":"now" "what":null "about":[] "error":"\\ud800"'.split():
        yield [head, begin[:-2].replace(b"0", b"1") + b"," + more + b"}\n"], "a, line 2: "
    yield [head, begin, begin], "line 3: call 0 begins, and has not ended"


@pytest.mark.parametrize(("lines", "text"), list(broken_lines()))
def test_a_file_of_another_form_is_refused_with_its_line(lines, text):
    with pytest.raises(HistoryError, match=text):
        History().add(lines, "a")


def test_the_schema_refuses_what_the_reader_refuses_for_its_form():
    refused = [
        {"what": 1},
        {"history": 2, "process": "a", "client": "c", "host": "h", "pid": 1},
        {"start": 0, "what": "read", "mono": 1},
        {"start": 0, "what": "x", "mono": 1, "deadline": "1"},
        {"send": 0, "to": ["t"], "values": []},
        {"end": 0, "result": "ok", "mono": 1, "outcome": "COMMITTED"},
    ]
    assert [line for line in refused if SCHEMA.is_valid(line)] == []


def test_a_value_that_two_calls_send_is_refused_with_both_calls():
    story = Story()
    call = story.begin("a")
    story.send("a", call, "1")
    story.send("a", call, "1")  # as the dead letter of a message that it received twice
    story.history()
    story.txn("b", "2", "1")
    with pytest.raises(HistoryError, match="b, line 3: call 0 of a and call 1 of b send the value '1'; each value"):
        story.history()


WRONG: Any = (None, 0, -1, 1 << 64, 1.5, True, "", "a", "ab", [], [0], ["a"], [[]], [[0, 0]], [["t", 0]], {}, {"a": 1})


def test_a_line_that_was_changed_anywhere_is_taken_or_refused_with_its_line():
    story = Story().txn("a", "1", stored=("1", 0), transaction="x")
    other = story.begin("a", "poll")
    story.poll("a", other, "1")
    story.assign("a", other, T0)
    story.ack("a", other, "1")
    story.write("a", fault="kill", target="b", phase="begin", mono=1)
    story.end("a", other)
    call = story.begin("a", "read", topics=["t"])
    story.poll("a", call, "1")
    story.end("a", call)
    lines = [json.loads(line) for line in story.lines("a")]
    for at, line in enumerate(lines):
        for name, value in itertools.product(line, WRONG):
            changed = [*lines[:at], line | {name: value}, *lines[at + 1 :]]
            history = History()
            with suppress(HistoryError):  # and no other error
                history.add([json.dumps(each).encode() + b"\n" for each in changed], "a")
                check(history)
                for each in changed:
                    SCHEMA.validate(each)


def test_every_name_has_a_meaning_in_one_sentence():
    assert set(EXCUSED_BY) <= set(MEANINGS)
    assert {name for names in EXCUSED_BY.values() for name in names} <= {each.value for each in Capability}
    assert all(text and text[0].islower() and not text.endswith(".") for text in MEANINGS.values())
