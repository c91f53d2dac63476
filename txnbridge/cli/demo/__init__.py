"""The command `txnbridge demo`: a demonstration with real processes, which checks every statement that it makes."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING

import click

import txnbridge
from txnbridge import Bridge, InvalidOption, TxnBridgeError, plugins
from txnbridge._base.service_stop import signals_handled
from txnbridge.cli import _common
from txnbridge.cli._common import Cli, ExitCode

if TYPE_CHECKING:
    from rich.console import Console

    from txnbridge.cli.demo._actors import Shop
    from txnbridge.cli.demo._stage import Stage

_WIDTH = 100  # the largest width of the output in characters: longer lines are harder to read

_log = logging.getLogger("txnbridge")


@_common.command("demo", broker=False)
@click.argument("broker", required=False)
@click.option("--url", "own", help="Run the demo on this broker, on topics of its own, which are deleted at the end.")
@click.option("--keep", is_flag=True, help="Keep the demo's topics, to look at them with the other commands.")
def command(cli: Cli, broker: str | None, own: str | None, keep: bool) -> ExitCode:
    """Show what txnbridge promises: a short story with real processes.

    It plays on a temporary embedded broker; with BROKER (kafka, pulsar, rocketmq) on a real broker that is started for
    the story; with --url on your broker. Exit code 0 only if every promise was checked and kept.
    """
    from txnbridge.cli.demo._stage import Stage

    if broker is not None and (own is not None or keep):
        raise InvalidOption("a broker that is started for the demo ends with it: use --url for a running broker")
    with _ended_by_signals(), _opened(broker, own, keep) as url:
        stage = Stage(_console(cli.json), url)
        begin = time.monotonic()
        fault = _play(stage, clean=own is not None and not keep)
        seconds = time.monotonic() - begin
        if fault is None:
            stage.summary(seconds)
            stage.outlook(url if keep else None)
        else:
            stage.broken(fault)
    if cli.json:
        cli.document({"held": stage.held, "broken": fault, "seconds": round(seconds, 3), "url": url if keep else None})
    return ExitCode.OK if fault is None else ExitCode.FAILED


def _opened(broker: str | None, url: str | None, keep: bool) -> AbstractContextManager[str]:
    """Yield the URL of the broker for the demonstration; stop the broker afterwards if it was started for this."""
    if url is not None:
        return contextlib.nullcontext(url)
    if broker is None:
        return _embedded(keep)
    brokers = plugins.brokers()
    if broker not in brokers:
        known = ", ".join(sorted(brokers)) or "none: in a clone of txnbridge, pip install -e '.[conformance]'"
        raise InvalidOption(f"no broker {broker!r} can be started here; known: {known}")
    for backend in plugins.backends():
        if backend.name == broker:
            backend.check_installed()  # before a broker is started, which takes long
    return brokers[broker]()


@contextlib.contextmanager
def _embedded(keep: bool) -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="txnbridge-demo-")
    try:
        yield f"embedded:{folder}/demo.db"
    finally:
        if not keep:
            shutil.rmtree(folder)


def _console(json: bool) -> Console:
    """Return the console for the demonstration's text: stdout, or with --json stderr."""
    found = _common.console(stderr=json)
    columns = os.environ.get("COLUMNS", "")
    found.width = int(columns) if columns.isdecimal() and int(columns) else min(found.width, _WIDTH)
    return found


def _ended_by_signals() -> AbstractContextManager[None]:
    """Let SIGTERM and SIGHUP end the demonstration and its processes, as Ctrl-C does; ignore a second signal."""
    # A signal that is ignored, as under nohup, stays ignored.
    numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]

    def end(number: int, frame: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    return signals_handled(end, *numbers)


def _play(stage: Stage, clean: bool) -> str | None:
    """Run all scenes of the demonstration; return the text of the error that ended it early, or None."""
    from txnbridge.cli.demo._scenes import STORY

    stage.begin()
    try:
        with txnbridge.connect(stage.url) as bridge:
            for topic in stage.shop.topics:
                bridge.admin.create_topic(topic)
            try:
                for scene in STORY:
                    scene(stage, bridge)
            finally:
                stage.close()  # before topics are deleted: no process may write to the broker any more
                if clean:
                    _clean(stage.shop, bridge)
    except AssertionError as error:  # a check failed, or a process did not do its step
        return str(error)
    except Exception as error:  # an error in this process or in one of the demonstration's processes
        _log.debug("the story is broken", exc_info=True)
        return f"{type(error).__name__}: {error}"
    return None


def _clean(shop: Shop, bridge: Bridge) -> None:
    """Delete the demo's topics, also those that hold half messages on a broker that has none."""
    names = list(shop.topics)
    with suppress(TxnBridgeError):
        names += [topic.name for topic in bridge.admin.topics() if f".{shop.desk}." in topic.name]
    for name in names:
        try:
            bridge.admin.delete_topic(name)
        except TxnBridgeError as error:
            _log.warning("the demo's topic %s is left: %s", name, error)
