"""The demo's stage: it shows text and code, checks claims, and runs the processes."""

from __future__ import annotations

import inspect
import signal
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from txnbridge.cli.demo.actors import Shop
from txnbridge.testing.child_processes import Child

# A step of an actor takes less than a second; on a machine that is very busy it is better to wait than to fail.
PATIENCE = 30.0
# So that the eye can follow on a terminal, where all of it would otherwise be there at once.
_READING = 0.25
_LOOKING = 0.06
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_COLORS = {"shop": "cyan", "reader": "magenta"}


class ClaimBroken(AssertionError):
    """A claim of the story turned out false. An actor that does not do its part raises `AssertionError` too."""


@dataclass(frozen=True)
class CheckedClaim:
    """One claim that was checked and held."""

    text: str
    how: str


class Stage:
    """One performance on one broker."""

    def __init__(self, console: Console, url: str, shop: Shop) -> None:
        self.url = url
        self.shop = shop
        self.claims: list[CheckedClaim] = []
        self._console = console
        self._actors: list[Child] = []
        self._ok, self._bad = ("✓", "✗") if console.encoding.startswith("utf") else ("ok", "FAILED")

    # --- showing --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        where = "an embedded broker, a single file" if self.url.startswith("embedded:") else "a real broker"
        story = Text(f"A small shop sells on {where}:\n", justify="left")
        story.append(self.url, "cyan").append(
            "\nWorkers and tills are processes of their own. What they run is shown before it runs."
        )
        self._console.print(Panel(story, title="txnbridge demo", title_align="left", border_style="blue"))

    def title(self, title: str, text: str) -> None:
        self._console.print()
        self._console.print(Rule(Text(title, "bold"), align="left", style="blue"))
        self._show(Padding(Text(text), (0, 0, 1, 2), expand=False), _READING)

    def code(self, *functions: Callable[..., Any]) -> None:
        """Show the source of what will run."""
        for function in functions:
            source = textwrap.dedent(inspect.getsource(function)).rstrip()
            code = Syntax(source, "python", theme="ansi_dark", background_color="default")
            self._show(Padding(code, (0, 0, 1, 6), expand=False), _READING)

    def step(self, who: str, text: str) -> None:
        """Show a thing that has just happened."""
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_row(Text(f"{who:<16}", _COLORS.get(who, "yellow")), Text(text))
        self._show(Padding(line, (0, 0, 0, 2)), _LOOKING)

    def check(self, claim: str, how: str, *, seen: object, expected: object, later: bool = False) -> None:
        """Check that a reader or a process really saw what the claim says; nothing else shows a check mark.

        `seen` may be a function, which is called again until the claim holds: committed messages may become readable a
        moment later. On the embedded broker this is so only for commits of other processes (`later`).
        """
        if inspect.isfunction(seen):
            at_once = self.url.startswith("embedded:") and not later
            seen = _until(seen, expected, 0 if at_once else PATIENCE)
        if seen != expected:
            raise ClaimBroken(f"{claim}: expected {expected!r}, but it is {seen!r}")
        self.claims.append(CheckedClaim(claim, how))
        self._show(Text(f"  {self._ok} {claim}", "bold green"), _LOOKING)

    def _show(self, what: RenderableType, seconds: float) -> None:
        self._console.print(what)
        if self._console.is_terminal:
            time.sleep(seconds)

    def broken(self, text: str) -> None:
        self._console.print(Text(f"\n  {self._bad} {text}\n", "bold red"))

    def summary(self, seconds: float) -> None:
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("claim")
        table.add_column("how it was checked", style="dim")
        for claim in self.claims:
            table.add_row(Text(f"{self._ok} {claim.text}", "green"), Text(claim.how))
        self._console.print()
        self._console.print(Rule(Text(f"{len(self.claims)} claims checked in {seconds:.1f} s", "bold"), align="left"))
        self._console.print(table)

    def outlook(self, url: str | None) -> None:
        """Show what to try next."""
        if url is None:
            commands = {
                "txnbridge demo --keep": "keep the shop's file, and look around in it",
                "export TXNBRIDGE_URL=embedded:shop.db": "a broker of your own: any file",
                "txnbridge send orders 'a first order'": "one transaction",
                "txnbridge read orders": "what is committed",
                "txnbridge capabilities": "what each broker promises",
            }
        else:
            commands = {
                f"export TXNBRIDGE_URL={url}": "the shop of this story",
                "txnbridge topics list": "its topics",
                f"txnbridge read {self.shop.shipments}": "what was shipped",
                f"txnbridge read {self.shop.orders} --group {self.shop.workers}": "what the workers still have to do",
                "txnbridge doctor": "how the broker is",
            }
        self._console.print()
        self._console.print(Rule(Text("What to try next", "bold"), align="left", style="blue"))
        width = min(44, max(map(len, commands)))
        for command, text in commands.items():
            line = Text.assemble((f"{command:<{width}}  ", "cyan"), (text, "dim"))
            self._console.print(line, soft_wrap=True)  # so that it can be copied whole

    # --- acting ---------------------------------------------------------------------------------------------------

    def actor(self, function: Callable[..., Any], *args: object, pause: str | None = None) -> Child:
        """Run a function in a process of its own; with `pause` that process is stopped at this event."""
        with _interrupted_later():
            actor = Child(function, *args, pause=pause)
            self._actors.append(actor)
        return actor

    def close(self) -> None:
        """End every actor that is still there."""
        for actor in self._actors:
            actor.kill()


def _until(look: Callable[[], object], expected: object, patience: float) -> object:
    until = time.monotonic() + patience
    while (seen := look()) != expected and time.monotonic() < until:
        time.sleep(_LOOKING)
    return seen


@contextmanager
def _interrupted_later() -> Iterator[None]:
    """Hold signals that end the story back while a process starts; the new process inherits that.

    In the middle of a start a signal would leave an unknown process, or show a traceback of another process. A signal
    may come to all processes at once, also to the fork server.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # which the new processes inherit
    resource_tracker.ensure_running()  # it belongs to the start, and would lift the block of the others at its end
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    interrupts: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: interrupts.append(number))  # for the other threads
        for number in _ENDING
        if callable(signal.getsignal(number))
    }
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
    if interrupts:
        signal.raise_signal(interrupts[0])
