"""`Stage`: shows the text and code of `txnbridge demo`, checks the demo's claims, and runs its processes."""

from __future__ import annotations

import inspect
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from txnbridge._base.service_stop import signals_handled
from txnbridge.cli.demo._actors import Shop
from txnbridge.testing.child_processes import Child

# The timeout of one step of a process. A step takes less than a second, but longer on a busy machine.
PATIENCE = 30.0
# The pause after a step and after a text or code on a terminal, so that the user can follow.
_LOOKING, _READING = 0.06, 0.25
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stage:
    """One run of the demo on one broker."""

    def __init__(self, console: Console, url: str) -> None:
        self.url = url
        self.shop = Shop()
        self.held: list[dict[str, str]] = []
        self._console = console
        self._actors: list[Child] = []
        self._ok, self._bad = ("✓", "✗") if console.encoding.startswith("utf") else ("ok", "FAILED")

    def begin(self) -> None:
        where = "an embedded broker, a single file" if self.url.startswith("embedded:") else "a real broker"
        told = "Workers and tills are processes of their own. What they run is shown before it runs."
        story = Text.assemble(f"A small shop sells on {where}:\n", (self.url, "cyan"), f"\n{told}")
        self._console.print(Panel(story, title="txnbridge demo", title_align="left", border_style="blue"))

    def title(self, title: str, text: str, *functions: Callable[..., Any]) -> None:
        """Begin a scene: show its text, and the source of functions that its processes will run."""
        self._heading(title)
        self._show(Padding(Text(text), (0, 0, 1, 2), expand=False), _READING)
        for function in functions:
            source = inspect.getsource(function).rstrip()
            code = Syntax(source, "python", theme="ansi_dark", background_color="default")
            self._show(Padding(code, (0, 0, 1, 6), expand=False), _READING)

    def step(self, who: str, text: str) -> None:
        """Show one line: process `who` has just done what `text` says."""
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_row(Text(f"{who:<16}", "cyan" if who == "shop" else "yellow"), Text(text))
        self._show(Padding(line, (0, 0, 0, 2)), _LOOKING)

    def check(self, claim: str, how: str, seen: object, expected: object, later: bool = False) -> None:
        """Check that `seen`, observed by a reader or process, equals `expected`; show `claim` with a check mark.

        `seen` may be a function, which is called again until its result is as expected: committed messages may become
        readable a moment later. On the embedded broker this is so only for commits of other processes (`later`).
        """
        if inspect.isfunction(seen):
            at_once = self.url.startswith("embedded:") and not later
            seen = _until(seen, expected, 0 if at_once else PATIENCE)
        if seen != expected:
            raise AssertionError(f"{claim}: expected {expected!r}, but it is {seen!r}")
        self.held.append({"claim": claim, "how": how})
        self._show(Text(f"  {self._ok} {claim}", "bold green"), _LOOKING)

    def broken(self, text: str) -> None:
        self._console.print(Text(f"\n  {self._bad} {text}\n", "bold red"))

    def summary(self, seconds: float) -> None:
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("claim")
        table.add_column("how it was checked", style="dim")
        for held in self.held:
            table.add_row(Text(f"{self._ok} {held['claim']}", "green"), held["how"])
        self._heading(f"{len(self.held)} claims checked in {seconds:.1f} s")
        self._console.print(table)

    def outlook(self, url: str | None) -> None:
        """Show commands that the user can try next, on the broker at `url` if its topics were kept."""
        orders = self.shop.orders if url else "orders"
        self._heading("What to try next")
        for command, text in {
            f"export TXNBRIDGE_URL={url or 'embedded:shop.db'}": "the shop of this story" if url else "any file",
            f"txnbridge send {orders} 'a new order'": "one transaction",
            f"txnbridge read {orders}": "what is committed",
            "txnbridge topics list": "where it is",
        }.items():
            line = Text.assemble((f"{command:<44}  ", "cyan"), (text, "dim"))
            self._console.print(line, soft_wrap=True)  # not wrapped, so that the command can be copied

    def actor(
        self, role: str, function: Callable[..., Any], *args: object, pause: str | None = None
    ) -> tuple[Child, str]:
        """Run a function in a process, which `pause` stops at this event; return the process and its name."""
        with _interrupted_later():
            actor = Child(function, self.url, *args, pause=pause)
            self._actors.append(actor)
        return actor, f"{role} {actor.pid}"

    def kill(self, actor: Child, name: str) -> None:
        actor.kill()
        self.step(name, "kill -9")

    def close(self) -> None:
        """Kill every process of the demo that is still running."""
        for actor in self._actors:
            actor.kill()

    def _heading(self, text: str) -> None:
        self._console.print()
        self._console.print(Rule(Text(text, "bold"), align="left", style="blue"))

    def _show(self, what: RenderableType, seconds: float) -> None:
        self._console.print(what)
        if self._console.is_terminal:
            time.sleep(seconds)


def _until(look: Callable[[], object], expected: object, patience: float) -> object:
    until = time.monotonic() + patience
    while (seen := look()) != expected and time.monotonic() < until:
        time.sleep(_LOOKING)
    return seen


@contextmanager
def _interrupted_later() -> Iterator[None]:
    """Delay signals that end the demo while a process starts; the new process inherits this.

    During a start, a signal would leave a process that is not registered yet, or print a traceback of a child. A signal
    such as Ctrl-C reaches all processes at once, also the fork server.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # new processes inherit the mask
    resource_tracker.ensure_running()  # its own start would unblock the signals during the other process's start
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    interrupts: list[int] = []
    caught = [number for number in _ENDING if callable(signal.getsignal(number))]
    with signals_handled(lambda number, frame: interrupts.append(number), *caught):  # those to other threads
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if interrupts:
        signal.raise_signal(interrupts[0])
