"""A run on a sound broker finds nothing, on broken ones it finds the right names, and it says when it was too thin."""

import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count, cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, Mock

import pytest
from click.testing import CliRunner, Result
from txnbridge_conformance.brokers import CannotStart
from txnbridge_conformance.checker import MEANINGS, check
from txnbridge_conformance.commands import EXIT_CODES
from txnbridge_conformance.contract_run import ContractResult
from txnbridge_conformance.history import History, Recorder, read_history
from txnbridge_conformance.observing import eventually
from txnbridge_conformance.report import Report
from txnbridge_conformance.run import official_readers
from txnbridge_conformance.run.bodies import Bodies, text_of
from txnbridge_conformance.run.client import Client, KillAt, ProcessorRecording
from txnbridge_conformance.run.faults import AdminFaults, BrokerFaults, Faults, HookFaults, Injected, NetworkFaults
from txnbridge_conformance.run.hunt import Hunt, hunt
from txnbridge_conformance.run.plan import Plan, floor_of, without_secrets
from txnbridge_conformance.run.processes import Process, RunFailed
from txnbridge_conformance.run.program import _stop_by_signal
from txnbridge_conformance.run.settling import Settling, acknowledged
from txnbridge_conformance.run.verdict import Verdict, judge
from txnbridge_conformance.run.workloads import _end_prepared, _one, decide, finish, own, watch

import txnbridge
from tests.conformance import broken
from tests.conformance.broken import Broken, around, scheme_of
from tests.failing import answer_calls, fail_call, note_calls, on_call, raising
from txnbridge import BrokerUnavailable, Event, Headers, Message, connect
from txnbridge._process.dead_letters import PREFIX
from txnbridge.cli import main
from txnbridge.spi import Advice, Status, Token, TokenState
from txnbridge.testing import Child, tell

ROOT = Path(__file__).parents[2]

# A run has a dozen processes, so that two at once would only slow each other down.
pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("conformance-runs")]


def conformance(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "txnbridge.cli", "conformance", *arguments]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/backends:{ROOT}/conformance"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def here(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["conformance", *arguments])


def test_a_sound_broker_keeps_its_promises_and_nothing_of_the_run_is_left_on_it(tmp_path):
    # So few bytes that most transactions go to the file before their end.
    url = f"embedded:{tmp_path / 'broker.db'}?half_check_seconds=0.5&spill_bytes=400"
    hook, calls = recording_hook(tmp_path)
    more = [f"--hook={hook}", "--target=kill:node1", "--target=cut:the net", "--version=1.2"]
    more += [f"--floor={name}={least}" for name, least in TRIED.items()]
    for seconds in ("3", "12"):  # a loaded machine may commit nothing in three
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        done = conformance("run", url, "--time", seconds, "--seed", "1", "--out", str(tmp_path / "out"), *more)
        if done.returncode != 4:
            break
    check_that_each_fault_was_healed(calls.read_text().splitlines())
    assert (done.returncode, done.stdout.partition(":")[0]) == (0, "Kept"), done.stdout + done.stderr
    with connect(url) as bridge:
        assert bridge.admin.topics() == []
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    broken_promises = [finding for finding in report["findings"] if finding["breaks a promise"]]
    assert (report["verdict"], broken_promises) == ("kept", [])
    again = here("check", str(tmp_path / "out"), "--floor", "committed=1000000")
    assert again.exit_code == 4
    assert "instead of 1,000,000" in again.stdout
    both = here("compare", str(tmp_path / "out"), str(tmp_path / "out"), "--json")
    assert {"what": "verdict", "runs": ["kept", "kept"]} in json.loads(both.stdout), both.stderr
    about = report["about"]
    assert (about["product"], about["txnbridge"]) == ("the embedded broker 1.2", txnbridge.__version__)
    assert f"product the embedded broker 1.2; url {url.partition('?')[0]}; " in done.stdout
    lost = cut(tmp_path / "out")
    found = here("check", str(tmp_path / "out"))
    assert found.exit_code == 1
    assert re.search(r"(lost-write|unseen), \d", found.stdout), found.stdout
    assert lost in found.stdout


@pytest.mark.full
def test_spans_go_to_the_second_broker_that_is_named_and_leave_nothing_there(tmp_path):
    second = f"embedded:{tmp_path / 'second.db'}"
    more = [f"--floor={name}=0" for name in floor_of(["spanning"])]
    more += ["--floor", "spans=1", "--time", "10", "--seed", "1", "--out", str(tmp_path / "out")]
    done = conformance("run", f"embedded:{tmp_path / 'broker.db'}", "--workload", "spanning", "--second", second, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in tmp_path.glob("out/*.db")] == []
    with connect(second) as bridge:
        assert bridge.admin.topics() == []


# How much a loaded machine does in a few seconds is not the point.
TRIED = {**dict.fromkeys(floor_of(), 0), "committed": 1, "read": 1, "full reads": 1}


def recording_hook(folder: Path) -> tuple[Path, Path]:
    """Return a hook, and the file to which it adds each of its calls."""
    hook, calls = folder / "hook", folder / "calls"
    hook.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    hook.chmod(0o755)
    return hook, calls


def check_that_each_fault_was_healed(calls: list[str]) -> None:
    for target in ("kill node1", "cut the net"):
        mine = [call for call in calls if call.endswith(target)]
        assert mine == [f"{verb} {target}" for _ in range(len(mine) // 2) for verb in ("inject", "heal")]
    assert calls and all(call.endswith(("kill node1", "cut the net")) for call in calls)


def test_the_processes_and_the_faults_of_a_killed_run_end_even_if_they_are_paused(tmp_path):
    hook, calls = recording_hook(tmp_path)
    with Child(run_two_and_pause_one, f"embedded:{tmp_path / 'broker.db'}", str(tmp_path), str(hook)) as child:
        child.told()
        child.kill()
    eventually(lambda: not processes_of(tmp_path), "processes of the killed run go on")
    eventually(lambda: len(calls.read_text().splitlines()) == 4, "the fault of the killed run stays")
    assert calls.read_text().split("\n") == ["inject cut a", "heal cut a", "inject cut a", "heal cut a", ""]


def run_two_and_pause_one(url: str, folder: str, hook: str) -> None:
    """Be a run with a fault and two processes, of which one is paused, until it is killed."""
    faults = HookFaults(hook, [("cut", "a")])
    faults.inject(random.Random()).heal()
    faults.inject(random.Random())
    plan = Plan(url, "killed", 1, 60, folder)
    with connect(url, create_topics=3) as bridge:
        bridge.ensure_topics(*plan.topics)
    processes = [Process(plan, "write", number, lambda role: 0, print) for number in range(2)]
    eventually(lambda: len(processes_of(Path(folder))) == 2, "no process works")
    processes[0].pause()
    tell("paused")
    time.sleep(600)


def test_a_process_that_was_killed_by_neither_the_run_nor_itself_has_crashed(tmp_path):
    plan, complaints = Plan(f"embedded:{tmp_path / 'broker.db'}", "a", 1, 60, str(tmp_path)), list[str]()
    process = Process(plan, "decide", 0, lambda role: 0, lambda name, what: complaints.append(f"{name}: {what}"))

    def crash() -> None:
        pid = int(processes_of(tmp_path)[0].split()[0])
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    try:
        for ends in "kill", "crash", "crash kill", "stop start", "crash stop start":
            history = tmp_path / f"{process.name}.jsonl"
            eventually(lambda: history.exists() and '"result":"ok"' in history.read_text(), "it works")  # noqa: B023
            for end in ends.split():
                crash() if end == "crash" else getattr(process, end)()
            process.replace_dead()
    finally:
        process.kill()
    said = [f"decide0-{at}: it ended with -9, and decide0-{at}.err ends with: it said nothing" for at in (2, 3, 5)]
    assert complaints == said


def test_a_process_that_is_told_that_its_call_is_wrong_does_not_begin_again(tmp_path):
    """That is a defect of txnbridge or of the role, which a new beginning would hide."""
    plan = Plan(f"embedded:{tmp_path / 'broker.db'}?wrong=1", "a", 1, 60, str(tmp_path))
    process = Process(plan, "decide", 0, lambda role: 0, print)
    try:
        with pytest.raises(RunFailed, match="InvalidOption"):
            eventually(process.replace_dead, "it begins again and again")
    finally:
        process.kill()


def test_a_password_is_neither_among_a_process_s_arguments_nor_in_a_file(tmp_path):
    url = f"{scheme_of(broken.Sound)}:{tmp_path / 'broker.db'}?sasl.password=hunter2"
    plan = Plan(url, "secret", 1, 60, str(tmp_path), plugins=["tests.conformance.broken"])
    process = Process(plan, "write", 0, lambda role: 0, print)
    try:
        eventually(lambda: "write0-1" in "".join(processes_of(tmp_path)), "the process does not begin")
        assert "hunter2" not in "".join(processes_of(tmp_path))
    finally:
        process.kill()
    assert [path.name for path in tmp_path.iterdir() if b"hunter2" in path.read_bytes()] == []


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ("", ""),
        ("?a=1&sasl.password=hunter2", "?a=1&sasl.password=…"),
        ("?jwt%5Ftoken=x&b=2", "?jwt_token=…&b=2"),
        ("?password=env:PASSWORD&secret=file%3A/run/s", "?password=env:PASSWORD&secret=file%3A/run/s"),
    ],
)
def test_a_report_s_command_keeps_only_secrets_that_are_elsewhere(options, shown):
    assert without_secrets(f"kafka://host{options}") == f"kafka://host{shown}"


@pytest.mark.parametrize("thread", ["main", "other"])
def test_a_process_that_waits_is_ended_by_sigterm(thread, tmp_path):
    plan = Plan("embedded:", "a", 1, 1.0, str(tmp_path))
    client = Client(plan, "p", Recorder(tmp_path / "p.jsonl", "p", "c"), random.Random(1))
    before = signal.getsignal(signal.SIGTERM)
    try:
        _stop_by_signal(client)
        if thread == "main":
            # As `stop.wait` holds it: a handler that took it would wait for itself.
            with client.stop._cond:  # type: ignore[attr-defined]
                signal.raise_signal(signal.SIGTERM)
        else:
            threading.Timer(0.5, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM)).start()
        assert client.stop.wait(60)
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, before)
        client.recorder.close()


def processes_of(folder: Path) -> list[str]:
    """Return the processes of the run with this folder, one line each."""
    lines = [path.read_text().partition("\n") for path in folder.glob("*.jsonl")]
    numbers = ",".join(str(json.loads(first)["pid"]) for first, complete, _ in lines if complete)
    listed = subprocess.run(["ps", "-ww", "-o", "pid=,args=", "-p", numbers], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if "run.program" in line]


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# The page is asked to show the first finding in its timeline, and to tell what it then has.
CLICK = """<script>document.querySelector("[data-orders]").click();
document.body.dataset.seen = [lanes.width > 100, chosen.size > 0, told.textContent].join("|");</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="the report is looked at in Chromium, which is not installed")
def test_the_page_draws_itself_and_a_finding_opens_its_witness(tmp_path):
    page = tmp_path / "report.html"
    page.write_text(broken_report().html().replace("</body>", CLICK))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--virtual-time-budget=2000"]
    command = [str(CHROMIUM), *options, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert 'data-seen="true|true|a: committed, 0 to 1 ms"' in shown, shown[-2000:]


def test_a_report_names_what_was_broken_and_what_was_not_tested():
    report = broken_report()
    document = report.document()
    verdicts = {row["name"]: row["verdict"] for row in document["promises"]}
    assert (verdicts["exactly once"], verdicts["honest"]) == ("broken", "broken")
    assert (verdicts["durable"], verdicts["half messages"]) == ("not tested", "not tested")
    assert json.loads(report.json()) == document
    assert "Not tested: " in report.text()
    assert "Contract suite: 0 of 1 capabilities kept; broken: isolation." in report.text()
    assert "failed: test_an_abort_inside_the_block_is_final" in report.html()
    assert "<script>alert" not in report.html()


def broken_report() -> Report:
    """The report of a committed transaction that nobody can read, by a process with a hostile name."""
    history = History()
    for process in ("a", "<script>alert(1)</script>"):
        lines: list[dict[str, Any]] = [{"history": 1, "process": process, "client": "c", "host": "h", "pid": 1}]
        lines.append({"start": 0, "what": "transaction", "mono": 0})
        lines.append({"send": 0, "to": ["t", 0], "values": [f"{process}.1"]})
        lines.append({"end": 0, "result": "ok", "outcome": "committed", "mono": 10**6})
        lines.append({"start": 1, "what": "read", "topics": ["t"], "mono": 2 * 10**6})
        lines.append({"end": 1, "result": "ok", "mono": 3 * 10**6})
        history.add([json.dumps(line).encode() + b"\n" for line in lines], __file__)
    findings = check(history)
    contract = [ContractResult("isolation", "broken", 3, ("test_an_abort_inside_the_block_is_final",))]
    return Report(history, findings, judge(history, findings), contract=contract)


def cut(folder: Path) -> str:
    """Take one committed message out of what the last reader has read."""
    history = folder / "run.jsonl"
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    last = next(line for line in reversed(lines) if line.get("poll") is not None and line["messages"])
    *_, value = last["messages"].pop()
    history.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(value)


def test_the_contract_says_of_each_promise_whether_it_is_kept(tmp_path):
    only = ["--only", "test_an_abort_inside_the_block_is_final", "--json"]
    verdicts = {}
    for name in ("Sound", "ShowsWhatIsAborted"):
        url = f"{scheme_of(getattr(broken, name))}:{tmp_path / name}.db"
        done = conformance("contract", url, "--plugin", "tests.conformance.broken", *only)
        verdicts[name] = {each["name"]: each["verdict"] for each in json.loads(done.stdout)}
        assert done.returncode == (name != "Sound"), done.stdout + done.stderr
        failed = " ".join(reason for each in json.loads(done.stdout) for reason in each["failed"])
        assert ("test_an_abort_inside_the_block_is_final: AssertionError: assert" in failed) == (name != "Sound")
        with connect(f"embedded:{tmp_path / name}.db") as bridge:
            assert bridge.admin.topics() == []
    assert "broken" not in verdicts["Sound"].values()
    assert "kept" in verdicts["Sound"].values()
    assert "broken" in verdicts["ShowsWhatIsAborted"].values()


def test_a_plan_says_what_a_run_creates_and_changes_nothing(tmp_path):
    url = f"embedded:{tmp_path / 'broker.db'}"
    done = here("plan", url, "--json")
    assert (done.exit_code, len(json.loads(done.stdout)["topics"])) == (0, 9), done.stderr
    assert not list(tmp_path.iterdir())
    with connect(url) as bridge:
        assert here("plan", url).exit_code == 0
        assert bridge.admin.topics() == []


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["run", "embedded:{tmp}/b.db", "--time", "soon"], 2, "no time from 1 second to a week"),
        (["run", "embedded:{tmp}/b.db", "--floor", "wonders=1"], 2, "one of committed"),
        (["run", "embedded:{tmp}/b.db", "--out", "{tmp}"], 2, "exists already"),
        (["run", "embedded:{tmp}/b.db", "--hook", "true"], 2, "a hook needs a target"),
        (["run", "embedded:{tmp}/b.db", "--hook", "false", "--target", "a:b", "--out", "{tmp}/out"], 3, "ended with 1"),
        (["run", "embedded:{tmp}/b.db", "--workload", "dances"], 2, "is not a list of transactions"),
        (["run", "embedded:{tmp}/b.db", "--through", "raw"], 2, "Kafka, Pulsar and RocketMQ"),
        (["run", "embedded:{tmp}/b.db", "--faults", "broker"], 2, "need a broker that the run starts"),
        (["run", "nothing:here", "--out", "{tmp}/out"], 2, "no backend"),
        (["run", "embedded:{tmp}/b.db", "--plugin", "no.such", "--out", "{tmp}/out"], 2, "No module named"),
        (["check", "{tmp}"], 3, "no history"),
        (["check", "/dev/null"], 3, "/dev/null: no history"),  # as a pipe, which has ended when the report reads it
        (["compare", "{tmp}", "{tmp}"], 2, "no report.json"),
        (["check", __file__], 3, "line 1: one line holds one object"),
        (["contract", "embedded:{tmp}", "--only", "a b"], 3, "Wrong expression"),
        (["contract", "embedded:{tmp}/b.db", "--plugin", "no.such"], 2, "No module named"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(arguments, code, text, tmp_path):
    done = here(*(argument.replace("{tmp}", str(tmp_path)) for argument in arguments))
    assert (done.exit_code, text in done.output) == (code, True), done.output


def test_the_help_and_the_page_tell_every_exit_code():
    page = (ROOT / "docs" / "conformance.md").read_text()
    told = here("--help").stdout
    for code, sentence in EXIT_CODES.items():
        assert (f"| {code} | {sentence} |\n" in page, f"  {code}  {sentence}\n" in told) == (True, True)
    assert {verdict.name: verdict.value for verdict in Verdict} == {"KEPT": 0, "BROKEN": 1, "THIN": 4}


def test_the_page_explains_every_finding():
    page = (ROOT / "docs" / "conformance.md").read_text()
    assert [name for name, meaning in MEANINGS.items() if f"| `{name}` | {meaning} |" not in page] == []


POISON = [Message("source", 0, (at,), None, b"feed/%d" % at, Headers(), 0, 1, None) for at in (1, 2)]


def record_dead_letters(folder: Path, transaction: str, poison: list[Message], sent: int, *ends: str) -> list[str]:
    """Record a processor's transaction in which `sent` dead letters are sent; return all values of the dead letters."""
    plan = Plan("embedded:", "a", 1, 1.0, str(folder))
    with closing(Recorder(folder / f"{transaction}.jsonl", transaction, "c")) as recorder:
        recording = ProcessorRecording(Client(plan, "p", recorder, random.Random(1)), "g", "dead")
        for name in "reader.poll/before", "transaction.begin/before", *["message.send/before"] * sent, *ends:
            name, _, phase = name.partition("/")
            data = {"topic": "dead", "messages": len(poison)}
            recording.txnbridge_event(Event(name, cast(Any, phase), 0, 0, "b", transaction, data))
            for message in poison if name == "transaction.begin" else ():
                recording.handle(message, poison=True)
    return [value for _, (topic, _), values in read_history([folder]).sends if topic == "dead" for value in values]


def test_an_aborted_dead_letter_and_the_one_that_repeats_it_have_different_values(tmp_path):
    record_dead_letters(tmp_path, "T1", POISON[:1], 1, "abort/before")
    sent = record_dead_letters(tmp_path, "T2", POISON[:1], 1, "commit/after")
    headers = [Headers([(f"{PREFIX}transaction", name)]) for name in (b"T1", b"T2")]
    letters = [POISON[0]._replace(topic="run-dead", headers=each) for each in headers]
    assert sent == [text_of(letter) for letter in letters] == ["dead:feed/1 in T1", "dead:feed/1 in T2"]


def test_poison_that_is_acknowledged_without_a_dead_letter_is_missing_in_the_dead_letter_topic(tmp_path):
    poison = [POISON[0], Message(*POISON[1][:4], b"feed/2~0", *POISON[1][5:])]  # the second one has changed
    sent = record_dead_letters(tmp_path, "T1", poison, 1, "ack/before", "commit/after")
    assert sent == ["dead:feed/1 in T1", "dead:feed/2 in T1"]


def test_a_message_that_differs_from_what_was_sent_is_read_as_changed(tmp_path):
    with connect(f"embedded:{tmp_path / 'broker.db'}", create_topics=1) as bridge:
        bodies, sent = Bodies(random.Random(1), bridge, plain=False), [f"p/{number}" for number in range(300)]
        with bridge.transaction() as txn:
            for value in sent:
                body, options = bodies.make(value, b"key" if value.endswith("7") else None)
                txn.send("t", body, **options)
        messages = list(bridge.read("t", 1000))
    assert [text_of(message) for message in messages] == sent
    for value, message in zip(sent, messages, strict=True):
        changes: dict[int, Any] = {3: b"other" if message.value else None, 4: (message.value or b"") + b"|"}
        if message.headers:
            changes[5] = Headers()
        if "run-timestamp" in message.headers:
            changes[6] = 1
        fields: list[Any] = list(message)  # the third is the key, the fourth the value
        others = [Message(*[*fields[:at], other, *fields[at + 1 :]]) for at, other in changes.items()]
        assert value not in map(text_of, others)
        assert f"changed:{value}" in map(text_of, others)


@pytest.mark.parametrize(("event", "transaction"), [("commit", "T"), ("step:store", None)])
def test_a_process_is_killed_at_a_step_that_recurs_when_messages_are_stored(event, transaction, tmp_path, monkeypatch):
    killed = answer_calls(monkeypatch, os, "kill")
    for seed in range(60):
        name = f"p{seed}"
        with closing(Recorder(tmp_path / f"{name}.jsonl", name, "c")) as recorder:
            client = Client(Plan("embedded:", "a", 1, 1.0, str(tmp_path)), name, recorder, random.Random(seed))
            client.stop.set()  # so that nothing waits
            plugin = KillAt(10, client)
            killed.clear()
            steps = [(event, "before"), (event, "after")] * 10
            for at, phase in ("open", "after"), *steps, ("close", "before"):
                plugin.txnbridge_event(Event(at, cast(Any, phase), 0, 0, "b", transaction, {}))
                if killed:
                    break
    kinds = {fault.kind for fault in read_history([tmp_path]).faults}
    assert kinds == {f"kill at {event}/before", f"kill at {event}/after", "kill at close/before"}


def test_an_owner_works_in_two_threads_until_a_transaction_fails(tmp_path, monkeypatch):
    threads: set[int] = set()

    def one(client: Client, bridge: Any, pauses: float, thread: int) -> bool:
        threads.add(thread)
        return len(threads) < 2

    monkeypatch.setattr("txnbridge_conformance.run.workloads._one", one)
    with closing(Recorder(tmp_path / "p.jsonl", "p", "c")) as recorder:
        plan = Plan(f"embedded:{tmp_path / 'broker.db'}", "a", 1, 1.0, str(tmp_path))
        own(Client(plan, "p", recorder, random.Random(1)))
    assert threads == {0, 1}


@pytest.mark.parametrize("lie", ["stale", "guessed"])
def test_a_status_that_is_not_that_of_the_next_calls_contradicts_them(lie, tmp_path, broken_broker):
    known = dict[str, Status]()

    def status(self: Broken, token: Token, *more: Any) -> Status:
        now = Status(TokenState.ABORTED) if lie == "guessed" else self.inner.status(token, *more)
        return known.setdefault(token.transaction, now)

    plan = Plan(f"{broken_broker(status=status)}:{tmp_path / 'broker.db'}", "a", 1, 1.0, str(tmp_path))
    with closing(Recorder(tmp_path / "finish0-1.jsonl", "finish0-1", "c")) as recorder:
        client = Client(plan, "finish0-1", recorder, random.Random(1))
        with connect(plan.url, create_topics=3) as bridge:
            for _ in range(60):
                call = client.start_transaction()
                with bridge.transaction(prepare=True) as txn:
                    txn.send("t", b"1")
                call.end("ok", outcome="prepared", transaction=txn.id, token=str(txn.token))
                client.publish_token(txn)
        threading.Timer(2, client.stop.set).start()
        finish(client)
    history = read_history([tmp_path])
    assert check(history).names == ["split-decision"]
    calls = [each for each in history.operations if each.what in ("finish", "status")]
    assert {each.fields.get("deadline") for each in calls} == {plan.timeout}


@pytest.mark.parametrize(("role", "call"), [(decide, "claim"), (watch, "poll")])
def test_calls_tell_their_deadline_so_that_one_that_hangs_is_found(role, call, tmp_path):
    plan = Plan(f"embedded:{tmp_path / 'broker.db'}", "a", 1, 1.0, str(tmp_path))
    with closing(Hunt(plan, print, None, None, clients=False)) as hunted, hunted.topics():
        with closing(Recorder(tmp_path / "role0-1.jsonl", "role0-1", "c")) as recorder:
            client = Client(plan, "role0-1", recorder, random.Random(1))
            threading.Timer(0.5, client.stop.set).start()
            role(client)
    calls = read_history([tmp_path / "role0-1.jsonl"]).operations
    assert {(each.what, each.fields.get("deadline")) for each in calls} == {
        (what, plan.timeout) for what in ("open", call)
    }


@contextmanager
def with_topics(folder: Path) -> Iterator[tuple[Client, txnbridge.Bridge]]:
    """Yield a run's own client and bridge, on a broker with the run's topics."""
    plan = Plan(f"embedded:{folder / 'broker.db'}", "a", 1, 0.1, str(folder))
    with closing(Recorder(folder / "run.jsonl", "run", "c")) as recorder:
        client = Client(plan, "run", recorder, random.Random(1))
        with client.bridge() as bridge:
            for topic in plan.all_topics:
                bridge.admin.create_topic(topic, 3)
            yield client, bridge


def test_some_deadlines_end_long_before_the_hold_and_an_abort_that_nobody_asked_for_is_found_at_the_end(tmp_path):
    with with_topics(tmp_path) as (client, bridge):
        for _ in range(60):
            _one(client, bridge, 0, 0)
        for each in bridge.admin.transactions():
            bridge.abort(str(each.token))
        Settling(client, bridge, (), lambda _: None, lambda: None, raw=False).settle()
    history, plan = read_history([tmp_path]), client.plan
    prepared = [each for each in history.operations if each.outcome == "prepared" and each.what == "transaction"]
    for name, values in ("deadline", {plan.timeout, 2.0}), ("hold", {plan.hold, 5.0}):
        assert {each.fields[name] for each in prepared} == values
    assert check(history).counts["lost-prepare"] == len(prepared)


def test_a_reader_that_stalls_although_there_is_more_to_read_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("txnbridge_conformance.run.settling._SETTLING_SECONDS", 0.5)
    recorder = Recorder(tmp_path / "watch0.jsonl", "watch0", "c")
    with closing(recorder), with_topics(tmp_path) as (run, bridge):
        watcher, left = Client(run.plan, "watch0", recorder, random.Random(1)), run.plan.named("left")
        threading.Timer(1, watcher.stop.set).start()
        run.transact(bridge, run.single(left))
        watch(watcher)
        for found in ([], ["hang"]):
            Settling(run, bridge, ("watch",), lambda _: None, lambda: None, raw=False).settle()
            assert check(read_history([tmp_path])).names == found
            run.transact(bridge, run.single(left))


@pytest.mark.parametrize(
    ("left", "found"), [(range(20, -1, -1), []), (cycle((2, 1)), ["hang"])], ids=["slow but sure", "again and again"]
)
def test_a_run_waits_for_readers_as_long_as_they_get_on(left, found, tmp_path, monkeypatch):
    clock, lefts = [0.0], iter(left)

    def sleep(seconds: float) -> None:
        clock[0] += 60.0

    def is_watched(self: Settling) -> bool:
        self._left = next(lefts)
        return not self._left

    monkeypatch.setattr(
        "txnbridge_conformance.run.settling.time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)
    )
    monkeypatch.setattr(Settling, "_is_watched", is_watched)
    with with_topics(tmp_path) as (client, bridge):
        Settling(client, bridge, ("watch",), lambda _: None, lambda: None, raw=False).settle()
    assert check(read_history([tmp_path])).names == found


def test_a_group_without_members_has_read_everything_although_a_look_at_it_failed_once(tmp_path, monkeypatch):
    clock, opened, open_bridge = count(), count(), Client.bridge

    @contextmanager
    def bridge(self: Client, **settings: Any) -> Iterator[txnbridge.Bridge]:
        if not settings and next(opened) == 0:
            raise BrokerUnavailable("the machine is busy")
        with open_bridge(self, **settings) as found:
            yield found

    with with_topics(tmp_path) as (client, its_bridge):
        virtual = SimpleNamespace(monotonic=lambda: next(clock) / 10, sleep=lambda seconds: None)
        monkeypatch.setattr("txnbridge_conformance.run.settling.time", virtual)
        monkeypatch.setattr("txnbridge_conformance.run.settling._QUIET_SECONDS", 0.0)
        monkeypatch.setattr(Client, "bridge", bridge)
        answer_calls(monkeypatch, Settling, "_is_drained", False)  # its positions cannot be compared
        answer_calls(monkeypatch, Settling, "_is_repaired", True)
        Settling(client, its_bridge, ("process",), lambda _: None, lambda: None, raw=False).settle()
    assert check(read_history([tmp_path])).names == []


def test_the_end_of_a_run_tells_the_settings_and_waits_for_markers_that_a_killed_broker_left_out(
    tmp_path, broken_broker
):
    hanging = Advice("problem", "transaction a", "hangs in txnbridge-run-a-left[0]", "transactions repair a")
    answers, worked = [[hanging], [hanging], [hanging], []], list[str]()
    url = broken_broker(Administering=around(check=lambda *_: answers.pop(0) if worked else []))
    plan = Plan(f"{url}:{tmp_path / 'broker.db'}", "a", 1, 1.0, str(tmp_path), workloads=("decisions",))
    with closing(Hunt(plan, worked.append, None, None, clients=False)) as hunted, hunted.topics() as bridge:
        hunted.work(bridge)
        hunted.settle()
    told = [each.fields["settings"] for each in read_history([tmp_path]).operations if "settings" in each.fields]
    assert (told, answers) == ([["transaction a: hangs in txnbridge-run-a-left[0]"]], [])


def test_a_part_of_a_run_that_stands_still_is_a_hang_of_its_history(tmp_path):
    hunted = Hunt(Plan("embedded:", "a", 1, 1.0, str(tmp_path)), print, None, None, clients=False)
    hunted.within_limit(threading.Event().wait, "the wait", 0.1)
    with pytest.raises(ZeroDivisionError):
        hunted.within_limit(lambda: 1 / 0, "the sum", 60)
    hunted.close()
    (case,) = check(read_history([tmp_path])).all
    assert (case.name, case.text.partition(",")[0]) == ("hang", "the wait has not ended")


def test_an_interrupted_run_ends_faults_and_processes_before_it_deletes_its_topics(tmp_path):
    plan = Plan(f"embedded:{tmp_path / 'broker.db'}", "a", 1, 60, str(tmp_path / "out"), workloads=["decisions"])
    topics_at_the_heal = []

    def heal() -> None:
        with connect(plan.url) as bridge:
            topics_at_the_heal.append(len(bridge.admin.topics()))
        raise RunFailed("the hook failed, too")

    class Cut(Faults):
        def inject(self, chance: random.Random) -> Injected:
            return Injected("cut", "the net", 600, heal)

    def interrupt(progress: str) -> None:
        if processes_of(tmp_path / "out") and "1 cut" in progress:
            with connect(plan.url) as bridge, bridge.transaction(prepare=True) as txn:
                txn.send(plan.topics[0], b"of a process that was killed meanwhile")
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(RunFailed):
        hunt(plan, interrupt, None, (), [Cut()])
    assert processes_of(tmp_path / "out") == []
    assert len(topics_at_the_heal) == 1 and topics_at_the_heal[0] >= len(plan.all_topics)
    with connect(plan.url) as bridge:
        assert [topic.name for topic in bridge.admin.topics() if plan.prefix in topic.name] == []


@pytest.mark.parametrize("verb", ["inject", "heal"])
def test_a_hook_heals_also_if_it_was_interrupted(verb, tmp_path, monkeypatch):
    fail_call(monkeypatch, subprocess, "run", KeyboardInterrupt, when=lambda command, **_: verb in command)
    calls = note_calls(monkeypatch, subprocess, "run", lambda command, **_: command[1])
    plan = Plan(f"embedded:{tmp_path / 'broker.db'}", "a", 1, 2, str(tmp_path / "out"), workloads=["decisions"])
    with pytest.raises(KeyboardInterrupt):
        hunt(plan, lambda text: None, None, (), [HookFaults("true", [("kill", "node1")])])
    assert calls[-2:] == [verb, "heal"]


def test_no_process_that_is_killed_at_the_end_starts_again(tmp_path, monkeypatch):
    plan = Plan(f"embedded:{tmp_path / 'broker.db'}", "a", 1, 0.1, str(tmp_path), workloads=["decisions"])
    with closing(Hunt(plan, print, None, None, False)) as hunted, hunted.topics() as bridge:
        hunted.work(bridge)
        starts = note_calls(monkeypatch, Process, "start")
        # As the thread of a part that was interrupted does.
        on_call(monkeypatch, Process, "kill", lambda _: hunted._replace_dead())
    assert starts == []


def test_a_run_tells_which_of_its_topics_it_cannot_delete(tmp_path, broken_broker, caplog):
    url = broken_broker(Administering=around(delete_topic=raising(BrokerUnavailable("away"))))
    plan = Plan(f"{url}:{tmp_path / 'broker.db'}", "a", 1, 60, str(tmp_path), workloads=["decisions"])
    with closing(Hunt(plan, print, None, None, False)) as hunted, hunted.topics():
        pass
    assert {f"the topic {topic} is left: away" for topic in plan.all_topics} <= set(caplog.messages)


def test_a_run_that_cannot_create_a_topic_leaves_none(tmp_path, broken_broker):
    left = iter((1, 1, 0))
    create = lambda inner, *given, **more: 1 / next(left) and inner.create_topic(*given, **more)  # noqa: E731
    url = broken_broker(Administering=around(create_topic=create))
    plan = Plan(f"{url}:{tmp_path / 'broker.db'}", "a", 1, 60, str(tmp_path))
    with closing(Hunt(plan, print, None, None, False)) as hunted, pytest.raises(ZeroDivisionError):
        hunted.topics().__enter__()
    with connect(plan.url) as bridge:
        assert bridge.admin.topics() == []


def test_a_network_fault_that_is_healed_early_cuts_nothing_later():
    proxy = Mock()
    for seed in range(60):
        NetworkFaults(proxy, "kafka").inject(random.Random(seed)).heal()
    healed = proxy.cut.call_count
    for timer in [each for each in threading.enumerate() if isinstance(each, threading.Timer)]:
        timer.join()
    assert proxy.cut.call_count == healed


def test_an_administrator_s_abort_without_an_answer_is_recorded_since_it_may_have_taken_effect():
    one = SimpleNamespace(transaction="T", partitions=[("t", 0)])
    admin = SimpleNamespace(transactions=lambda: [one], abort=raising(BrokerUnavailable("no answer")))
    bridge: Any = SimpleNamespace(admin=admin)
    found = {AdminFaults(bridge, ["t"]).inject(random.Random(seed)) for seed in range(20)}
    assert found == {None, Injected("administrator's abort", "T")}


def test_a_node_that_does_not_start_has_a_second_chance_and_then_the_run_fails():
    answers = [CannotStart("too slow"), None, CannotStart("too slow"), CannotStart("its disk is full")]

    def start(node: int) -> None:
        if answer := answers.pop(0):
            raise answer

    broker: Any = SimpleNamespace(nodes=[1], start=start, kill=print, stop=print, pause=print, resume=start)
    injected = [BrokerFaults(broker).inject(random.Random(seed)) for seed in range(20)]
    first, second, *_ = filter(None, injected)
    first.heal()
    with pytest.raises(CannotStart, match="disk"):
        second.heal()


def test_the_official_client_reads_only_where_it_can_connect(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    secured = {
        "kafka": ("security.protocol=ssl", "ssl.ca.location=f", "sasl.username=u", "sasl.jaas.config=j"),
        "pulsar": ("tls_ca=f", "token=t", "token_file=f", "user=u&password=p"),
        "rocketmq": ("tls=true", "access_key=a&secret_key=s"),
    }
    for scheme, name in ("kafka", "confluent_kafka"), ("pulsar", "pulsar"), ("rocketmq", "rocketmq"):
        assert official_readers.name_of(Plan(f"{scheme}://h:1?prefix=a", "a", 1, 1, "", grpc="h:2")) == name
        urls = [f"{scheme}://h:1?{options}" for options in secured[scheme]] + [f"{scheme}+ssl://h:1"]
        assert {official_readers.name_of(Plan(url, "a", 1, 1, "", grpc="h:2")) for url in urls} == {None}


def test_the_official_client_shows_what_was_changed(monkeypatch):
    client, answers = MagicMock(), {"topic": "t", "partition": 0, "offset": 7, "key": None, "headers": None}
    monkeypatch.setitem(sys.modules, "confluent_kafka", client)
    answers |= {"timestamp": (1, 5), "error": None, "partition_key": "", "properties": {}}
    first, second = (MagicMock(**{f"{name}.return_value": told for name, told in answers.items()}) for _ in range(2))
    for message, body in ((first, b"1"), (second, b"2~0")):  # another digest than that of the message
        message.value.return_value = message.data.return_value = body
    end = MagicMock(**{"topic.return_value": "t", "partition.return_value": 0})
    end.error().code.return_value = client.KafkaError.configure_mock(_PARTITION_EOF=-1) or -1
    client.Consumer().list_topics().topics = {"t": MagicMock(partitions=[0])}
    client.Consumer().consume.return_value = [first, second, end]
    plan = Plan("kafka://h:1", "a", 1, 1, "")
    assert [line[3] for line in official_readers.read_kafka(plan, ["t"])] == ["1", "changed:2"]
    monkeypatch.setitem(sys.modules, "pulsar", client)
    client.configure_mock(Timeout=TimeoutError)
    client.Client().get_topic_partitions.return_value, reader = ["t"], client.Client().create_reader()
    reader.has_message_available.side_effect, reader.read_next.side_effect = [True, True, False], [first, second]
    assert [line[3] for line in official_readers.read_pulsar(plan, ["t"])] == ["1", "changed:2"]


def test_only_committed_transactions_acknowledge_messages(tmp_path):
    recorder = Recorder(tmp_path / "copy0-1.jsonl", "copy0-1", "c")
    for transaction, outcome in ("T1", "committed"), ("T2", "aborted"), ("T3", None):
        call = recorder.start("transaction", transaction=transaction)
        call.ack("g", [f"taken in {transaction}", f"changed:another in {transaction}"])
        call.end("ok", outcome="prepared")
        if outcome is not None:
            recorder.start("finish", transaction=transaction).end("ok", outcome=outcome)
    recorder.close()
    history = read_history([tmp_path])
    assert (acknowledged(history, "g"), acknowledged(history, "other")) == ({"taken in T1", "another in T1"}, set())
    assert history.processes[0].host.endswith(Path("/proc/sys/kernel/random/boot_id").read_text().strip())


def test_a_member_aborts_nothing_that_it_has_prepared_once_the_run_waits_for_its_group(tmp_path):
    for number, settles in enumerate((False, True)):
        folder = tmp_path / str(number)
        folder.mkdir()
        plan = Plan(f"embedded:{folder / 'broker.db'}", "a", 1, 1.0, str(folder))
        client = Client(plan, "copy0-1", Recorder(folder / "copy0-1.jsonl", "copy0-1", "c"), random.Random(1))
        client.stop.set()  # so that nothing waits
        if settles:
            plan.closing.touch()
        with connect(plan.url, create_topics=3) as bridge:
            outcomes = set()
            for _ in range(20):
                with bridge.transaction(prepare=True) as txn:
                    txn.send("t", b"1")
                outcomes.add(_end_prepared(client, bridge, txn))
        client.recorder.close()
        assert outcomes == ({True} if settles else {True, False})
