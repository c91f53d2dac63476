"""Tests of all commands: exit codes, errors in one line, --json, --debug, and the modules that are loaded."""

import json
import os
import re
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner, Result

import txnbridge
from tests.core.toy import ToyBackend
from tests.house.rooms import ROOT
from txnbridge import errors, hookimpl, plugins
from txnbridge.cli import COMMANDS, _common, main
from txnbridge.cli._common import Cli, ExitCode, exit_code
from txnbridge.commands import json_and_debug


@pytest.fixture
def fail_with(invoke):
    """Call a command whose broker cannot be opened, for the reason given."""

    def call(error: BaseException, *more: str) -> Result:
        with plugins.registered(Raising(error)):
            return invoke("send", "orders", "a body", "--url", "toy:", *more)  # type: ignore[no-any-return]

    return call


class Raising(ToyBackend):
    """A broker that cannot be opened, for the reason given."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def open(self, url, options, context, deadline):
        raise self.error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.NotFound("no such topic"), 2),
        (errors.InvalidOption("no such option"), 2),
        (errors.BrokerUnavailable("nobody answers"), 3),
        (errors.DeadlineExceeded("too slow"), 3),
        (errors.StorageFailed("disk full"), 3),
        (errors.OutcomeUnknown("no answer", token="txb1.abc"), 4),
        (errors.EvidenceLost("gone", token="txb1.abc"), 4),
        (errors.TransactionAborted("aborted"), 5),
        (errors.Conflict("taken"), 5),
        (errors.Fenced("replaced", newer="host pid 1"), 6),
        (errors.AccessDenied("not yours"), 1),
        (errors.PositionLost("too old"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_each_error_ends_with_its_code_and_one_line(error, code, fail_with):
    result = fail_with(error)
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"txnbridge: {error}")
    assert ("(token: txb1.abc)" in result.stderr) is (code == 4)
    assert "Traceback" not in result.stderr


def test_every_error_of_ours_has_a_code_by_its_class():
    of_ours = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.TxnBridgeError)]
    assert len(of_ours) > 15
    assert {exit_code(error("")) for error in of_ours} <= {1, 2, 3, 4, 5, 6}


def test_with_json_an_error_is_one_json_object_on_stderr(fail_with):
    result = fail_with(errors.OutcomeUnknown("no answer", token="txb1.abc"), "--json")
    assert result.stdout == ""
    told = json.loads(result.stderr)
    assert told == {"error": "OutcomeUnknown", "message": "no answer", "exit_code": 4, "token": "txb1.abc"}


def test_debug_shows_the_traceback_and_the_steps_and_ends_with_its_command(fail_with):
    before = len(plugins.listeners())
    result = fail_with(errors.BrokerUnavailable("nobody answers"), "--debug")
    assert result.exit_code == 3
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.endswith("txnbridge: nobody answers\n")
    assert len(plugins.listeners()) == before


def test_a_foreign_error_shows_its_place_and_not_its_text(fail_with):
    result = fail_with(ValueError("invalid literal: 'a body'"))
    assert result.exit_code == 1
    assert re.fullmatch(r"txnbridge: ValueError at .+test_common\.py:\d+; --debug shows all\n", result.stderr)


def test_a_failing_system_call_names_the_file(fail_with):
    result = fail_with(FileNotFoundError(2, "No such file or directory", "certificate.pem"))
    assert (result.exit_code, result.stderr) == (1, "txnbridge: certificate.pem: No such file or directory\n")
    assert fail_with(TimeoutError("secret")).stderr == "txnbridge: the operating system: TimeoutError\n"


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), click.Abort()], ids=["ctrl-c", "prompt"])
def test_an_interrupt_is_quiet_and_ends_with_130(ending, fail_with):
    result = fail_with(ending)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "\n")


@pytest.mark.parametrize(
    "args",
    [
        ["send"],
        ["send", "orders", "--nonsense"],
        ["send", "orders", "v", "--timeout", "0"],
        ["nonsense"],
        ["topics", "nonsense"],
        ["--nonsense"],
    ],
    ids=" ".join,
)
def test_a_wrong_call_is_one_line_that_says_where_help_is(args, refused):
    assert re.fullmatch(r"txnbridge: .+; see `txnbridge.* --help`\n", refused(*args))


@pytest.mark.parametrize(
    ("args", "meant"),
    [(["topcis"], "topics"), (["topics", "lst"], "list"), (["transactions", "comit"], "commit"), (["gret"], "greet")],
)
def test_a_mistyped_command_is_answered_with_the_nearest(args, meant, refused):
    with plugins.registered(Commands()):
        assert f"there is no command '{args[-1]}'; did you mean '{meant}'?" in refused(*args)


def test_a_call_without_a_url_picks_no_broker_by_accident(refused):
    assert "give its URL with --url or in TXNBRIDGE_URL" in refused("send", "orders", "a body")


@pytest.mark.parametrize(
    "args",
    [
        ["read", "orders"],
        ["redrive", "orders-dead", "--dry-run"],
        ["doctor"],
        ["capabilities"],
        ["topics", "list"],
        ["topics", "delete", "orders", "--yes"],
        ["transactions", "list"],
        ["transactions", "abort", "x", "--yes", "--reason", "y"],
        ["resolver", "parked", "--group", "x"],
    ],
)
def test_a_command_that_looks_makes_neither_a_topic_nor_a_file(args, invoke, tmp_path):
    url = f"embedded:{tmp_path}/broker.db"
    result = invoke(*args, "--url", url)
    assert result.exit_code == 2 and "there is no broker's file" in result.output
    assert not list(tmp_path.iterdir())
    with txnbridge.connect(url) as bridge:
        invoke(*args, "--url", url)
        assert bridge.admin.topics() == []


def test_a_resolver_of_a_mistyped_file_does_not_wait_there_for_ever(refused, tmp_path):
    asked = ["resolver", "run", "--group", "x", "--check", "json:dumps"]
    assert "there is no broker's file" in refused(*asked, "--url", f"embedded:{tmp_path}/broker.db")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("topics", "no topics"),
        ("transactions", "no open transactions"),
        ("groups", "no groups"),
        ("retries", "no retry topics"),
    ],
)
def test_an_empty_list_says_so(invoke, bridge, name, said):
    assert invoke(name, "list").stdout == f"{said}\n"
    assert json.loads(invoke(name, "list", "--json").stdout) == []


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["topics", "delete", "missing"], "'missing'"),
        (["topics", "delete", "missing", "--yes"], "'missing'"),
        (["topics", "grow", "missing", "2"], "'missing'"),
        (["read", "missing"], "'missing'"),
        (["redrive", "missing"], "missing"),
        (["groups", "show", "missing"], "there is no group 'missing'"),
        (["retries", "list", "--group", "missing"], "there is no retry topic of group 'missing'"),
        (["transactions", "describe", "missing"], "'missing'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_missing_name_is_told_and_no_topic_of_that_name_is_created(refused, bridge, args, named):
    assert named in refused(*args)
    assert bridge.admin.topics() == []


def test_the_timeout_reaches_the_bridge(invoke):
    seen = []

    @_common.command("probe")
    def probe(cli: Cli):
        with cli.connect() as bridge, bridge.transaction() as txn:
            seen.append(txn.deadline)

    with plugins.registered(ToyBackend()):
        CliRunner().invoke(probe, ["--url", "toy:", "--timeout", "7"], catch_exceptions=False)
    assert 6 < seen[0] <= 7


@pytest.mark.parametrize("place", ["query", "user"])
@pytest.mark.parametrize("more", [[], ["--json"], ["--debug"]], ids=["plain", "json", "debug"])
def test_a_secret_in_the_url_never_shows(place, more, invoke):
    url = "toy://host?pasword=hunter2" if place == "query" else "toy://me:hunter2@host"
    with plugins.registered(ToyBackend()):
        result = invoke("send", "orders", "a body", "--url", url, *more)
    assert result.exit_code == 2
    assert result.stderr
    assert "hunter2" not in result.output


def leaves(command: click.Command | None, path: str) -> list[tuple[str, click.Command]]:
    assert command is not None and command.name is not None and path.endswith(command.name)
    if not isinstance(command, click.Group):
        return [(path, command)]
    ctx = click.Context(command)
    return [
        found
        for name in command.list_commands(ctx)
        for found in leaves(command.get_command(ctx, name), f"{path} {name}")
    ]


def test_every_command_has_json_and_debug_and_a_help_text():
    found = leaves(main, "txnbridge")
    assert {path.split()[1] for path, _ in found} >= set(COMMANDS)
    for path, command in found:
        options = {name for parameter in command.params for name in parameter.opts}
        assert {"--json", "--debug"} <= options, path
        # These start brokers, speak to two of them or none, take the URL as an argument, or speak to a database.
        without = ("app", "brokers", "conformance", "new", "pipeline", "relay")
        assert ("--url" in options) is (path.split()[1] not in without or path == "txnbridge relay run"), path
        assert command.help, path


def test_help_ends_with_every_exit_code_and_so_does_the_page(invoke):
    text = invoke("--help").stdout
    page = (ROOT / "docs" / "cli.md").read_text()
    for code in ExitCode:
        assert f"{code.value:>3}  {code.sentence}\n" in text
        assert f"| {code.value} | {code.sentence} |\n" in page


def test_the_page_shows_every_command():
    page = (ROOT / "docs" / "cli.md").read_text()
    assert [name for name in COMMANDS if f"| `{name}" not in page] == []


def test_the_entry_point_and_the_module_tell_the_version_of_the_package(invoke):
    told = f"txnbridge {txnbridge.__version__}\n"
    assert invoke("--version").stdout == told
    assert subprocess.check_output([sys.executable, "-m", "txnbridge.cli", "--version"], text=True) == told


def loaded_after(args: list[str]) -> set[str]:
    code = f"import sys; from txnbridge.cli import main; main({args}, standalone_mode=False); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.splitlines()[-1].split())


def test_help_loads_no_command_and_nothing_heavy():
    loaded = loaded_after(["--help"])
    assert "click" in loaded
    assert loaded & {"rich", "sqlalchemy", "tenacity", "multiprocessing"} == set()
    assert loaded & {f"txnbridge.cli.{name}" for name in COMMANDS} == set()
    assert {"txnbridge.cli.demo"} <= loaded_after(["demo", "--help"])  # so it would be seen


@click.command("greet")
@json_and_debug
def greet(as_json):
    """Say hello."""
    click.echo('"hello"' if as_json else "hello")


@click.command("stumble")
@json_and_debug
def stumble(as_json):
    raise errors.Fenced("somebody took over")


@click.command("topics")
def our_name():
    click.echo("not ours")


class Commands:
    @hookimpl
    def txnbridge_commands(self):
        return [greet, stumble, our_name]


def test_a_plug_in_brings_commands_with_the_codes_and_options_of_ours(invoke):
    with plugins.registered(Commands()):
        assert re.search(r"^  greet +Say hello\.$", invoke("--help").stdout, re.MULTILINE)
        assert invoke("greet").stdout == "hello\n"
        assert invoke("greet", "--json").stdout == '"hello"\n'
        plain = invoke("stumble")
        said = json.loads(invoke("stumble", "--json").stderr)
        traced = invoke("stumble", "--debug").stderr
    assert (plain.exit_code, plain.stderr) == (6, "txnbridge: somebody took over\n")
    assert (said["error"], said["exit_code"]) == ("Fenced", 6)
    assert "Traceback" in traced


def test_a_plug_in_does_not_replace_a_command(invoke):
    with plugins.registered(Commands()):
        assert "not ours" not in invoke("topics", "--help").stdout + invoke("topics", "list").stdout


class BrokenCommands:
    @hookimpl
    def txnbridge_commands(self):
        raise RuntimeError("half installed")


def test_a_plug_in_whose_commands_fail_takes_nothing_else_down(no_failures, invoke):
    with plugins.registered(BrokenCommands()):
        result = invoke("--help")
    assert result.exit_code == 0
    assert all(f"  {name} " in result.stdout for name in COMMANDS)
    assert [str(error) for error in plugins.failed.values()] == ["half installed"]


@pytest.mark.parametrize("args", [["capabilities"], ["capabilities", "--json"]], ids=" ".join)
def test_a_reader_who_goes_away_is_no_error(args):
    read, write = os.pipe()
    os.close(read)
    run = subprocess.run([sys.executable, "-m", "txnbridge.cli", *args], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (run.returncode, run.stderr) == (ExitCode.BROKEN_PIPE, b"")


def test_a_program_that_has_closed_the_standard_streams_can_call_every_command(url):
    for command in ("topics create orders", "send orders 1", "topics list", "send orders", "read orders"):
        ran = subprocess.run(f"{sys.executable} -m txnbridge.cli {command} <&- >&- 2>&-", shell=True)
        assert ran.returncode == 0, command


def test_a_progress_bar_is_for_terminals_only(capsys):
    with Cli(None, json=False, timeout=1).progress("sending") as advance:
        advance(1)
    assert capsys.readouterr() == ("", "")


def test_a_table_in_a_pipe_breaks_no_line(capsys):
    Cli(None, json=False, timeout=1).table(["name", "text"], [["a[0]", "word " * 100]])
    assert capsys.readouterr().out.splitlines()[1].startswith("a[0]  word word")
