"""A conformance run finds each mutant of a backend under a right name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from txnbridge_conformance.brokers import RocketMQ

from tests.conformance import broken
from tests.conformance.broken import Broken, scheme_of
from tests.conformance.mutants import VARIABLE, Mutants
from tests.conformance.mutants.embedded import EMBEDDED as MUTANTS
from tests.conformance.mutants.kafka import KAFKA
from tests.conformance.mutants.pulsar import PULSAR
from tests.conformance.mutants.rocketmq import ROCKETMQ
from tests.conformance.mutants.services import SERVICES
from tests.conformance.mutants.shared import SHARED
from tests.conformance.mutants.spans import SPANS

ROOT = Path(__file__).parents[2]

# A run has a dozen processes, so that two at once would only slow each other down.
pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("conformance-runs")]

EMBEDDED_MUTANTS = MUTANTS.by_name | SPANS.by_name | SHARED.by_name | SERVICES.by_name
LIVE: dict[str, Mutants] = {"kafka": KAFKA, "pulsar": PULSAR, "rocketmq": ROCKETMQ}


def assert_found(
    expected: frozenset[str], seeds: tuple[int, ...], folder: Path, url: str, *more: str, **env: str
) -> None:
    """Run the hunt with one seed after the other until it finds one of the expected names."""
    found: dict[int, set[str]] = {}
    for seed in seeds:
        out = folder / str(seed)
        command = [sys.executable, "-m", "txnbridge.cli", "conformance", "run", url, "--out", str(out), *more]
        command += ["--seed", str(seed)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode in (0, 1, 4), done.stderr + done.stdout
        report = json.loads((out / "report.json").read_text())
        found[seed] = {finding["name"] for finding in report["findings"]}
        if found[seed] & expected:
            return
    pytest.fail(f"no run found one of {sorted(expected)}: {found}")


# Leases and check-backs shorter than the pauses of a run.
OPTIONS = "lease_seconds=1&half_check_seconds=0.5"

EMBEDDED: dict[type[Broken], set[str]] = {
    broken.AcknowledgesOutsideTheTransaction: {"half-ack"},
    broken.StoresTwice: {"duplicate"},
    broken.ShowsWhatIsAborted: {"G1a"},
    broken.SaysAbortedOfWhatIsCommitted: {"G1a"},
    broken.SaysCommittedTooEarly: {"unseen", "outcome-lie", "G0-realtime"},
    broken.ShowsWhatIsOpen: {"duplicate"},
    broken.LosesTheFirstMessage: {"unseen"},
    broken.KnowsNoDeadline: {"hang"},
    broken.Reorders: {"int-nonmonotonic-send"},
    broken.ShufflesForEachReader: {"int-nonmonotonic-poll"},
    broken.ChoosesThePartitionItself: {"wrong-partition"},
    broken.FencesNobody: {"zombie-write"},
    broken.LetsZombiesWrite: {"zombie-write"},
    broken.LetsZombiesPrepare: {"zombie-write"},
    broken.LetsZombiesTakeTheIdBack: {"zombie-write"},
    broken.AbortsWhatIsPreparedWhenItOpens: {"lost-prepare"},
    broken.AbortsWhatIsPreparedWhenItCloses: {"lost-prepare"},
    broken.KeepsWhatIsPreparedInItsProcess: {"lost-prepare"},
    broken.ForgetsOlderPreparedOnes: {"lost-prepare"},
    broken.AbortsWhenAsked: {"lost-prepare"},
    broken.PreparesTheFirstTopic: {"unseen"},
    broken.PreparesWhatFailed: {"hang"},
    broken.CommitsWhatIsAbortedByToken: {"early-read"},
    broken.SaysWhatItWasAsked: {"split-decision"},
    broken.LosesTheDecision: {"split-decision"},
    broken.SaysThatAllIsCommitted: {"split-decision"},
    broken.HasALogForEachBridge: {"split-decision"},
    broken.ForgetsAcknowledgements: {"replay-duplicate"},
    broken.ForgetsAcknowledgementsOfPreparedOnes: {"replay-duplicate"},
    broken.AcknowledgesTheFirstOfABatch: {"replay-duplicate"},
    broken.GivesEveryMemberEverything: {"replay-duplicate"},
    broken.KnowsNoConflict: {"replay-duplicate"},
    broken.DeliversTwice: {"int-nonmonotonic-poll"},
}
# With their workload alone a run has enough half messages for a fault that harms one of twenty.
HALVES: dict[type[Broken], set[str]] = {
    broken.PublishesHalvesAtOnce: {"phantom-commit"},
    broken.AsksAboutNoHalf: {"orphan-half"},
    broken.AsksOnce: {"orphan-half"},
    broken.TakesTheLastAnswer: {"orphan-half"},
}
# A writer has to be killed within a commit. A run with all workloads mostly kills others.
TORN: dict[type[Broken], set[str]] = {broken.CommitsInTwoSteps: {"torn-transaction"}}
ALONE = dict.fromkeys(HALVES, "half-messages") | dict.fromkeys(TORN, "transactions")


@pytest.mark.full
@pytest.mark.parametrize(
    ("broker", "finds", "seconds"),
    [
        pytest.param(broker, finds, 25 if broker in TORN else 12, id=broker.__name__)
        for broker, finds in (EMBEDDED | HALVES | TORN).items()
    ],
)
def test_a_broken_embedded_broker_is_found_under_its_name(broker, finds, seconds, tmp_path):
    url = f"{scheme_of(broker)}:{tmp_path / 'broker.db'}?{OPTIONS}"
    more = ["--time", str(seconds), "--plugin", "tests.conformance.broken"]
    if broker in ALONE:
        more += ["--workload", ALONE[broker]]
    assert_found(frozenset(finds), (1, 2, 3, 4, 5), tmp_path, url, *more)


@pytest.mark.full
@pytest.mark.parametrize("name", EMBEDDED_MUTANTS)
def test_a_mutant_on_embedded_brokers_is_found_under_its_name(name, tmp_path):
    mutant = EMBEDDED_MUTANTS[name]
    more = ["--time", str(mutant.seconds), "--workload", mutant.workload, "--plugin", mutant.change.__module__]
    assert_found(mutant.finds, mutant.seeds, tmp_path, f"embedded:{tmp_path / 'broker.db'}", *more, **{VARIABLE: name})


@pytest.mark.full
@pytest.mark.live
@pytest.mark.parametrize(
    ("backend", "name"), [(backend, name) for backend, mutants in LIVE.items() for name in mutants.by_name]
)
def test_a_mutant_is_found_under_its_name(backend, name, tmp_path, request):
    mutant = LIVE[backend].by_name[name]
    if mutant.needs:
        pytest.importorskip(mutant.needs, reason="only the broker's official client shows it")
    more = ["--time", str(mutant.seconds), "--workload", mutant.workload]
    more += ["--plugin", f"tests.conformance.mutants.{backend}"]
    if mutant.faults:
        url = backend
        more += ["--faults", mutant.faults]
    else:
        broker = request.getfixturevalue(f"{backend}_broker")
        url = f"{broker.url}?admin_url={broker.admin_url}" if broker.admin_url else broker.url
        if isinstance(broker, RocketMQ):
            more += ["--grpc", broker.grpc_address()]
    assert_found(mutant.finds, mutant.seeds, tmp_path, url, *more, **{VARIABLE: name})
