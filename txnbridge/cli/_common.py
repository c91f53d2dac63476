"""Functions for all commands: common options, output, errors as one line, exit codes.

    @command("list", help="List topics.")
    @click.option("--internal", is_flag=True, help="Also txnbridge's own.")
    def list_topics(cli: Cli, internal: bool) -> None:
        with cli.connect() as bridge:
            topics = bridge.admin.topics(internal)
        cli.listing([...], "no topics", ["topic", "partitions"], [...])

A command's function may return an `ExitCode`; None is OK. It raises errors; `guarded` reports them as one line and an
exit code.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import click

import txnbridge
from txnbridge import Decision, Outcome, errors
from txnbridge._base.url import find_backend, nearest, parse_url, plugin_failures
from txnbridge.commands import asked_for, json_and_debug

if TYPE_CHECKING:
    from rich.console import Console

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class ExitCode(IntEnum):
    """The exit codes of commands, for scripts."""

    sentence: str

    OK = 0, "done, and the answer is yes"
    FAILED = 1, "failed, or the answer is no"
    USAGE = 2, "the call is wrong: repeating it will not help"
    UNAVAILABLE = 3, "the broker did not answer or could not store; nothing was decided"
    UNKNOWN = 4, "the outcome is unknown; the error names the token to ask with later"
    ABORTED = 5, "aborted: it certainly has no effect"
    FENCED = 6, "a newer owner of the transactional id exists"
    WARNINGS = 7, "done, with warnings (doctor)"
    INTERRUPTED = 130, "interrupted by Ctrl-C"
    BROKEN_PIPE = 141, "the program that read the output has ended"

    def __new__(cls, code: int, sentence: str) -> ExitCode:
        member = int.__new__(cls, code)
        member._value_ = code
        member.sentence = sentence
        return member


# "\b" keeps click from joining the lines into one paragraph.
EXIT_CODES_HELP = "\b\nExit codes:\n" + "\n".join(f"  {code.value:>3}  {code.sentence}" for code in ExitCode)

_CODES: tuple[tuple[type[errors.TxnBridgeError], ExitCode], ...] = (
    (errors.UsageError, ExitCode.USAGE),
    (errors.BrokerUnavailable, ExitCode.UNAVAILABLE),
    (errors.OutcomeUnknown, ExitCode.UNKNOWN),
    (errors.TransactionAborted, ExitCode.ABORTED),
    (errors.Fenced, ExitCode.FENCED),
)


def exit_code(error: errors.TxnBridgeError) -> ExitCode:
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.FAILED)


def outcome_code(outcome: Outcome, decision: Decision) -> ExitCode:
    """Return the exit code of a command that was to end a transaction by `decision`, and got `outcome`."""
    if outcome is (Outcome.COMMITTED if decision is Decision.COMMIT else Outcome.ABORTED):
        return ExitCode.OK
    if outcome is Outcome.UNKNOWN:
        return ExitCode.UNKNOWN
    return ExitCode.ABORTED if outcome is Outcome.ABORTED else ExitCode.FAILED


def idle_code(processors: Iterable[txnbridge.Processor]) -> int | None:
    """Return the exit code after a run until idle: not 0 if a signal stopped it, because messages may be left."""
    signals = [each._stop.signalled for each in processors if each._stop.signalled is not None]
    return 128 + signals[0] if signals else None


def printable(text: str) -> str:
    """Return a text with control characters and line breaks escaped, so that a terminal shows it as one line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def when(milliseconds: int | None) -> str:
    """Return a time (milliseconds since 1970) as text in the local zone; "-" for None, a strange number as it is."""
    if milliseconds is None or not 0 <= milliseconds < 1 << 47:  # any stranger may send a number that is no time
        return dash(milliseconds)
    return datetime.fromtimestamp(milliseconds / 1000).astimezone().isoformat(" ", "seconds")


def dash(value: object, form: str = "{}") -> str:
    """Return a value as text of this form; "-" for None."""
    return "-" if value is None else form.format(value)


@dataclass(frozen=True)
class Cli:
    """A command's common options, its connection and its output."""

    url: str | None
    json: bool
    timeout: float

    def connect(self, url: str | None = None, **options: Any) -> txnbridge.Bridge:
        """Open the bridge that --url or TXNBRIDGE_URL names; `options` are those of `txnbridge.connect`."""
        url = url or self.url
        if not url:
            raise click.UsageError("no broker: give its URL with --url or in TXNBRIDGE_URL")
        return txnbridge.connect(url, timeout=self.timeout, **options)

    def look(self, url: str | None = None, **options: Any) -> txnbridge.Bridge:
        """Open a bridge for a command that only reads: it creates no missing topic and no embedded broker's file."""
        return self.connect(url, create_topics=0, **_making_no_file(url or self.url), **options)

    def document(self, value: Any) -> None:
        """Write a JSON value to stdout: the command's only document, or one of its lines."""
        click.echo(json.dumps(value))

    def say(self, text: str) -> None:
        """Write one line of text to stdout; with --json write nothing."""
        if not self.json:
            click.echo(text)

    def answer(self, document: Any, *lines: str) -> None:
        """Write a command's answer to stdout: with --json the document, otherwise the lines."""
        if self.json:
            self.document(document)
        for line in lines:
            self.say(printable(line))  # strangers choose names

    def would(self, document: Any, text: str, needed: str = "--yes and --reason TEXT") -> ExitCode:
        """Say what a command would do with the options `needed`, without which it was called; return its exit code."""
        self.answer(document, text, f"do it with {needed}")
        return ExitCode.USAGE

    def listing(self, documents: Any, none: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Write a list to stdout: with --json the documents, otherwise a table, or the text `none` for an empty one."""
        if self.json:
            self.document(documents)
        elif rows:
            self.table(columns, rows)
        else:
            self.say(none)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table(*columns, box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        for row in rows:
            table.add_row(*(cell if isinstance(cell, Text) else Text(printable(str(cell))) for cell in row))
        console().print(table)

    @contextmanager
    def progress(self, text: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Show a progress bar on stderr during the block, which calls the yielded function with each step's size.

        Without a terminal, and with --json, show no bar.
        """
        if self.json or not sys.stderr.isatty():
            yield lambda step: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console(stderr=True), transient=True) as bar:
            task = bar.add_task(text, total=total)
            yield lambda step: bar.advance(task, step)


def _making_no_file(url: str | None) -> dict[str, Any]:
    """Return the option that keeps the URL's backend from creating a file; empty if it has none or the URL sets it."""
    if not url:
        return {}
    address, given = parse_url(url)
    backend = find_backend(address.scheme)
    return {backend.name: {"create": False}} if "create" in backend.options and "create" not in given else {}


def console(stderr: bool = False) -> Console:
    """Return a rich console without markup, which does not wrap lines in a file or a pipe."""
    from rich.console import Console

    class PlainConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # handled by `guarded`; rich would exit with code 1

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 10_000
    return PlainConsole(file=stream, markup=False, highlight=False, emoji=False, width=width)


class Group(click.Group):
    """A group of commands that suggests the nearest command for a mistyped name."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            near = nearest(args[0], self.list_commands(ctx))
            hint = f"; did you mean {near!r}?" if near else plugin_failures()
            ctx.fail(f"there is no command {args[0]!r}{hint}")
        return super().resolve_command(ctx, args)


def command(
    name: str, group: click.Group | None = None, *, broker: bool = True, **attributes: Any
) -> Callable[[Callable[..., int | None]], click.Command]:
    """Decorate a function as a command with the common options; the function's first argument is a `Cli`.

    The command is added to `group`. `broker=False` leaves out --url and --timeout. `attributes` are those of
    `click.Command`.
    """

    def decorate(function: Callable[..., int | None]) -> click.Command:
        @functools.wraps(function)
        def run(as_json: bool, url: str | None = None, timeout: float = 0, **given: Any) -> None:
            code = function(Cli(url, as_json, timeout), **given)
            click.get_current_context().exit(code or ExitCode.OK)

        decorated: Callable[..., None] = json_and_debug(run)
        for option in reversed(_BROKER_OPTIONS if broker else ()):
            decorated = option(decorated)
        made = click.command(name, cls=click.Command, **attributes)(decorated)
        if group is not None:
            group.add_command(made)
        return made

    return decorate


_BROKER_OPTIONS = (
    click.option("--url", envvar="TXNBRIDGE_URL", metavar="URL", help="The broker's URL. Default: TXNBRIDGE_URL."),
    click.option(
        "--timeout",
        type=click.FloatRange(min=0, min_open=True),
        default=30.0,
        show_default=True,
        metavar="SECONDS",
        help="The deadline of each call to the broker.",
    ),
)


reason_option = click.option("--reason", metavar="TEXT", help="Why the application is overridden; it is logged.")


def guarded(
    ctx: click.Context, call: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
) -> _Result:
    """Call a function; report its exception as one line on stderr (with --debug, a traceback) and an exit code."""
    try:
        return call(*args, **kwargs)
    except (click.exceptions.Exit, click.exceptions.NoArgsIsHelpError):
        raise
    except (KeyboardInterrupt, click.Abort):
        click.echo(err=True)  # ends the line on which the terminal shows ^C
        ctx.exit(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # Redirect the buffered output to /dev/null, so that flushing it at exit does not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        ctx.exit(ExitCode.BROKEN_PIPE)
    except Exception as error:
        if asked_for(ctx, "debug"):
            traceback.print_exc()
        ctx.exit(report(ctx, error))


def report(ctx: click.Context, error: Exception) -> int:
    """Write an error as one line to stderr, and return its exit code."""
    text, code = _describe(error)
    token = getattr(error, "token", None)
    if asked_for(ctx, "json"):
        told = {"error": type(error).__name__, "message": text, "exit_code": int(code), "token": token}
        click.echo(json.dumps({k: v for k, v in told.items() if v is not None}), err=True)
    else:
        line = printable(" ".join(text.split())) + (f" (token: {token})" if token else "")
        click.echo(f"txnbridge: {line}", err=True)
    return int(code)


def _describe(error: Exception) -> tuple[str, int]:
    if isinstance(error, errors.TxnBridgeError):
        return str(error) or type(error).__name__, exit_code(error)
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)  # of a wrong call
        help_ = f"; see `{context.command_path} --help`" if context else ""
        return f"{error.format_message().rstrip('.')}{help_}", error.exit_code
    if isinstance(error, OSError):
        return f"{error.filename or 'the operating system'}: {error.strerror or type(error).__name__}", ExitCode.FAILED
    # The text of an error that is not txnbridge's may contain any data, such as a message's body.
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {frame.filename}:{frame.lineno}; --debug shows all", ExitCode.FAILED
