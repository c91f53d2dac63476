"""The command `txnbridge brokers`, which starts and ends real brokers from the shell."""

from __future__ import annotations

import functools
import json
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click

from txnbridge.commands import json_and_debug
from txnbridge.errors import NotFound
from txnbridge_conformance.brokers import _detached, _kafka, _pulsar, _rocketmq

# By broker, the function that counts how many nodes of the cluster at a URL answer.
_ANSWERING: dict[str, Callable[[str], int]] = {
    "kafka": _kafka.answering,
    "pulsar": _pulsar.answering,
    "rocketmq": _rocketmq.answering,
}
_ALL = "all"
_NAMES = click.Choice([*sorted(_ANSWERING), _ALL])
_PORT = click.IntRange(1, 65535)

# A running broker, and whether this command started it.
_Started = tuple[_detached.DetachedBroker, bool]

command = click.Group("brokers", help="Start real brokers for tests and trials, and end them.")


def _command(group: click.Group, name: str, text: str) -> Callable[[Callable[..., int | None]], None]:
    def decorate(function: Callable[..., int | None]) -> None:
        @functools.wraps(function)
        def run(**given: Any) -> None:
            click.get_current_context().exit(function(**given) or 0)

        group.command(name, help=text)(json_and_debug(run))

    return decorate


def _print(as_json: bool, document: object, text: str) -> None:
    click.echo(json.dumps(document) if as_json else text)


def _broker_names(broker: str | None) -> list[str]:
    return sorted(_ANSWERING) if broker in (None, _ALL) else [str(broker)]


def _running(broker: str | None) -> list[_detached.DetachedBroker]:
    return [found for name in _broker_names(broker) if (found := _detached.find(name))]


# --- up: each broker has options of its own ---------------------------------------------------------------------------

up = click.Group("up", help="Start a broker and leave it running; prints its URL.")
command.add_command(up)


@_command(up, "kafka", "Start Apache Kafka. Needs Java, and Maven the first time.")
@click.option("--nodes", type=click.Choice([str(n) for n in _kafka.NODES]), default="1", show_default=True)
@click.option("--version", type=click.Choice(_kafka.VERSIONS), default=_kafka.VERSIONS[0], show_default=True)
@click.option("--transaction-version", type=click.Choice(["1", "2"]), help="Default: the version's newest.")
@click.option("--port", type=_PORT, help="The first node's port; others use the next. Default: a free one.")
def up_kafka(as_json: bool, nodes: str, transaction_version: str | None, **options: Any) -> None:
    chosen = int(transaction_version) if transaction_version else None
    _print_started(as_json, _start_kafka(not as_json, nodes=int(nodes), transaction_version=chosen, **options))


@_command(up, "pulsar", "Start Apache Pulsar. Needs Java, and Maven the first time.")
@click.option("--nodes", type=click.Choice([str(n) for n in _pulsar.NODES]), default="1", show_default=True)
@click.option("--version", type=click.Choice(_pulsar.VERSIONS), default=_pulsar.VERSIONS[0], show_default=True)
@click.option("--store", type=click.Choice(_pulsar.STORES), default=_pulsar.STORES[0], show_default=True)
@click.option("--delete-unused", is_flag=True, help="Delete unused data and topics, as Pulsar does by default.")
@click.option("--port", type=_PORT, help="The first node's port; others use the next. Default: a free one.")
def up_pulsar(as_json: bool, nodes: str, **options: Any) -> None:
    _print_started(as_json, _start_pulsar(not as_json, nodes=int(nodes), **options))


@_command(up, "rocketmq", "Start Apache RocketMQ. Needs Java, and Maven the first time.")
@click.option("--nodes", type=click.Choice([str(n) for n in _rocketmq.NODES]), default="1", show_default=True)
@click.option("--version", type=click.Choice(_rocketmq.VERSIONS), default=_rocketmq.VERSIONS[0], show_default=True)
@click.option("--port", type=_PORT, help="The name server's port. Default: a free one.")
def up_rocketmq(as_json: bool, nodes: str, **options: Any) -> None:
    _print_started(as_json, _start_rocketmq(not as_json, nodes=int(nodes), **options))


@_command(up, _ALL, "Start Kafka, Pulsar and RocketMQ with default options; prints their URLs.")
def up_all(as_json: bool) -> None:
    started = [start(not as_json) for start in (_start_kafka, _start_pulsar, _start_rocketmq)]
    _print(as_json, [_document(each) for each in started], "\n".join(broker.url for broker, _ in started))


def _start_kafka(bar: bool, **options: Any) -> _Started:
    options = {"nodes": 1, "version": _kafka.VERSIONS[0], "transaction_version": None, "port": None, **options}
    _kafka.check(options["nodes"], options["version"], options["transaction_version"])
    _kafka.fetch_kafka(options["version"], bar)
    return _detached.up("kafka", options, lambda folder: _kafka.KafkaProcess(folder=folder, **options))


def _start_pulsar(bar: bool, **options: Any) -> _Started:
    kept = {"store": _pulsar.STORES[0], "delete_unused": False}
    options = {"nodes": 1, "version": _pulsar.VERSIONS[0], **kept, "port": None, **options}
    _pulsar.check(options["version"], options["store"], options["nodes"])
    _pulsar.fetch_pulsar(options["version"], bar)
    return _detached.up("pulsar", options, lambda folder: _pulsar.start(folder=folder, **options))


def _start_rocketmq(bar: bool, **options: Any) -> _Started:
    options = {"nodes": 1, "version": _rocketmq.VERSIONS[0], "port": None, **options}
    _rocketmq.fetch_rocketmq(options["version"], bar)
    return _detached.up("rocketmq", options, lambda folder: _rocketmq.RocketMQ(folder=folder, **options))


def _print_started(as_json: bool, started: _Started) -> None:
    _print(as_json, _document(started), started[0].url)


def _document(started: _Started) -> dict[str, Any]:
    broker, is_new = started
    return {**asdict(broker), "started": is_new}


# --- for all brokers --------------------------------------------------------------------------------------------------


@_command(command, "down", "End a broker, or all running brokers, and remove the data.")
@click.argument("broker", type=_NAMES, required=False)
def down(as_json: bool, broker: str | None) -> None:
    ended = [name for name in _broker_names(broker) if _detached.down(name)]
    _print(as_json, ended, f"ended {', '.join(ended)}" if ended else "no broker was running")


@_command(command, "status", "Show which brokers run and answer. Fails if the named broker does not.")
@click.argument("broker", type=_NAMES, required=False)
def status(as_json: bool, broker: str | None) -> int:
    running = [(each, _ANSWERING[each.broker](each.url)) for each in _running(broker)]
    documents = [{**asdict(each), "answering": answering} for each, answering in running]
    lines = [f"{r.broker} {r.version} at {r.url}: {n} of {r.nodes} nodes answer" for r, n in running]
    _print(as_json, documents, "\n".join(lines) or "no broker is running")
    all_answer = all(answering for _, answering in running) and len(running) == len(_broker_names(broker))
    return 1 if broker and not all_answer else 0


@_command(command, "logs", "Show the end of a broker's log, or of the logs of all running brokers.")
@click.argument("broker", type=_NAMES)
@click.option("--node", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--lines", type=click.IntRange(min=1), default=100, show_default=True)
def logs(as_json: bool, broker: str, node: int, lines: int) -> None:
    running = _running(broker)
    if not running:
        raise NotFound(f"{broker} is not running; start it with `txnbridge brokers up {broker}`")
    ends = [_end_of_log(each, node, lines) for each in running]
    if broker != _ALL:
        _print(as_json, ends[0], "\n".join(ends[0]["lines"]))
    else:
        _print(as_json, ends, "\n\n".join("\n".join([f"== {end['broker']}", *end["lines"]]) for end in ends))


def _end_of_log(broker: _detached.DetachedBroker, node: int, lines: int) -> dict[str, Any]:
    if node > broker.nodes:
        raise NotFound(f"{broker.broker} has no node {node}; it has {broker.nodes}")
    file = broker.log(node)
    with open(file, errors="replace") as text:
        end = [line.rstrip("\n") for line in deque(text, lines)]
    return {"broker": broker.broker, "node": node, "file": str(file), "lines": end}
