"""`txnbridge brokers`: real brokers for the shell, started and ended by hand."""

from __future__ import annotations

import functools
import json
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click

from txnbridge.errors import NotFound
from txnbridge_conformance.brokers import _detached, _kafka

# How many nodes of a URL answer, for each broker that can be started.
_ANSWERING: dict[str, Callable[[str], int]] = {"kafka": _kafka.answering}
_NAMES = click.Choice(sorted(_ANSWERING))

command = click.Group("brokers", help="Start real brokers for tests and trials, and end them.")


def _set(name: str) -> Callable[[click.Context, click.Parameter, bool], bool]:
    """Options that all commands have: the command line looks for them where click keeps what belongs to a call."""

    def remember(ctx: click.Context, option: click.Parameter, value: bool) -> bool:
        ctx.meta[f"txnbridge.{name}"] = value
        if name == "debug" and value:
            logging.basicConfig(level=logging.DEBUG, format="%(asctime)s %(name)s %(levelname)s %(message)s")
        return value

    return remember


def _command(group: click.Group, name: str, text: str) -> Callable[[Callable[..., int | None]], None]:
    def decorate(function: Callable[..., int | None]) -> None:
        @functools.wraps(function)
        def run(**given: Any) -> None:
            click.get_current_context().exit(function(**given) or 0)

        as_json = click.option(
            "--json",
            "as_json",
            is_flag=True,
            is_eager=True,
            callback=_set("json"),
            help="JSON on stdout, for machines.",
        )
        debug = click.option(
            "--debug",
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_set("debug"),
            help="Show errors with their traceback.",
        )
        group.command(name, help=text)(as_json(debug(run)))

    return decorate


def _tell(as_json: bool, document: object, text: str) -> None:
    click.echo(json.dumps(document) if as_json else text)


def _running(name: str | None) -> list[_detached.Detached]:
    found = [_detached.find(each) for each in ([name] if name else sorted(_ANSWERING))]
    return [each for each in found if each]


# --- up: each broker has options of its own ---------------------------------------------------------------------------

up = click.Group("up", help="Start a broker and leave it running; prints its URL.")
command.add_command(up)


@_command(up, "kafka", "Start Apache Kafka. Needs Java, and Maven the first time.")
@click.option("--nodes", type=click.Choice([str(n) for n in _kafka.NODES]), default="1", show_default=True)
@click.option("--version", type=click.Choice(_kafka.VERSIONS), default=_kafka.VERSIONS[0], show_default=True)
@click.option("--transaction-version", type=click.Choice(["1", "2"]), help="Default: the version's newest.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Of the first node; the others follow. Default: a free one."
)
def up_kafka(as_json: bool, nodes: str, version: str, transaction_version: str | None, port: int | None) -> None:
    asked: dict[str, Any] = {
        "nodes": int(nodes),
        "version": version,
        "transaction_version": int(transaction_version) if transaction_version else None,
        "port": port,
    }
    _kafka.check(asked["nodes"], version, asked["transaction_version"])
    _kafka.fetch_kafka(version, bar=not as_json)
    broker, started = _detached.up("kafka", asked, lambda folder: _kafka.KafkaProcess(folder=folder, **asked))
    _tell(as_json, {**asdict(broker), "started": started}, broker.url)


# --- the same for all -------------------------------------------------------------------------------------------------


@_command(command, "down", "End a broker, or all that run, and remove its data.")
@click.argument("broker", type=_NAMES, required=False)
def down(as_json: bool, broker: str | None) -> None:
    ended = [name for name in ([broker] if broker else sorted(_ANSWERING)) if _detached.down(name)]
    _tell(as_json, ended, f"ended {', '.join(ended)}" if ended else "none was running")


@_command(command, "status", "Say which brokers run and answer. Fails if the one that is named does not.")
@click.argument("broker", type=_NAMES, required=False)
def status(as_json: bool, broker: str | None) -> int:
    running = [(each, _ANSWERING[each.broker](each.url)) for each in _running(broker)]
    documents = [{**asdict(each), "answering": answering} for each, answering in running]
    lines = [f"{r.broker} {r.version} at {r.url}: {n} of {r.nodes} nodes answer" for r, n in running]
    _tell(as_json, documents, "\n".join(lines) or "none is running")
    return 1 if broker and not any(answering for _, answering in running) else 0


@_command(command, "logs", "Show the end of a broker's log.")
@click.argument("broker", type=_NAMES)
@click.option("--node", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--lines", type=click.IntRange(min=1), default=100, show_default=True)
def logs(as_json: bool, broker: str, node: int, lines: int) -> None:
    running = _running(broker)
    if not running:
        raise NotFound(f"{broker} is not running; start it with `txnbridge brokers up {broker}`")
    if node > running[0].nodes:
        raise NotFound(f"{broker} has no node {node}; it has {running[0].nodes}")
    file = running[0].log(node)
    with open(file, errors="replace") as text:
        end = [line.rstrip("\n") for line in deque(text, lines)]
    _tell(as_json, {"broker": broker, "node": node, "file": str(file), "lines": end}, "\n".join(end))
