"""The command `txnbridge conformance`: runs the hunt against a broker, and judges histories."""

from __future__ import annotations

import gc
import json
import os
import random
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from txnbridge import Bridge, Capability, connect, plugins
from txnbridge.commands import json_and_debug
from txnbridge.errors import BackendMissing, InvalidOption, NotFound
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers import Broker
from txnbridge_conformance.run.faults import HookFaults
from txnbridge_conformance.run.hunt import hunt
from txnbridge_conformance.run.plan import (
    BY_DEFAULT,
    NEEDS,
    RAW_ROLES,
    SETTINGS,
    WORKLOADS,
    Plan,
    floor_of,
    without_secrets,
)
from txnbridge_conformance.run.raw import rocketmq as raw_rocketmq

if TYPE_CHECKING:
    from txnbridge_conformance.contract_run import ContractResult

_COULD_NOT_RUN = 3
EXIT_CODES = {
    0: "nothing is wrong, and enough was tried",
    1: "findings, with the calls that show them",
    2: "the call is wrong",
    _COULD_NOT_RUN: "the run failed, or a file is no history",
    4: "too thin: less was tried than the floor asks for",
}

_FAULTS = ("client", "network", "broker")
_BROKERS = frozenset({"kafka", "pulsar", "rocketmq"})
_SHORT_RUN_SECONDS = 300


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        """Run a command, and exit with code 3 after an error, unless the command line or the URL was wrong."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except (BackendMissing, InvalidOption):
            raise
        except Exception as error:
            failure = click.ClickException(f"{type(error).__name__}: {error}")
            failure.exit_code = _COULD_NOT_RUN  # type: ignore[misc]
            raise failure from error


command = _Group(
    "conformance",
    help="Attack a broker, and say which promises it keeps.",
    epilog="\b\nExit codes:\n" + "\n".join(f"  {code}  {sentence}" for code, sentence in EXIT_CODES.items()),
)


class _Seconds(click.ParamType[float]):
    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value)
        unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:], 0)
        try:
            seconds = float(text[:-1]) * unit if unit else float(text)
        except ValueError:
            seconds = 0.0
        if not 1 <= seconds <= 7 * 24 * 3600:
            self.fail(f"{text!r} is no time from 1 second to a week, such as 60, 90s, 30m or 2h", param, ctx)
        return seconds


def _floor(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> dict[str, int]:
    names, floor = floor_of(WORKLOADS), {}
    for text in given:
        name, _, number = text.partition("=")
        if name not in names or not number.isdecimal():
            raise click.BadParameter(f"{text!r} is not NAME=NUMBER with one of {', '.join(names)}")
        floor[name] = int(number)
    return floor


def _registered(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    try:
        Plan("", "", 0, 0, "", plugins=given).register_plugins()
    except Exception as error:
        raise click.BadParameter(f"{', '.join(given)} cannot be imported: {type(error).__name__}: {error}") from error
    return given


_PLUGIN = click.option(
    "--plugin", "modules", multiple=True, callback=_registered, metavar="MODULE", help="It adds the backend."
)


def _allowed(ctx: click.Context, param: click.Parameter, given: str | None) -> frozenset[str]:
    if given is None:
        return frozenset()
    from txnbridge_conformance.checker import MEANINGS  # numpy would double the time of every other command

    names = frozenset(line.partition("#")[0].strip() for line in Path(given).read_text().splitlines()) - {""}
    if unknown := names - MEANINGS.keys() - {"every broker", *(each.value for each in Capability)}:
        raise click.BadParameter(f"there is no finding and no capability {', '.join(sorted(unknown))}")
    return names


def _judging(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that are arguments of `_judge`."""
    file, known = click.Path(dir_okay=False), click.Path(exists=True, dir_okay=False)
    for option in (
        click.option("--floor", multiple=True, callback=_floor, metavar="NAME=NUMBER", help="Least number of a count."),
        click.option("--allow", "allowed", type=known, callback=_allowed, help="Known findings, one a line."),
        click.option("--junit", type=file, help="Write the verdicts as JUnit's XML, too."),
        json_and_debug,
    ):
        function = option(function)
    return function


def _names(ctx: click.Context, param: click.Parameter, given: str | None) -> tuple[str, ...]:
    known = WORKLOADS if param.name == "workloads" else _FAULTS
    names = () if given is None else tuple(given.split(","))
    if not set(names) <= set(known):
        raise click.BadParameter(f"{given!r} is not a list of {', '.join(known)}")
    return names


def _targets(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> list[tuple[str, str]]:
    pairs = [text.partition(":") for text in given]
    if not all(kind and target for kind, _, target in pairs):
        raise click.BadParameter("a target is KIND:TARGET, such as kill:node1")
    return [(kind, target) for kind, _, target in pairs]


@command.command("run")
@click.argument("url")
@click.option("--time", "seconds", type=_Seconds(), default="60", show_default=True, help="How long processes work.")
@click.option("--seed", type=int, help="Choose the same faults and transactions as a run with this seed.")
@click.option("--out", type=click.Path(file_okay=False), help="Keep histories and report in this new folder.")
@click.option(
    "--faults", callback=_names, metavar="KINDS", help="A list of client, network, broker; else all possible."
)
@click.option("--workload", "workloads", callback=_names, metavar="NAMES", help=f"A list of {', '.join(WORKLOADS)}.")
@click.option("--second", default="", metavar="URL", help="The other broker of `spanning`, instead of a file.")
@click.option("--version", help="The version of the broker that the run starts; at a URL only for the report.")
@click.option("--through", type=click.Choice(["bridge", "raw"]), help="With raw, use the broker's plain client.")
@click.option("--contract", is_flag=True, help="Run the contract suite first; it takes a minute or more.")
@click.option("--hook", metavar="COMMAND", help="Calls COMMAND inject KIND TARGET, and later COMMAND heal KIND TARGET.")
@click.option("--target", "targets", multiple=True, callback=_targets, metavar="KIND:TARGET", help="For the hook.")
@_PLUGIN
@click.option("--grpc", default="", metavar="HOST:PORT", help="RocketMQ's proxy, by which its official client reads.")
@_judging
def run(
    url: str,
    seconds: float,
    seed: int | None,
    out: str | None,
    faults: tuple[str, ...],
    workloads: tuple[str, ...],
    second: str,
    version: str | None,
    through: str | None,
    contract: bool,
    hook: str | None,
    targets: list[tuple[str, str]],
    modules: tuple[str, ...],
    grpc: str,
    **judging: Any,
) -> None:
    """Run transactions on a broker from many processes, inject faults, and judge the result.

    URL names the broker. With kafka, pulsar or rocketmq instead, the run starts a broker of its own, which it kills and
    cuts off, too; at a URL it attacks only its own processes. Everything that a run creates at the broker has a name of
    its own, and is deleted at the end.
    """
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    name = secrets.token_hex(3)
    folder = Path(out or f"conformance-{name}")
    if folder.exists():
        raise click.BadParameter(f"{folder} exists already; name a new folder", param_hint="--out")
    starts = url in _BROKERS
    if not starts and {*faults} - {"client"}:
        text = "network and broker faults need a broker that the run starts"
        raise click.BadParameter(f"{text}: {', '.join(sorted(_BROKERS))}")
    if second and "spanning" not in workloads:
        raise click.BadParameter("it is for --workload spanning", param_hint="--second")
    if (hook is None) is bool(targets):
        raise click.BadParameter("a hook needs a target, and a target a hook", param_hint="--hook")
    raw = through == "raw"
    if raw:
        _check_raw(urlsplit(url).scheme or url, starts or bool(grpc))
    kinds = faults or (_FAULTS if starts else ("client",))
    workloads = workloads or BY_DEFAULT
    click.echo(f"run {name}, seed {seed}, histories in {folder}", err=True)
    kept: list[ContractResult] = []
    with _started(url, raw, seconds, {"version": version} if version else {}) if starts else nullcontext() as broker:
        address = broker.url + (f"?admin_url={broker.admin_url}" if broker.admin_url else "") if broker else url
        grpc = broker.grpc_address() if isinstance(broker, brokers.RocketMQ) else grpc
        known = SETTINGS.get("embedded" if url.startswith("embedded:") else url, {})
        settings = {
            name: {option: value for option, value in options.items() if f"{option}=" not in url}
            for name, options in known.items()
        }
        others: dict[str, Any] = {"workloads": workloads, "raw": raw, "grpc": grpc, "second": second}
        plan = Plan(address, name, seed, seconds, str(folder), settings, modules, version=version or "", **others)
        if contract:
            from txnbridge_conformance.contract_run import run_contract  # pytest would slow down every other command

            kept = run_contract(address)
        hunt(plan, _progress(), broker, kinds, [HookFaults(hook, targets)] if hook else [])
    command = f"txnbridge conformance run {without_secrets(url)} --time {seconds:g} --seed {seed}"
    command += f" --faults {','.join(kinds)}"
    more = {"workload": ",".join(workloads) * (workloads != BY_DEFAULT), "second": without_secrets(second)}
    more |= {"version": version or "", "through": through or ""}
    command += "".join(f" --{name} {value}" for name, value in more.items() if value) + " --contract" * contract
    _judge([str(folder)], folder, command, kept, **judging)


def _check_raw(scheme: str, grpc: bool) -> None:
    """Raise `BadParameter` if processes cannot use this broker's plain client. `grpc`: a proxy's address is given."""
    if scheme not in RAW_ROLES:
        raise click.BadParameter(
            "it is for Kafka, Pulsar and RocketMQ, which have plain clients with transactions", param_hint="--through"
        )
    if scheme == "rocketmq" and not (grpc and find_spec("rocketmq")):
        text = "this needs --grpc, and `pip install rocketmq-python-client`"
        raise click.BadParameter(text, param_hint="--through")


def _started(name: str, raw: bool, seconds: float, options: dict[str, Any]) -> AbstractContextManager[Broker]:
    if name == "rocketmq" and raw:
        options |= {"settings": raw_rocketmq.DEFAULTS}
    elif name == "rocketmq" and seconds > _SHORT_RUN_SECONDS:
        # Each check copies every half that is open; once a second for half an hour is more than a broker keeps up with.
        options |= {"settings": {"transactionCheckInterval": "5000"}}
    broker: AbstractContextManager[Broker] = getattr(brokers, name)(**options)
    return broker


@command.command("check")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True))
@click.option("--out", type=click.Path(file_okay=False), help="Write the report into this folder, too.")
@_judging
def check_files(files: tuple[str, ...], out: str | None, **judging: Any) -> None:
    """Judge the histories in these files or folders, which any program may have recorded."""
    _judge(files, Path(out) if out else None, **judging)


@command.command("plan")
@click.argument("url")
@_PLUGIN
@json_and_debug
def plan(url: str, modules: tuple[str, ...], as_json: bool) -> None:
    """Say what a run on the broker at URL creates, needs and risks. This command connects, and changes nothing."""
    planned = Plan(url, "NAME", 0, 60, "FOLDER")
    with _look(url) as bridge:
        absent = [role for role, needed in NEEDS.items() if not bridge.capabilities[needed]]
        possible = bool(bridge.capabilities[Capability.TOPIC_ADMIN])
        roles = planned.roles(bridge.capabilities)
    document: dict[str, list[str]] = {
        "topics": planned.all_topics,
        "partitions": [f"{planned.partitions(topic)}" for topic in planned.all_topics],
        "groups": [*planned.groups(roles), *([planned.named("sellers")] if "sell" in roles else [])],
        "transactional ids": [planned.named("owner"), "made-up ones"],
        "processes on this machine": [f"{count} {role}" for role, count in roles.items()],
        "rights": ["create and delete these topics", "read and write them", "list and end their transactions"],
        "left at the end": ["groups, but no topics"],
        "risk": ["only processes of the run are killed; the broker gets some thousand small messages a minute"],
        "not tried": [f"{role} (the broker has no {NEEDS[role].value})" for role in absent],
        "not possible": [] if possible else ["the broker has no topic-admin, so that a run cannot create its topics"],
    }
    lines = [f"{name}: {', '.join(texts)}" for name, texts in document.items() if texts]
    click.echo(json.dumps(document) if as_json else "\n".join(lines))
    sys.exit(0 if possible else _COULD_NOT_RUN)


@contextmanager
def _look(url: str) -> Iterator[Bridge]:
    """Open a bridge that creates no topic and no broker's file; a temporary file replaces one that is missing."""
    scheme, _, rest = url.partition(":")
    with_file = [each.name for each in plugins.backends() if scheme in each.schemes and "create" in each.options]
    options: dict[str, Any] = {name: {"create": False} for name in with_file if "create=" not in rest}
    with TemporaryDirectory() as folder:
        try:
            bridge = connect(url, create_topics=0, **options)
        except NotFound:
            if not options:
                raise
            bridge = connect(f"{scheme}:{folder}/broker.db?{rest.partition('?')[2]}")
        with bridge:
            yield bridge


@command.command("compare")
@click.argument("folders", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False))
@json_and_debug
def compare(folders: tuple[str, ...], as_json: bool) -> None:
    """Show runs side by side, by the reports in their folders, and find what is worse than in the first run.

    Exit code 1: a run has findings that the first run does not have. 4: a run was too thin, and the first was not.
    """
    reports = [_report_in(folder) for folder in folders]
    columns = [_column(report) for report in reports]
    keys = sorted(dict.fromkeys(key for column in columns for key in column), key=lambda key: key[0])
    rows = [(key[1], *(column.get(key, "-") for column in columns)) for key in keys]
    if as_json:
        click.echo(json.dumps([{"what": what, "runs": values} for what, *values in rows]))
    else:
        for what, *values in [("", *folders), *rows]:
            click.echo(" ".join([f"{what:22}", *(f"{value:>16}" for value in values)]))
    (least, broken), *others = [
        (bool(report.get("missing", report["verdict"] == "thin")), _broken(report)) for report in reports
    ]
    if any(found - broken for _, found in others):
        sys.exit(1)
    sys.exit(4 if not least and any(thin for thin, _ in others) else 0)


def _column(report: dict[str, Any]) -> dict[tuple[int, str], str]:
    """Return the values that `compare` shows of a run's report, by the number of their section and their name."""
    promises = {promise["name"]: promise["verdict"] for promise in report["promises"]}
    times = {finding["name"]: finding["times"] for finding in report["findings"]}
    sections = [report.get("about", {}), {"verdict": report["verdict"]}, promises, times, report["counts"]]
    return {(at, name): str(value) for at, section in enumerate(sections) for name, value in section.items()}


def _broken(report: dict[str, Any]) -> set[str]:
    """Return the names of the findings and capabilities that break a promise by this report."""
    findings = {each["name"] for each in report["findings"] if each["breaks a promise"]}
    return findings | {each["name"] for each in report["contract"] if each["verdict"] == "broken"}


def _report_in(folder: str) -> dict[str, Any]:
    with suppress(OSError, ValueError, KeyError, TypeError):
        report = json.loads((Path(folder) / "report.json").read_text())
        if report["report"] == 1:
            return dict(report)
    raise click.BadParameter(f"{folder} holds no report.json of a run; make one with: txnbridge conformance run")


@command.command("contract")
@click.argument("url")
@_PLUGIN
@click.option("--only", default="", metavar="EXPRESSION", help="Only tests whose names match it, as for pytest -k.")
@json_and_debug
def contract(url: str, modules: tuple[str, ...], only: str, as_json: bool) -> None:
    """Run the contract suite on the broker at URL: one line a promise, and why a test of it failed.

    If the set-up of a test fails, such as the creation of its topic, its promise was not tried; exit code 3. The
    suite's topics, conformance-…, are deleted at the end. Its groups, and txnbridge's own topics for them, are left.
    """
    from txnbridge_conformance.contract_run import run_contract  # pytest would slow down every other command

    promises = run_contract(url, only)
    if as_json:
        click.echo(json.dumps([asdict(promise) for promise in promises]))
    else:
        for promise in promises:
            tests = "1 test" if promise.tests == 1 else f"{promise.tests} tests"
            click.echo(f"{promise.name:24} {promise.verdict:16} {tests}")
            for name in promise.failed:
                click.echo(f"    failed: {name}")
    verdicts = {promise.verdict for promise in promises}
    sys.exit(1 if "broken" in verdicts else _COULD_NOT_RUN if "set-up failed" in verdicts else 0)


def _judge(
    paths: Any,
    folder: Path | None,
    command: str = "",
    contract: Sequence[ContractResult] = (),
    *,
    floor: dict[str, int],
    allowed: frozenset[str],
    junit: str | None,
    as_json: bool,
) -> None:
    # Imported here, because numpy would double the time of every other command.
    from txnbridge_conformance.checker import check
    from txnbridge_conformance.history import read_history
    from txnbridge_conformance.report import Report
    from txnbridge_conformance.run.verdict import floor_for, judge

    gc.disable()  # a history is millions of objects without cycles, among which a collection finds nothing
    try:
        history = read_history(paths)
        findings = check(history)
    finally:
        gc.enable()
    judgement = judge(history, findings, {**floor_for(history), **floor})
    report = Report(history, findings, judgement, command, contract, allowed)
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.txt").write_text(report.text())
        (folder / "report.json").write_text(report.json())
        (folder / "report.html").write_text(report.html())
    if junit:
        Path(junit).write_text(report.junit())
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a") as file:
            file.write(report.markdown())
    click.echo(report.json() if as_json else report.text(), nl=False)
    sys.exit(report.exit_code)


def _progress() -> Callable[[str], None]:
    """Return a function that shows the progress on one line of a terminal. Without a terminal it shows nothing."""
    if not sys.stderr.isatty():
        return lambda text: None
    return lambda text: click.echo(f"\r\x1b[K{text}", nl=False, err=True)
