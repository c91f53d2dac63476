"""The testing kit: its fixtures, lost answers, children that die or stop, and the walk through all events."""

import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from txnbridge import Bridge, Capability, Outcome, connect, errors, hookimpl, plugins, testing
from txnbridge.testing import Child, Point, StopAt, bridge, bridge_url, crash_everywhere, next_commit, recorded, tell

__all__ = ["bridge", "bridge_url"]

SOON = 10


def send(bridge: Bridge, value: bytes) -> None:
    with bridge.transaction() as txn:
        txn.send("orders", value)


def values(bridge: Bridge) -> list[object]:
    return [message.value for message in bridge.read("orders", limit=100)]


@pytest.mark.parametrize("_", range(2))
def test_each_test_gets_a_fresh_bridge(bridge: Bridge, _: int) -> None:
    send(bridge, b"1")
    assert values(bridge) == [b"1"]


class TestWithAnOption:
    @pytest.fixture
    def bridge_url(self, bridge_url: str) -> str:
        return bridge_url + "?like=kafka"

    def test_the_url_may_be_overridden(self, bridge: Bridge) -> None:
        assert not bridge.capabilities[Capability.INDIVIDUAL_ACK]


def test_the_fixtures_come_as_a_plugin_and_close_the_bridge(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["txnbridge.testing"]')
    (tmp_path / "test_it.py").write_text(
        "opened = []\n"
        "def test_it(bridge):\n"
        "    opened.append(bridge)\n"
        "def test_closed():\n"
        "    import pytest, txnbridge\n"
        "    with pytest.raises(txnbridge.InvalidState):\n"
        "        opened[0].transaction()\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", tmp_path], capture_output=True, text=True
    )
    assert "2 passed" in run.stdout, run.stdout


def test_the_kit_needs_no_pytest() -> None:
    code = "import sys; sys.modules['pytest'] = None; import txnbridge.testing as t; print(*t.__all__)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "crash_everywhere" in run.stdout
    assert "bridge_url" not in run.stdout


def test_events_of_bridges_opened_inside_are_recorded(bridge_url: str) -> None:
    heard: list[str] = []
    with recorded() as events, testing.listening(lambda event: heard.append(event.name)):
        with connect(bridge_url) as inside:
            send(inside, b"1")
    with connect(bridge_url) as outside:
        send(outside, b"2")
    assert [f"{event.name}/{event.phase}" for event in events].count("commit/after") == 1
    assert heard == [event.name for event in events]


def test_next_commit_concerns_only_one_commit(bridge: Bridge) -> None:
    next_commit(bridge, Outcome.UNKNOWN)
    with pytest.raises(errors.OutcomeUnknown):
        send(bridge, b"1")
    send(bridge, b"2")
    assert values(bridge) == [b"1", b"2"]


def test_a_commit_can_be_told_to_abort(bridge: Bridge) -> None:
    bridge.admin.create_topic("orders")
    with next_commit(bridge, Outcome.ABORTED), pytest.raises(errors.TransactionAborted):
        send(bridge, b"1")
    assert values(bridge) == []


def test_a_commit_cannot_be_told_to_succeed(bridge: Bridge) -> None:
    with pytest.raises(errors.InvalidOption):
        next_commit(bridge, Outcome.COMMITTED)


def test_a_block_without_a_commit_is_an_error_and_leaves_nothing_behind(bridge: Bridge) -> None:
    with pytest.raises(AssertionError, match="no transaction was committed"), next_commit(bridge, Outcome.UNKNOWN):
        pass
    send(bridge, b"1")


def test_an_error_in_the_block_is_not_hidden(bridge: Bridge) -> None:
    with pytest.raises(ZeroDivisionError), next_commit(bridge, Outcome.UNKNOWN):
        1 / 0  # noqa: B018


def commit_and_tell(url: str, *contents: bytes) -> str:
    with connect(url) as bridge:
        for value in contents:
            send(bridge, value)
            tell(value)
    return "done"


def fail(kind: type[BaseException]) -> None:
    raise kind("on purpose")


def exit_at_once(code: int) -> None:
    os._exit(code)


def environment(name: str) -> tuple[str | None, str, int]:
    return os.environ.get(name), os.getcwd(), os.getpid()


def test_a_child_returns_and_tells_values(bridge_url: str) -> None:
    with Child(commit_and_tell, bridge_url, b"1", b"2") as child:
        assert (child.told(), child.result(), child.told()) == (b"1", "done", b"2")


def test_a_child_has_this_process_environment_and_folder_but_is_another(monkeypatch, tmp_path):
    monkeypatch.setenv("TXNBRIDGE_A_TEST", "here")
    monkeypatch.chdir(tmp_path)
    with Child(environment, "TXNBRIDGE_A_TEST") as child:
        variable, folder, pid = child.result()
    assert (variable, Path(folder)) == ("here", tmp_path)
    assert pid == child.pid != os.getpid()


def test_a_childs_error_is_raised_here_with_its_traceback() -> None:
    with Child(fail, errors.OutcomeUnknown) as child:
        with pytest.raises(errors.OutcomeUnknown, match="on purpose") as caught:
            child.result()
    assert "in fail" in str(caught.value.__cause__)


def test_a_child_that_dies_otherwise_is_reported() -> None:
    with Child(exit_at_once, 7) as child:
        with pytest.raises(AssertionError, match="exit_at_once ended with exit code 7 before it returned"):
            child.result()


def test_a_child_that_has_ended_is_killed_at_once_while_a_sibling_keeps_its_pipe_open() -> None:
    """A sibling that is paused just behind its fork has not yet closed its copy of the pipe that tells of the end."""
    child = Child(time.sleep, 60)
    pipe = os.readlink(f"/proc/self/fd/{child._process.sentinel}")
    server = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[1]
    (copy,) = (each for each in Path(f"/proc/{server}/fd").iterdir() if os.readlink(each) == pipe)
    with child, open(copy, "wb"):
        child.kill()
        again = threading.Thread(target=child.kill, daemon=True)
        again.start()
        again.join(SOON)
        assert not again.is_alive()


def test_a_child_is_killed_at_the_event_that_was_named(bridge_url: str, bridge: Bridge) -> None:
    with Child(commit_and_tell, bridge_url, b"1", b"2", b"3", kill="commit/after/2") as child:
        assert child.stopped() == Point("commit/after", 2)
        assert child.told() == b"1"
    assert values(bridge) == [b"1", b"2"]


def test_a_child_is_stopped_at_the_first_event_that_is_none_of_these(bridge_url: str) -> None:
    visited = frozenset({Point("bridge.open/before", 1), Point("transaction.begin/before", 1)})
    for skip, event in ((0, "bridge.open/after"), (1, "writer.open/before")):
        with Child(commit_and_tell, bridge_url, b"1", kill=testing.Unvisited(visited, skip)) as child:
            assert child.stopped() == Point(event, 1)


def test_a_function_that_ends_before_its_event_is_no_kill(bridge_url: str) -> None:
    with Child(commit_and_tell, bridge_url, b"1", kill="commit/after/2") as child:
        with pytest.raises(AssertionError, match="returned before it came to its point"):
            child.stopped()


def test_a_function_that_no_other_process_can_import_is_refused() -> None:
    with pytest.raises(errors.InvalidOption, match="module level"):
        Child(lambda: None)


@pytest.mark.parametrize("text", ["commit", "commit/during", "commit/before/0", "commit/before/x", "", "/before"])
def test_an_event_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidOption, match="commit/before"):
        StopAt(text)


def test_a_function_of_a_file_that_is_on_no_path_is_found(tmp_path: Path) -> None:
    file = tmp_path / "elsewhere.py"
    file.write_text("def answer():\n    return 42\n")
    module = types.ModuleType("elsewhere")
    module.__file__ = str(file)
    exec(compile(file.read_text(), file, "exec"), vars(module))
    sys.modules["elsewhere"] = module
    try:
        with Child(module.answer) as child:
            assert child.result() == 42
    finally:
        del sys.modules["elsewhere"]


@hookimpl
def txnbridge_headers(topic: str, key: bytes | None) -> dict[str, str]:
    return {"process": str(os.getpid())}


def test_plugins_that_are_modules_are_registered_in_the_child(bridge_url: str, bridge: Bridge) -> None:
    with plugins.registered(sys.modules[__name__]), Child(commit_and_tell, bridge_url, b"1") as child:
        child.result()
    assert bridge.read("orders", limit=1)[0].headers == {"process": str(child.pid)}


def send_once(url: str) -> None:
    """Survives a kill anywhere."""
    with connect(url, transactional_id="sender", create_topics=1) as bridge:
        bridge.admin.create_topic("orders")
        if not bridge.read("orders", limit=1):
            send(bridge, b"once")


def send_again(url: str) -> None:
    """Does its work twice if it is killed behind it."""
    with connect(url, transactional_id="sender") as bridge:
        send(bridge, b"once")


def do_nothing(url: str) -> None:
    pass


def there_is_one(url: str) -> None:
    with connect(url) as bridge:
        assert values(bridge) == [b"once"]


@pytest.mark.parametrize("at_once", [pytest.param(1, marks=pytest.mark.full), 4])
def test_the_walk_kills_at_every_event(bridge_url: str, at_once: int, tmp_path: Path) -> None:
    with recorded() as events:
        send_once(bridge_url)
    made: list[str] = []

    def fresh() -> str:
        made.append(f"embedded:{tmp_path}/{len(made)}.db")
        return made[-1]

    killed_at = crash_everywhere(send_once, there_is_one, fresh=fresh, at_once=at_once)
    assert len(made) >= len(killed_at) + 1  # the last run was not killed
    expected = [f"{event.name}/{event.phase}" for event in events]
    assert sorted(point.event for point in killed_at) == sorted(expected)
    assert len(set(killed_at)) == len(killed_at)


def test_the_walk_finds_the_event_after_which_a_promise_breaks() -> None:
    with pytest.raises(AssertionError, match=r"send_again, killed at (step:store|commit)/after/1 and run again"):
        crash_everywhere(send_again, there_is_one)


def test_a_walk_without_an_event_is_an_error() -> None:
    with pytest.raises(AssertionError, match="no event"):
        crash_everywhere(do_nothing, do_nothing)
