"""The command `txnbridge copy`, which copies topics from one broker to another, each message exactly once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import click

import txnbridge
import txnbridge.metrics
from txnbridge._half.span import sweep_of
from txnbridge._half.span_sweep import Part, digest
from txnbridge.cli import _common
from txnbridge.cli._common import Cli
from txnbridge.cli._object_loading import telling

_SECONDS_BETWEEN_LINES = 10.0
_ATTEMPTS = 3  # at a message that the target refuses; a broker that is away does not count


@_common.command("copy")
@click.argument("target", metavar="TARGET-URL")
@click.option(
    "--topics", metavar="PATTERN", multiple=True, required=True, help="Topics, such as 'orders*'; repeatable."
)
@click.option(
    "--group", default="txnbridge-copy", show_default=True, help="The group whose positions say what is copied."
)
@click.option("--until-idle", is_flag=True, help="End when everything is copied.")
@click.option("--batch", type=click.IntRange(1), default=5000, show_default=True, help="Messages in one transaction.")
@click.option("--rate", metavar="N", type=click.IntRange(1), help="Copy at most N messages a second.")
@click.option("--dead-letter", metavar="TOPIC", help="A topic of --url for messages that the target refuses.")
@click.option("--metrics-port", metavar="PORT", type=click.IntRange(1, 65535), help="Answer Prometheus at /metrics.")
def command(
    cli: Cli,
    target: str,
    topics: Sequence[str],
    group: str,
    until_idle: bool,
    batch: int,
    rate: int | None,
    dead_letter: str | None,
    metrics_port: int | None,
) -> int | None:
    """Copy topics from the broker of --url to the broker of TARGET-URL, each message exactly once.

    Keys, values, headers, timestamps, tombstones and partitions stay as they are, and so does the order in a partition;
    a message with no time above 0 gets the present one. Missing topics are created with as many partitions. Where the
    target has another number, a message's key chooses the partition. Several copies with one --group share the work and
    take over from each other; one that was killed goes on where it stood. Do not copy in a circle.
    """
    application = f"copy-{group}"
    if metrics_port is not None:
        txnbridge.metrics.serve(metrics_port)
    with (
        telling(),
        cli.connect(application=application, create_topics=0) as source,
        cli.connect(target, application=application, create_topics=0) as other,
    ):
        if source.cluster == other.cluster:
            raise txnbridge.InvalidOption(f"a copy needs two brokers, and {target} is the same as {source.url}")
        alike = _made_ready(cli, source, other, topics)
        patterns = [each for each in topics if "*" in each]  # of a processor: their topics may come and go
        fixed = [name for name in alike if not any(fnmatchcase(name, pattern) for pattern in patterns)]
        next_at = 0.0

        def move(messages: txnbridge.Batch, txn: txnbridge.Transaction) -> None:
            nonlocal next_at
            if rate is not None:
                time.sleep(max(0.0, next_at - time.monotonic()))
                next_at = time.monotonic() + len(messages) / rate
            for message in messages:
                if message.topic not in alike:  # it has come later
                    alike.update(_made_ready(cli, source, other, [message.topic]))
                txn.send(
                    message.topic,
                    message.value,
                    key=message.key,
                    headers=message.headers.items_all() or None,  # without headers it is sent the quick way
                    partition=message.partition if message.partition < alike[message.topic] else None,
                    timestamp=message.timestamp if 0 < message.timestamp < 1 << 63 else None,
                )

        batch = batch if rate is None else min(batch, max(1, rate // 2))  # a stop waits half a second
        settings: dict[str, Any] = {"max_messages": batch, "max_attempts": _ATTEMPTS, "dead_letter": dead_letter}
        processor = source.processor([*patterns, *fixed], group=group, batch=move, to=other, **settings)
        processor._input_topics.with_retry_topics = True
        if until_idle:
            processor._is_over = _Looks(source, other)
        with _told(cli, processor):
            try:
                processor.run(until_idle)
            except txnbridge.Poison as error:
                text = f"{error}. For a copy: name a --dead-letter TOPIC, or let the target take the message"
                raise txnbridge.DeliveryFailed(text) from error
        copied = processor.stats.messages - processor.stats.dead_letters
    cli.answer({"copied": copied}, f"copied: {copied} messages")
    return _common.idle_code([processor]) if until_idle else None


def _made_ready(
    cli: Cli, source: txnbridge.Bridge, target: txnbridge.Bridge, patterns: Sequence[str]
) -> dict[str, int]:
    """Create missing topics; return the partitions of each topic to copy, 0 if it has another number on the target."""
    there = {topic.name: topic.partitions for topic in target.admin.topics()}
    chosen = [t for t in source.admin.topics() if any(fnmatchcase(t.name, pattern) for pattern in patterns)]
    if not chosen:
        text = f"no topic of {source.url} fits {', '.join(patterns)}; `txnbridge topics list` shows all"
        raise txnbridge.NotFound(text)
    for topic in chosen:
        if topic.name not in there:
            target.admin.create_topic(topic.name, topic.partitions)
        elif there[topic.name] != topic.partitions:
            text = f"{topic.name}: {topic.partitions} partitions become {there[topic.name]}, chosen by key"
            click.echo(text, err=True)
    return {t.name: t.partitions if there.get(t.name, t.partitions) == t.partitions else 0 for t in chosen}


class _Looks:
    """Ends a copy when two passes in a row found all read, and looks behind them no transaction of another copy.

    Some brokers' lag omits the messages of such a transaction, alive or dead, and their readers wait. It may be aborted
    between a pass and its look. Of an open part whose name the broker does not know nobody can tell whose it is: only
    those of the first look are waited for.
    """

    def __init__(self, *bridges: txnbridge.Bridge) -> None:
        self._bridges = bridges
        self._ours = f"-{digest(bridges[0]._connection.identity.application)}"
        self._left: list[Part] | None = None
        self._quiet = False
        for bridge in bridges:
            if not (listing := bridge.capabilities[txnbridge.Capability.LIST_OPEN]):
                click.echo(f"{bridge.url} lists no open transactions of other copies: {listing.note}", err=True)

    def __call__(self, idle: bool) -> bool:
        before, self._quiet = self._quiet, False  # also if the brokers do not answer
        self._quiet = idle and not self._look()
        return before and self._quiet

    def _look(self) -> list[Part]:
        before, parts = self._left, sweep_of(self._bridges).parts()
        self._left = [p for p in parts if (self._ours in p.key if p.place >= 0 else before is None or p in before)]
        if self._left and not before:
            click.echo(f"waiting for the end of another copy's transactions: {len(self._left)}", err=True)
        return self._left


@contextmanager
def _told(cli: Cli, processor: txnbridge.Processor) -> Iterator[None]:
    """Tell on stderr every ten seconds, during the block, how far the copy is."""
    ended = threading.Event()

    def tell() -> None:
        copied = 0
        while not ended.wait(_SECONDS_BETWEEN_LINES):
            before, copied = copied, processor.stats.messages - processor.stats.dead_letters
            rate = (copied - before) / _SECONDS_BETWEEN_LINES
            click.echo(f"copied: {copied} messages, {rate:.0f} a second; left: {processor.lag}", err=True)

    teller = threading.Thread(target=tell, daemon=True)
    if not cli.json:
        teller.start()
    try:
        yield
    finally:
        ended.set()
