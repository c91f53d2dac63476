"""The command `txnbridge send`, which sends messages in one transaction."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from txnbridge.cli import _common
from txnbridge.cli._common import Cli


def _headers(ctx: click.Context, option: click.Parameter, given: tuple[str, ...]) -> list[tuple[str, str]]:
    pairs = [text.partition("=") for text in given]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise click.BadParameter("a header is given as name=value")
    return [(name, value) for name, _, value in pairs]


@_common.command("send")
@click.argument("topic")
@click.argument("value", required=False)
@click.option("--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The value: this file.")
@click.option("--key", help="The key of each message.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", callback=_headers, help="Repeatable.")
@click.option("--partition", type=click.IntRange(min=0), help="Default: by key.")
def command(
    cli: Cli,
    topic: str,
    value: str | None,
    file: Path | None,
    key: str | None,
    headers: list[tuple[str, str]],
    partition: int | None,
) -> None:
    """Send VALUE, a file, or each line of standard input to TOPIC: all of it in one transaction.

    Any error aborts the transaction: then nothing was sent.
    """
    if value is not None and file is not None:
        raise click.UsageError("give a value or --file, not both")
    bodies = _bodies(cli, value, file)
    count = 0
    with cli.connect() as bridge:
        with bridge.transaction() as txn:
            for body in bodies:
                txn.send(topic, body, key=key, headers=headers or None, partition=partition)
                count += 1
    document = {"outcome": "committed", "transaction": txn.id, "topic": topic, "messages": count}
    cli.answer(document, f"committed: {count} {'message' if count == 1 else 'messages'} to {topic}")


def _bodies(cli: Cli, value: str | None, file: Path | None) -> Iterable[bytes]:
    if value is not None:
        # The argument's original bytes: bytes that are not UTF-8 are surrogate escapes in the text.
        return [value.encode("utf-8", "surrogateescape")]
    if file is not None:
        return [file.read_bytes()]
    if sys.stdin.isatty():
        click.echo("One message a line; Ctrl-D sends them all, Ctrl-C none.", err=True)
        return list(_lines())  # read all before the transaction begins, because typing may exceed its deadline
    return _piped(cli)


def _piped(cli: Cli) -> Iterator[bytes]:
    with cli.progress("sending") as advance:
        for line in _lines():
            yield line
            advance(1)


def _lines() -> Iterator[bytes]:
    return (line.removesuffix(b"\n") for line in sys.stdin.buffer)
