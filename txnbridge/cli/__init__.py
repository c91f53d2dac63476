"""The command line. Each command is a module, imported only when it runs, so that `txnbridge --help` is quick."""

from __future__ import annotations

import functools
import importlib
import io
import os
import sys

import click

import txnbridge
from txnbridge import plugins
from txnbridge.cli._common import EXIT_CODES_HELP, Group, guarded

# Each command with its line in `txnbridge --help`. Its function is `command` in the module of the same name.
COMMANDS = {
    "demo": "A short story that shows what txnbridge promises, and checks it.",
    "new": "Write a small service with its test, to begin from.",
    "topics": "List, create, delete and grow topics.",
    "send": "Send messages in one transaction.",
    "read": "Show committed messages.",
    "run": "Run an application or a processor.",
    "app": "Describe an application.",
    "copy": "Copy topics to another broker, exactly once.",
    "redrive": "Send dead letters back to where they came from.",
    "retries": "List messages that wait for a retry.",
    "groups": "List groups, their members and lag, and set them back.",
    "transactions": "List and end open and prepared transactions.",
    "resolver": "Answer check-backs of half messages, and list and end parked ones.",
    "relay": "Publish the rows of an outbox, and list and change those that cannot be.",
    "spans": "End and list parts of transactions over several brokers.",
    "log": "Renew a decision log that has lost records.",
    "status": "Show the outcome of a token's transaction.",
    "top": "Show groups, open transactions and findings on one screen.",
    "doctor": "Find settings and states that weaken a guarantee or hold readers back.",
    "capabilities": "Say what brokers promise.",
}


@functools.cache
def plugin_commands() -> dict[str, click.Command]:
    """Return the commands of all plug-ins, by name; `plugins.failed` has the plug-ins that raised an error."""
    return {command.name: command for command in plugins.commands() if command.name}


class Main(Group):
    """The group of all commands: those of this package, then those of plug-ins."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *sorted(plugin_commands().keys() - COMMANDS.keys())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return plugin_commands().get(cmd_name)
        command: click.Command = importlib.import_module(f"txnbridge.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        extra = plugin_commands()
        rows = [(name, COMMANDS.get(name) or extra[name].get_short_help_str(80)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return guarded(ctx, super().parse_args, ctx, args)

    def invoke(self, ctx: click.Context) -> None:
        guarded(ctx, super().invoke, ctx)


@click.command(
    "txnbridge",
    cls=Main,
    epilog=EXIT_CODES_HELP,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.version_option(txnbridge.__version__, prog_name="txnbridge", message="%(prog)s %(version)s")
def main() -> None:
    """Messaging transactions: what belongs together becomes visible together, or not at all.

    New here? `txnbridge demo` needs nothing and takes seconds.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # the caller has closed it, and the next file or socket would get its number
            setattr(sys, name, open(os.open(os.devnull, os.O_RDWR), "w" if number else "r"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Characters that the terminal's encoding does not have are written as escapes.
        sys.stdout.reconfigure(errors="backslashreplace")
