"""Where the demo plays: what is shown, what is checked, and the processes that act."""

from __future__ import annotations

import contextlib
import inspect
import json
import queue
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from txnbridge.cli.demo.actors import Shop

# A step of an actor takes a second at most, the start of Python included; ten times that is a machine in trouble.
PATIENCE = 10.0
_COLORS = {"shop": "cyan", "reader": "magenta"}


class ClaimBroken(Exception):
    """A claim of the story turned out false, or could not be checked."""


@dataclass(frozen=True)
class Claim:
    """One claim that was checked and held."""

    text: str
    how: str


class Stage:
    """One performance on one broker."""

    def __init__(self, console: Console, shop: Shop) -> None:
        self.shop = shop
        self.claims: list[Claim] = []
        self._url = ""
        self._console = console
        self._actors: list[Actor] = []
        self._ok, self._bad = ("✓", "✗") if console.encoding.startswith("utf") else ("ok", "FAILED")

    def begin(self, url: str) -> None:
        self._url = url
        story = Text("A small shop sells on an embedded broker, a single file:\n", justify="left")
        story.append(url, "cyan").append(
            "\nWorkers and tills are processes of their own. What they run is shown before it runs."
        )
        self._console.print(Panel(story, title="txnbridge demo", title_align="left", border_style="blue"))

    # --- showing --------------------------------------------------------------------------------------------------

    def title(self, title: str, text: str) -> None:
        self._console.print()
        self._console.print(Rule(Text(title, "bold"), align="left", style="blue"))
        self._console.print(Padding(Text(text), (0, 0, 1, 2)))

    def code(self, *functions: Callable[..., Any]) -> None:
        """Show the source of what will run."""
        for function in functions:
            source = textwrap.dedent(inspect.getsource(function)).rstrip()
            code = Syntax(source, "python", theme="ansi_dark", background_color="default")
            self._console.print(Padding(code, (0, 0, 1, 6)))

    def step(self, who: str, text: str) -> None:
        """One thing that has just happened."""
        line = Text("  ").append(f"{who:<18}", _COLORS.get(who, "yellow")).append(text)
        self._console.print(line)

    def check(self, claim: str, how: str, *, seen: object, expected: object) -> None:
        """The only way to a check mark: what a reader or a process really saw is what the claim says."""
        if seen != expected:
            raise ClaimBroken(f"{claim}: expected {expected!r}, but it is {seen!r}")
        self.claims.append(Claim(claim, how))
        self._console.print(Text("  ").append(f"{self._ok} {claim}", "bold green"))

    def broken(self, text: str) -> None:
        self._console.print(Text(f"\n  {self._bad} {text}\n", "bold red"))

    def summary(self, seconds: float) -> None:
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 2))
        table.add_column("claim")
        table.add_column("how it was checked", style="dim")
        for claim in self.claims:
            table.add_row(Text(f"{self._ok} {claim.text}", "green"), Text(claim.how))
        self._console.print()
        self._console.print(Rule(Text(f"{len(self.claims)} claims checked in {seconds:.1f} s", "bold"), align="left"))
        self._console.print(table)

    def outlook(self, url: str | None) -> None:
        """What to try next."""
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
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 2))
        for command, text in commands.items():
            table.add_row(Text(command, "cyan"), Text(text, "dim"))
        self._console.print()
        self._console.print(Rule(Text("What to try next", "bold"), align="left", style="blue"))
        self._console.print(table)

    # --- acting ---------------------------------------------------------------------------------------------------

    def actor(self, name: str, role: str, *arguments: str) -> Actor:
        """Start a process that plays a role."""
        actor = Actor(name, role, self._url, self.shop.suffix, *arguments)
        self._actors.append(actor)
        return actor

    def close(self) -> None:
        """End every actor that is still there."""
        for actor in self._actors:
            actor.close()


class Actor:
    """A process that plays one role. Whatever it does not do in time breaks the story, it never hangs."""

    def __init__(self, name: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "txnbridge.cli.demo.actors", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.name = f"{name} {self.pid}"
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._ear = threading.Thread(target=self._listen, daemon=True)
        self._ear.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def tells(self, *expected: str) -> dict[str, Any]:
        """The next thing that it tells, which has to be one of these."""
        try:
            line = self._lines.get(timeout=PATIENCE)
        except queue.Empty:
            raise ClaimBroken(f"{self.name} did not answer for {PATIENCE:g} s") from None
        if line is None:
            raise ClaimBroken(f"{self.name} died: {self._last_words()}")
        told: dict[str, Any] = json.loads(line)
        if told["what"] not in expected:
            raise ClaimBroken(f"{self.name} should have been {' or '.join(expected)}, but was {told['what']}")
        return told

    def _last_words(self) -> str:
        assert self._process.stderr is not None
        lines = self._process.stderr.read().splitlines()
        return lines[-1] if lines else f"exit code {self._process.wait()}"

    def go(self) -> None:
        """Let it go on from where it waits."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def freeze(self) -> None:
        """Stop it as a closed laptop, a paused virtual machine or a long collection of garbage would."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> int:
        """kill -9, and what the system says about its end."""
        self._process.kill()
        return self._process.wait(PATIENCE)

    def close(self) -> None:
        self.kill()
        self._ear.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
