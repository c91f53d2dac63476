"""The command `txnbridge top`: a broker's groups, open transactions and problems on one screen."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import click

from txnbridge import Bridge, NotSupported, TxnBridgeError
from txnbridge.cli import _common
from txnbridge.cli._common import Cli, ExitCode, dash, exit_code, printable
from txnbridge.errors import AccessDenied
from txnbridge.spi import Advice, GroupInfo, OpenTransaction

if TYPE_CHECKING:
    from rich.console import RenderableType

# The doctor asks the broker for many things, which change slowly.
_DOCTOR_SECONDS = 15.0
_MOST_ROWS = 12


@_common.command("top")
@click.option("--every", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="Seconds per update.")
@click.option("--halves", metavar="GROUP", multiple=True, help="Also count this group's parked half messages.")
@click.option("--once", is_flag=True, help="Print once and end; with --json for scripts.")
def command(cli: Cli, every: float, halves: tuple[str, ...], once: bool) -> ExitCode:
    """Show groups with their lag, open and prepared transactions, and the doctor's findings, until Ctrl-C.

    The last line names the parts of this view that the broker cannot give.
    """
    if cli.json and not once:
        raise click.UsageError("--json goes with --once")
    with cli.look() as bridge:
        watch = Watch(bridge, halves)
        if not once:
            _show_live(watch, every)
            return ExitCode.OK
        state = watch.look()
        if cli.json:
            cli.document(_as_json(state))
        else:
            _common.console().print(_screen(bridge.url, state))
    return state.code


@dataclass
class BrokerState:
    """The state of a broker at one time."""

    at: float
    groups: list[GroupInfo] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)  # messages acknowledged per second, by group
    transactions: list[OpenTransaction] = field(default_factory=list)
    parked: dict[str, int] = field(default_factory=dict)
    findings: list[Advice] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # names of the parts that this broker does not list
    error: str | None = None
    code: ExitCode = ExitCode.OK

    def fail(self, error: TxnBridgeError) -> None:
        self.error = f"{self.error}; {error}" if self.error else str(error)
        self.code = exit_code(error)


class Watch:
    """Asks a broker for its state again and again, over one bridge."""

    def __init__(self, bridge: Bridge, halves: Sequence[str]) -> None:
        self._bridge = bridge
        self._halves = halves
        self._findings: list[Advice] = []
        self._examined_at: float | None = None
        self._last: BrokerState | None = None

    def look(self) -> BrokerState:
        """Return the broker's present state. If the broker does not answer, the state's `error` says so."""
        now = BrokerState(time.monotonic())
        admin = self._bridge.admin
        try:
            self._part(now, "groups", lambda: now.groups.extend(admin.describe_groups(admin.groups()).values()))
            self._part(now, "open transactions", lambda: now.transactions.extend(admin.transactions()))
            if self._examined_at is None or now.at - self._examined_at >= _DOCTOR_SECONDS:
                self._findings, self._examined_at = admin.doctor(), now.at
            for group in self._halves:
                now.parked[group] = len(admin.parked(group))
        except TxnBridgeError as error:
            now.fail(error)
        now.findings = [advice for advice in self._findings if advice.level != "ok"]
        if self._last is not None:
            now.rates = _rates(self._last, now)
        self._last = now
        return now

    def _part(self, now: BrokerState, name: str, look: Callable[[], object]) -> None:
        try:
            look()
        except NotSupported:
            now.missing.append(name)
        except AccessDenied as error:  # the other parts may be allowed
            now.fail(error)


def _rates(before: BrokerState, now: BrokerState) -> dict[str, float]:
    """Return the messages per second that each group acknowledged between two looks, if positions are numbers."""
    found = {}
    old = {group.name: group.positions for group in before.groups}
    for group in now.groups:
        steps = [(position, old.get(group.name, {}).get(p)) for p, position in group.positions.items()]
        if steps and all(len(position) == 1 and then is not None for position, then in steps):
            moved = sum(position[0] - then[0] for position, then in steps if then is not None)
            found[group.name] = max(0.0, moved / (now.at - before.at))
    return found


def _as_json(state: BrokerState) -> dict[str, Any]:
    return {
        "groups": [{"group": g.name, "members": len(g.members), "lag": sum(g.lag.values())} for g in state.groups],
        "transactions": [
            {"transaction": t.transaction, "state": t.state, "owner": t.owner, "age": _age(t), "messages": t.messages}
            for t in state.transactions
        ],
        "parked": state.parked,
        "findings": [asdict(advice) for advice in state.findings],
        "missing": state.missing,
        "error": state.error,
    }


def _age(transaction: OpenTransaction) -> float | None:
    return None if transaction.since is None else round(max(0.0, time.time() - transaction.since / 1000), 1)


def _show_live(watch: Watch, every: float) -> None:
    from rich.live import Live

    console = _common.console()
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live, suppress(KeyboardInterrupt):
        while True:
            live.update(_screen(watch._bridge.url, watch.look()), refresh=True)
            time.sleep(every)


def _screen(url: str, state: BrokerState) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(f"{url}   {time.strftime('%H:%M:%S')}", style="bold")]
    if state.error:
        parts.append(Text(printable(state.error), style="bold red"))
    groups = sorted(state.groups, key=lambda group: -sum(group.lag.values()))
    parts += _table(
        "groups, by lag",
        ["group", "members", "lag", "a second"],
        [(g.name, len(g.members), sum(g.lag.values()), dash(state.rates.get(g.name), "{:.1f}")) for g in groups],
    )
    parts += _table(
        "open transactions, oldest first",
        ["transaction", "state", "age", "owner", "messages"],
        [(t.transaction, t.state, dash(_age(t), "{:.0f} s"), t.owner, dash(t.messages)) for t in state.transactions],
    )
    if state.parked:
        parts += _table("parked half messages", ["group", "parked"], list(state.parked.items()))
    findings = [(advice.level, advice.subject, advice.text) for advice in state.findings]
    parts += _table("findings of the doctor", ["", "what", "finding"], findings)
    if state.missing:
        parts.append(Text(f"\nthis broker does not list: {', '.join(state.missing)}", style="dim"))
    return Group(*parts)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    heading = Text(f"\n{title}: {len(rows)}", style="bold cyan")
    if not rows:
        return [heading]
    table = Table(*columns, box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows[:_MOST_ROWS]:
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    left = len(rows) - _MOST_ROWS
    return [heading, table, *([Text(f"and {left} more", style="dim")] if left > 0 else [])]
