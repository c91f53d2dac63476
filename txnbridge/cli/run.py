"""The command `txnbridge run`, which runs a processor in its process, and an application in processes of its own."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

import click
from click.core import ParameterSource

from txnbridge import App, NotFound, Poison, Processor, TxnBridgeError
from txnbridge._process.processor import ProcessorStats
from txnbridge.cli import _common
from txnbridge.cli._common import Cli, ExitCode, report
from txnbridge.cli._object_loading import load, telling
from txnbridge.commands import asked_for


@_common.command("run")
@click.argument("target", metavar="MODULE:NAME")
@click.option("--until-idle", is_flag=True, help="End when all input is processed.")
@click.option("--workers", metavar="N", type=click.IntRange(1), help="The number of processes of an App. Default: 1.")
@click.option("--reload", is_flag=True, help="Restart an App when a Python file below this folder changes.")
@click.option(
    "--health-port",
    metavar="PORT",
    type=click.IntRange(0, 65535),
    help="Answer /healthz, /readyz and /metrics for an App over HTTP.",
)
@click.option("--health-host", metavar="HOST", help="Answer at this address only. Default: all IPv4 addresses.")
@click.option("--worker", hidden=True, help="For `WorkerProcess`.")
def command(
    cli: Cli,
    target: str,
    until_idle: bool,
    workers: int | None,
    reload: bool,
    health_port: int | None,
    health_host: str | None,
    worker: str | None,
) -> int | None:
    """Run the App or the processor NAME of MODULE, found from the current folder.

    NAME is an `App`, a `Processor`, or a function that is given a bridge to --url and returns a processor. An App runs
    in processes of its own, and one that dies is started again; its own URL counts, if --url is not given here.

    SIGTERM and Ctrl-C stop all after the running transactions, a second signal at once. Progress and errors are logged
    to standard error. The exit code of an App: 0 it was stopped, 1 a function failed for good, 3 it could not start.
    """
    process = None
    if worker is not None:
        from txnbridge.cli._worker import WorkerProcess

        process = WorkerProcess(worker)
    what = "neither an App nor a Processor nor a function that makes one"
    found = load(target, lambda found: isinstance(found, App | Processor) or callable(found), what)
    supervised = workers is not None or reload or health_port is not None
    if supervised and (until_idle or not isinstance(found, App)):
        raise click.UsageError("--workers, --reload and --health-port are for an App, and not with --until-idle")
    if health_host is not None and health_port is None:
        raise click.UsageError("--health-host is for --health-port")
    with telling("" if process is None else process.log_prefix):
        try:
            if not isinstance(found, App):
                return _run_processor(cli, target, found, until_idle)
            given = {name: _given(name) for name in ("url", "timeout")}
            found._connect_options |= {name: value for name, value in given.items() if value is not None}
            if process is not None:
                return process.run(found)
            if until_idle:
                return _run_until_idle(cli, found)
            return _supervise(target, found, workers or 1, reload, health_host or "0.0.0.0", health_port)
        except SystemExit as error:  # its code 0 would say that all is processed, or that it was stopped
            raise SystemExit(error.code or "txnbridge: a function has called sys.exit()") from None


def _given(option: str) -> Any:
    """Return an option's value if it is on the command line; None if it is a default or from the environment."""
    ctx = click.get_current_context()
    return ctx.params[option] if ctx.get_parameter_source(option) is ParameterSource.COMMANDLINE else None


def _run_until_idle(cli: Cli, app: App) -> int | None:
    try:
        app.run(until_idle=True)
    except NotFound as error:
        report(click.get_current_context(), error)
        return ExitCode.UNAVAILABLE
    except Poison as error:
        raise TxnBridgeError(str(error)) from error
    finally:
        lines = [f"{name}: {_summary(stats)}" for name, stats in app.stats.items()]
        cli.answer({name: stats._asdict() for name, stats in app.stats.items()}, *lines)
    return _common.idle_code(app._processors)


def _supervise(target: str, app: App, workers: int, reload: bool, health_host: str, health_port: int | None) -> int:
    from txnbridge.cli._health import serving
    from txnbridge.cli._supervisor import WorkerSupervisor

    if workers > 1 and app._connect_options.get("transactional_id") is not None:
        raise click.UsageError("workers with one transactional_id would fence each other; an App needs none")
    ctx = click.get_current_context()
    command = [sys.executable, "-m", "txnbridge.cli", "run", target]
    command += [f"--{name}={value}" for name in ("url", "timeout") if (value := _given(name)) is not None]
    command += ["--json"] * asked_for(ctx, "json") + ["--debug"] * asked_for(ctx, "debug")
    measure = health_port is not None
    supervisor = WorkerSupervisor([*command, "--worker"], workers, app.stop_timeout, reload, measure)
    pages = {"/healthz": supervisor.alive, "/readyz": supervisor.ready, "/metrics": supervisor.metrics}
    with ExitStack() as stack:
        if health_port is not None:
            try:
                port = stack.enter_context(serving(health_host, health_port, pages))
            except OSError as error:  # another program has the port, or the host is of another machine
                where = f"--health-port {health_port} on {health_host or 'all addresses'}"
                report(ctx, OSError(error.errno, error.strerror, where))
                return ExitCode.UNAVAILABLE
            except UnicodeError:
                raise click.UsageError("--health-host is no name of a host") from None
            click.echo(f"health checks on port {port}", err=True)
        return supervisor.run()


def _run_processor(cli: Cli, target: str, found: Any, until_idle: bool) -> int | None:
    with ExitStack() as stack:
        if not isinstance(found, Processor):
            found = found(stack.enter_context(cli.connect()))
        if not isinstance(found, Processor):
            raise click.UsageError(f"{target} returned {type(found).__name__}; it must return a Processor")
        try:
            found.run(until_idle)
        except Poison as error:
            raise TxnBridgeError(str(error)) from error
        finally:
            cli.answer(found.stats._asdict(), _summary(found.stats))
    return _common.idle_code([found]) if until_idle else None


def _summary(stats: ProcessorStats) -> str:
    text = f"{stats.messages} messages in {stats.transactions} transactions, {stats.dead_letters} dead letters"
    return f"{text}, {stats.retries} retries" + f", {stats.delayed} sent to retry topics" * bool(stats.delayed)
