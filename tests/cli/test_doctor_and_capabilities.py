import json

import pytest

from tests.core.toy import ToyBackend, ToyBroker
from txnbridge import Capability, Level, hookimpl, plugins
from txnbridge.capabilities import absent, emulated
from txnbridge.errors import AccessDenied, BrokerUnavailable
from txnbridge.spi import Advice


class ToyAdmin:
    def __init__(self, findings):
        self.findings = findings

    def check(self, deadline):
        return self.findings


class Patient(ToyBackend):
    """A broker in which the doctor finds these."""

    def __init__(self, *findings, error=None):
        super().__init__()
        self.findings = findings
        self.error = error

    def open(self, url, options, context, deadline):
        if self.error:
            raise self.error
        patient = self

        class Broker(ToyBroker):
            admin = ToyAdmin(list(patient.findings))  # type: ignore[assignment]

        return Broker(self.capabilities)


OK = Advice("ok", "disk", "is fine")
WARNING = Advice("warning", "clock", "is slow", "wind it up")
PROBLEM = Advice("problem", "topic orders", "is held back", "end transaction 7")


def examine(invoke, patient, *more):
    with plugins.registered(patient):
        return invoke("doctor", "--url", "toy:", *more)


pytestmark = pytest.mark.usefixtures("no_failures")


@pytest.mark.parametrize(
    ("findings", "code"),
    [([], 0), ([OK], 0), ([OK, WARNING], 7), ([WARNING, PROBLEM, OK], 1)],
    ids=["nothing", "ok", "warning", "problem"],
)
def test_the_worst_finding_is_the_exit_code(invoke, findings, code):
    assert examine(invoke, Patient(*findings)).exit_code == code


def test_each_finding_is_shown_with_its_remedy_and_told_as_json(invoke):
    shown = [line.split(maxsplit=1) for line in examine(invoke, Patient(OK, WARNING, PROBLEM)).stdout.splitlines()]
    assert [line[0] for line in shown[1:]] == ["ok", "warning", "PROBLEM"]
    assert "is slow Remedy: wind it up" in shown[2][1]
    assert json.loads(examine(invoke, Patient(OK, WARNING), "--json").stdout) == [
        {"level": "ok", "subject": "disk", "text": "is fine", "remedy": ""},
        {"level": "warning", "subject": "clock", "text": "is slow", "remedy": "wind it up"},
    ]


@pytest.mark.parametrize(("error", "code"), [(BrokerUnavailable("nobody answers"), 3), (AccessDenied("not yours"), 1)])
def test_a_broker_that_cannot_be_opened_is_a_finding(invoke, error, code):
    result = examine(invoke, Patient(error=error), "--json")
    assert result.exit_code == code
    assert json.loads(result.stdout) == [
        {"level": "problem", "subject": "connection", "text": str(error), "remedy": ""}
    ]


class Broken:
    @hookimpl
    def txnbridge_backends(self):
        raise ImportError("its client library is missing")


def test_a_plug_in_that_fails_is_a_problem_by_its_name(invoke):
    with plugins.registered(Broken()):
        result = examine(invoke, Patient(OK))
    assert result.exit_code == 1
    assert f"plug-in {__name__}" in result.stdout
    assert "could not be loaded: ImportError: its client library is missing" in result.stdout
    assert "is fine" in result.stdout


def test_our_own_plug_in_whose_extra_is_missing_is_no_problem(invoke, monkeypatch):
    missing = ModuleNotFoundError("it needs numpy: pip install -e '.[conformance]'")
    monkeypatch.setitem(plugins.failed, "txnbridge_conformance._commands", missing)
    result = examine(invoke, Patient(OK))
    assert result.exit_code == 0
    assert "is not used, because an extra is not installed: it needs numpy" in result.stdout


def test_a_healthy_broker_is_healthy(invoke, bridge):
    result = invoke("doctor")
    assert result.exit_code == 0
    assert result.stdout


SOME = {
    Capability.FENCING: absent("nobody is shut out", "https://example.org/7"),
    Capability.CONFLICT: emulated("by a decision log"),
}


def test_without_a_url_all_backends_are_compared(invoke):
    with plugins.registered(ToyBackend(SOME)):
        header, *rows = invoke("capabilities").stdout.splitlines()
    assert header.split() == ["capability", "embedded", "kafka", "pulsar", "rocketmq", "toy"]
    by_name = {row.split()[0]: dict(zip(header.split(), row.split(), strict=False)) for row in rows if row}
    assert (by_name["fencing"]["embedded"], by_name["fencing"]["toy"]) == ("native", "absent")
    assert (by_name["conflict"]["embedded"], by_name["conflict"]["toy"]) == ("native", "emulated")
    assert set(by_name) >= {capability.value for capability in Capability}


def test_all_backends_as_json(invoke, url):
    found = json.loads(invoke("capabilities", "--all", "--json").stdout)
    [embedded] = [backend for backend in found if backend["backend"] == "embedded"]
    assert set(embedded) == {"backend", "capabilities", "limits"}
    assert set(embedded["capabilities"]) == {capability.value for capability in Capability}


@pytest.mark.parametrize("args", [["toy:"], ["--url", "toy:"]], ids=" ".join)
def test_capabilities_of_a_url_are_explained_one_by_one(invoke, args):
    with plugins.registered(ToyBackend(SOME)):
        rows = invoke("capabilities", *args).stdout.splitlines()
    [fencing] = [row for row in rows if row.startswith("fencing ")]
    assert fencing.split()[1] == "absent"
    assert Capability.FENCING.sentence in fencing
    assert "Why not: nobody is shut out (https://example.org/7)" in fencing
    [conflict] = [row for row in rows if row.startswith("conflict ")]
    assert "How: by a decision log" in conflict


def test_capabilities_of_a_url_are_shown_in_json_with_their_limits(invoke):
    with plugins.registered(ToyBackend(SOME)):
        found = json.loads(invoke("capabilities", "toy:", "--json").stdout)
    assert (found["url"], found["backend"]) == ("toy:", "toy")
    assert found["capabilities"]["fencing"] == {
        "level": Level.ABSENT.value,
        "sentence": Capability.FENCING.sentence,
        "note": "nobody is shut out",
        "link": "https://example.org/7",
    }
    unlimited = ("message_bytes", "transaction_messages", "transaction_bytes", "prepared_transactions")
    assert found["limits"] == {"prepared_seconds": 3600, **dict.fromkeys(unlimited)}
