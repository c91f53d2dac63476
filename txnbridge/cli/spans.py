"""The commands `txnbridge spans`, which end what dead processes have left of spans, and list parts that wait."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import click

import txnbridge
from txnbridge._half.span import spans_over, sweep_of
from txnbridge.cli import _common
from txnbridge.cli._common import Cli, when
from txnbridge.cli._object_loading import telling

command: _common.Group = _common.Group("spans", help="End and list parts of transactions over several brokers.")

_others = click.argument("others", metavar="URL...", nargs=-1, required=True)
_application = click.option("--application", metavar="NAME", help="That of the programs, as in connect(application=…).")


@contextmanager
def _bridges(cli: Cli, others: Sequence[str], application: str | None) -> Iterator[list[txnbridge.Bridge]]:
    with ExitStack() as stack:
        urls = (cli.url, *others)
        yield [stack.enter_context(cli.look(url, application=application)) for url in urls]


@_common.command("run", command)
@_others
@_application
@click.option("--database", metavar="URL", envvar="TXNBRIDGE_DATABASE", help="That of spanning(db=…), for SQLAlchemy.")
def run(cli: Cli, others: Sequence[str], application: str | None, database: str | None) -> None:
    """End dead processes' transactions over the brokers of --url and URL... together, until SIGTERM or Ctrl-C.

    Every process that uses `spanning` does so too, while it runs. Several may run.
    """
    with telling(), _bridges(cli, others, application) as bridges:
        spans_over(bridges, least=1 if database else 2).open(database)
        sweep_of(bridges).run()


@_common.command("list", command)
@_others
@_application
def list_parts(cli: Cli, others: Sequence[str], application: str | None) -> None:
    """List open and prepared parts of transactions over the brokers of --url and URL..., the oldest first."""
    with _bridges(cli, others, application) as bridges:
        parts = sorted(sweep_of(bridges).parts(), key=lambda part: (part.until, part.key, part.place))
    rows = [(part.key, part.place, part.bridge.url, part.transaction, part.until) for part in parts]
    if cli.json:
        for part, row in zip(parts, rows, strict=True):
            told = dict(zip(("span", "place", "broker", "transaction", "decides_until"), row, strict=True))
            token = None if part.token is None else str(part.token)
            cli.document({**told, "expires_at": part.expires_at, "token": token})
        return
    expiries = ["" if part.expires_at is None else when(part.expires_at) for part in parts]
    columns = ["span", "place", "broker", "transaction", "decides until", "expires"]
    cli.table(columns, [(*row, when(until * 1000), at) for (*row, until), at in zip(rows, expiries, strict=True)])
    late = sum(part.until < time.time() for part in parts)
    cli.say(f"{len(parts)} parts, {late} of them of processes that can decide no more")
