"""The command `txnbridge read`, which shows a topic's committed messages."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import click

import txnbridge
from txnbridge.cli import _common
from txnbridge.cli._common import Cli, ExitCode, printable
from txnbridge.spi import Deadline

# In a group a member cannot know the end of its messages: after a second without one, once it has partitions, it stops.
_GROUP_WAIT = 1.0
# Without a group the lag shows the end, so this is only the time between two requests for the lag.
_WAIT = 0.05
_BATCH = 500


def place(ctx: click.Context, option: click.Parameter, given: str) -> str | int:
    """Parse the option for where to start reading: earliest, latest or a time."""
    if given in ("earliest", "latest"):
        return given
    if given.isdecimal() and len(given) < 20:
        return int(given)
    raise click.BadParameter("it is earliest, latest or milliseconds since 1970")


@_common.command("read")
@click.argument("topic")
@click.option("--limit", type=click.IntRange(min=1), help="Stop after this many messages.")
@click.option("--follow", is_flag=True, help="Wait for more instead of stopping at the end.")
@click.option("--start", default="earliest", callback=place, help="earliest, latest or milliseconds since 1970.")
@click.option("--group", help="Read as a member of this group. The group's position changes only with --ack.")
@click.option("--ack", is_flag=True, help="Acknowledge the shown messages for the group.")
def command(
    cli: Cli, topic: str, limit: int | None, follow: bool, start: str | int, group: str | None, ack: bool
) -> ExitCode:
    """Show the committed messages of TOPIC. With --json each is one line of JSON.

    Text is shown as text, anything else in base64. A value of `null` in JSON is a tombstone.
    """
    if ack and group is None:
        raise click.UsageError("--ack needs --group: without a group nothing is acknowledged")
    with cli.look() as bridge, bridge.consumer(topic, group, start=start) as consumer:
        for batch in _batches(consumer, limit, follow, None if group is None else Deadline(cli.timeout)):
            for message in batch:
                if cli.json:
                    cli.document(as_json(message))
                else:
                    cli.say(as_line(message))
            if ack:
                with bridge.transaction() as txn:
                    txn.ack(batch)
    return ExitCode.OK


def _batches(
    consumer: txnbridge.Consumer, limit: int | None, follow: bool, joined: Deadline | None
) -> Iterator[txnbridge.Batch]:
    """Yield batches of up to `limit` messages altogether; without `follow` only messages readable now.

    A group must have assigned partitions to the consumer by the deadline `joined`.
    """
    left = limit
    while left is None or left > 0:
        batch = consumer.poll(min(_BATCH, left or _BATCH), timeout=_WAIT if joined is None else _GROUP_WAIT)
        if batch:
            yield batch
            left = None if left is None else left - len(batch)
        elif not follow and _is_at_end(consumer, joined):
            return


def _is_at_end(consumer: txnbridge.Consumer, joined: Deadline | None) -> bool:
    return not any(consumer.lag().values()) if joined is None else bool(consumer.assignment) or joined.expired


def as_json(message: txnbridge.Message) -> dict[str, Any]:
    """Return a message as JSON values. Bytes that are not text are in base64, under a name that ends accordingly."""
    return {
        "topic": message.topic,
        "partition": message.partition,
        "position": list(message.position),
        **_json_bytes("key", message.key),
        **_json_bytes("value", message.value),
        "headers": [{"name": name, **_json_bytes("value", value)} for name, value in message.headers.raw],
        "timestamp": message.timestamp,
        "deliveries": message.deliveries,
    }


def _json_bytes(name: str, data: bytes | None) -> dict[str, str | None]:
    try:
        return {name: None if data is None else data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data or b"").decode()}


def as_line(message: txnbridge.Message) -> str:
    """Return a message as one line of text, with control characters escaped."""
    place = f"{message.topic}[{message.partition}] {':'.join(map(str, message.position))}"
    key = [] if message.key is None else [f"key={_readable(message.key)}"]
    headers = [
        printable(name) + ("" if value is None else f"={_readable(value)}") for name, value in message.headers.raw
    ]
    value = "(no value)" if message.value is None else _readable(message.value)
    return " | ".join([place, *([" ".join(key + headers)] if key or headers else []), value])


def _readable(data: bytes) -> str:
    try:
        return printable(data.decode())
    except UnicodeDecodeError:
        return f"base64:{base64.b64encode(data).decode()}"
