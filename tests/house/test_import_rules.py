"""The imports that are allowed: a backend the contract, the suite and Spark the public interface, the core nobody."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.rooms import PUBLIC_MODULES, nodes, packages

pytestmark = pytest.mark.xdist_group("sources")

PUBLIC = {f"txnbridge.{name}" for name in PUBLIC_MODULES}
CONTRACT = {"txnbridge.spi", "txnbridge.errors"}
# What starts brokers asks them by these.
CLIENTS = {
    "txnbridge_kafka.client",
    "txnbridge_kafka.settings.security",
    "txnbridge_pulsar.client",
    "txnbridge_rocketmq.client",
}
# The rooms of the core, from the ground up: each imports those below it, and those beside it.
FLOORS = [
    {"errors"},
    {"capabilities"},
    {"_base", "spi", "codecs"},
    {"_decisions"},
    {"_read", "_write"},
    {"_process"},
    {"_half"},
    {"_admin"},
    {"_bridge"},
    {"_app", "_metrics", "sql"},
    {"__init__"},  # the front door, for what is named there, too
    {"aio", "commands", "metrics", "opentelemetry", "testing"},
    {"cli"},
]
# The work of a conformance run, of which one role needs SQL, and what that role imports.
SQL_ROLE = ("txnbridge_conformance.run.workloads", "txnbridge.sql.Outbox")
OURS = ("txnbridge", "pyspark_txnbridge")  # every package of ours is called so, or begins so


def modules(package: Path) -> Iterator[tuple[str, Path]]:
    """Each module of a package, as its dotted name (the package itself: `<name>.__init__`) and its file."""
    for path in sorted(package.rglob("*.py")):
        yield ".".join(path.relative_to(package.parent).with_suffix("").parts), path


def imported(importer: str, source: str) -> Iterator[str]:
    """The full dotted name of everything that a module imports, also inside functions and by string."""
    for node in nodes(source):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                parents = importer.split(".")[: -node.level] if node.level else []
                origin = ".".join([*parents, *([node.module] if node.module else [])])
                yield from (f"{origin}.{alias.name}" for alias in node.names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name


def is_ours(name: str) -> bool:
    return name.split(".")[0].startswith(OURS)


def is_inside(name: str, places: set[str]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def is_public(name: str) -> bool:
    """The front door's names, and the public modules with what is in them; not the command line, not SQL."""
    at_the_door = name == "txnbridge" or (name.startswith("txnbridge.") and name.count(".") == 1)
    return is_inside(name, PUBLIC) or (at_the_door and name not in {"txnbridge.cli", "txnbridge.sql"})


def may_import(importer: str, name: str) -> bool:
    package = importer.split(".")[0]
    if is_inside(name, {package}):
        return True
    if package == "txnbridge":
        return False
    if importer.startswith("txnbridge_conformance.brokers.") and is_inside(name, CLIENTS):
        return True
    if package in {"txnbridge_conformance", "pyspark_txnbridge"}:
        return is_public(name) or (importer, name) == SQL_ROLE
    return is_inside(name, CONTRACT)


def is_anothers_private(importer: str, name: str) -> bool:
    """Whether the name leads through a module `_x` of a package that the importer is not in."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.startswith("_") and not part.startswith("__"):
            return not is_inside(importer, {".".join(parts[:position])})
    return False


def offences(importer: str, source: str) -> list[str]:
    """Return the imports of a module that break the rules, one sentence each."""
    names = [name for name in imported(importer, source) if is_ours(name)]
    found = [f"{importer} may not import {name}" for name in names if not may_import(importer, name)]
    found += [f"{importer} imports {name}, private" for name in names if is_anothers_private(importer, name)]
    return found


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.name)
def test_a_package_imports_only_what_its_room_may_see(package):
    checked = list(modules(package))
    assert checked
    assert [offence for name, path in checked for offence in offences(name, path.read_text())] == []


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("txnbridge._bridge", "import txnbridge_embedded"),
        ("txnbridge._bridge", "def late():\n    from txnbridge_kafka import KafkaBackend"),
        ("txnbridge._base.plugins", "import importlib\nimportlib.import_module('txnbridge_embedded')"),
        ("txnbridge._base.plugins", "__import__('txnbridge_embedded')"),
        ("txnbridge.testing", "from txnbridge_conformance import suite"),
        ("txnbridge._bridge", "from txnbridge.sql._rows import Row"),
        ("txnbridge._bridge", "from .cli import _output"),
        ("txnbridge_embedded.__init__", "import txnbridge"),
        ("txnbridge_embedded._broker", "from txnbridge import connect"),
        ("txnbridge_embedded._broker", "from txnbridge import *"),
        ("txnbridge_embedded._broker", "from txnbridge._base.events import emit"),
        ("txnbridge_embedded._broker", "from txnbridge.capabilities import Capability"),
        ("txnbridge_kafka._broker", "from txnbridge_embedded import EmbeddedBackend"),
        ("txnbridge_kafka._broker", "import txnbridge_conformance.history"),
        ("txnbridge_embedded.client.store.rows", "from ..locks._lease import Lease"),
        ("txnbridge_conformance.suite.test_ack", "from txnbridge._write.transaction import Transaction"),
        ("txnbridge_conformance.suite.test_ack", "from txnbridge import _transaction"),
        ("txnbridge_conformance.suite.test_ack", "from txnbridge.cli import main"),
        ("txnbridge_conformance.suite.test_ack", "import txnbridge_embedded"),
        ("pyspark_txnbridge._writer", "from txnbridge import sql"),
        ("pyspark_txnbridge._writer", "import txnbridge_kafka"),
    ],
)
def test_an_import_against_the_rules_is_found(importer, source):
    assert offences(importer, source)


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("txnbridge._bridge", "from txnbridge._base.events import emit\nfrom . import _token, errors"),
        ("txnbridge.cli.send", "from txnbridge.cli._output import table\nfrom .. import _bridge"),
        ("txnbridge.sql.__init__", "from ._rows import Row"),
        ("txnbridge_embedded._broker", "from txnbridge import spi, errors\nfrom txnbridge.spi import Broker"),
        ("txnbridge_embedded._broker", "from ._files import open_file\nimport txnbridge_embedded._files"),
        ("txnbridge_kafka._broker", "import confluent_kafka._model"),
        ("txnbridge_conformance.plugin", "import txnbridge\nfrom txnbridge import Outcome, codecs"),
        ("txnbridge_conformance.plugin", "from txnbridge.capabilities import Capability"),
        ("pyspark_txnbridge._writer", "from txnbridge import connect\nfrom txnbridge.errors import Fenced"),
    ],
)
def test_an_import_within_the_rules_passes(importer, source):
    assert offences(importer, source) == []


def climbs(importer: str, source: str) -> list[str]:
    """Return what a module of the core imports from rooms above its own, but not late, inside functions."""
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    imports = [ast.unparse(each) for each in ast.parse(source).body if isinstance(each, ast.Import | ast.ImportFrom)]
    names = [name for name in imported(importer, "\n".join(imports)) if is_inside(name, {"txnbridge"})]
    own, door = floor[importer.split(".")[1]], floor["__init__"]
    return [name for name in names if floor.get(f"{name}.".split(".")[1], door) > own]


def test_a_room_of_the_core_imports_none_above_it():
    core = list(modules(next(package for package in packages() if package.name == "txnbridge")))
    assert len(core) > 50 and climbs("txnbridge._base.token", "from txnbridge import _bridge, errors, connect")[1:]
    assert {name: found for name, path in core if (found := climbs(name, path.read_text()))} == {}
