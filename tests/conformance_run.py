"""A conformance run as a test: the hunt of `txnbridge conformance run`, on a broker of the tests."""

import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from txnbridge_conformance.brokers import Broker, RocketMQ
from txnbridge_conformance.checker import check
from txnbridge_conformance.history import read_history
from txnbridge_conformance.report import Report
from txnbridge_conformance.run.hunt import hunt
from txnbridge_conformance.run.plan import SETTINGS, Plan
from txnbridge_conformance.run.verdict import NAMES, Verdict, floor_for, judge

from tests import chaos

ALL_FAULTS = ("client", "network", "broker")


def assert_kept(
    broker: Broker | str,
    folder: Path,
    seconds: float = chaos.SECONDS,
    kinds: Collection[str] = ALL_FAULTS,
    floor: Mapping[str, int] | None = None,
    raw: bool = False,
    **settings: Any,
) -> None:
    """Run the hunt against a broker, or a URL; fail with the report unless all promises are kept.

    It fails also if less was tried than `floor` asks for, by default that of the run's workloads. A run of less than a
    minute needs no evidence of each promise, and if less was tried, the machine was busy: another run, four times as
    long, has to reach it. `settings` are those of `txnbridge.connect`. Faults of the kinds "network" and "broker" are
    only for a broker that no other test uses. With `raw` the broker's plain client does the work.
    """
    chaos.begin()
    url, started = (broker, None) if isinstance(broker, str) else (broker.url, broker)
    backend = url.partition(":")[0]
    settings = {**settings, backend: {**SETTINGS.get(backend, {}).get(backend, {}), **settings.get(backend, {})}}
    grpc = broker.grpc_address() if isinstance(broker, RocketMQ) else ""  # by which its official client reads
    for length in (seconds, 4 * seconds) if seconds < 60 else (seconds,):
        place = str(folder / f"run-{length:g}")
        plan = Plan(url, secrets.token_hex(3), chaos.SEED, length, place, settings, raw=raw, grpc=grpc)
        hunt(plan, lambda progress: None, started, kinds)
        history = read_history([plan.folder])
        least = floor
        if floor is None and seconds < 60:
            least = {name: count for name, count in floor_for(history).items() if name not in NAMES}
        judgement = judge(history, findings := check(history), least)
        report = Report(history, findings, judgement).text()
        chaos.say(report)
        if judgement.verdict is not Verdict.THIN:
            break
    assert judgement.verdict is Verdict.KEPT, report
