"""The house stays readable for strangers: docstrings with a subject, one meaning a name, one floor plan, no circles."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.house.rooms import ROOT, nodes, packages
from tests.house.test_import_rules import imported, modules

pytestmark = pytest.mark.xdist_group("sources")

# First words of sentences that have no subject, or need the sentence before them.
HEADLESS = re.compile(r"(What|Who|Whose|Of|As|Those|By|So|Behind|Also|Nothing|Nobody|That|Where|When|Whatever)\b")
MOST_HEADLESS = 0.02

# Class names that stand twice, each with its reason.
TWICE = {
    "Admin": "what users call, and the part of the contract behind it",
    "Publisher": "what users call, and the part of the contract behind it",
}

FLOOR_PLAN = re.compile(
    "__init__|backend|capabilities|settings|broker|cluster|topics|decision_log|half_store|errors"
    "|client|write|read|outcome|admin"
    "|imitation"  # of other brokers, by the embedded one
)

# Imports that may close a circle, each with its reason.
CIRCULAR = {
    ("txnbridge.spi", "txnbridge._base.plugins"): "backends mark their hooks with what the contract hands them",
    ("pyspark_txnbridge.pipeline", "pyspark_txnbridge._commands"): "spark-submit runs the module as a program",
}


def docstrings(package: Path) -> Iterator[tuple[str, str]]:
    """The place and the text of every docstring of a package."""
    for name, path in modules(package):
        for node in nodes(path.read_text()):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if text := ast.get_docstring(node):
                yield f"{name}:{getattr(node, 'lineno', 1)}", text


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of a circle of imports, if there is one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def import_graph() -> dict[str, set[str]]:
    """Return, for each module, our modules that it imports, wherever the import stands."""
    sources = {
        name.removesuffix(".__init__"): (name, path.read_text())
        for package in packages()
        for name, path in modules(package)
    }
    graph: dict[str, set[str]] = {}
    for module, (name, source) in sources.items():
        targets = {target if target in sources else target.rpartition(".")[0] for target in imported(name, source)}
        graph[module] = {t for t in targets if t in sources and t != module and (module, t) not in CIRCULAR}
    return graph


@pytest.mark.parametrize("package", [*packages(), ROOT / "tests"], ids=lambda package: package.name)
def test_hardly_a_docstring_is_headless(package):
    found = list(docstrings(package))
    headless = [f"{place}: {text.splitlines()[0]}" for place, text in found if HEADLESS.match(text)]
    assert len(found) > 10
    assert len(headless) <= MOST_HEADLESS * len(found), headless


def test_no_name_of_a_test_is_headless():
    names = re.findall(r"def test_(\w+)", "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py")))
    assert len(names) > 3000
    assert [name for name in names if re.match("what|who|nothing|nobody", name)] == []


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.name)
def test_no_class_name_stands_twice(package):
    classes = defaultdict(set)
    for name, path in modules(package):
        if name.startswith("txnbridge.aio."):  # its classes are named like the synchronous ones
            continue
        for node in nodes(path.read_text()):
            if isinstance(node, ast.ClassDef):
                classes[node.name].add(name)
    assert classes
    assert {name: sorted(where) for name, where in classes.items() if len(where) > 1 and name not in TWICE} == {}


def test_every_backend_has_the_one_floor_plan():
    backends = [package for package in packages() if package.parent.name == "backends"]
    tops = {name.split(".")[1] for backend in backends for name, _ in modules(backend)}
    assert len(backends) == 4
    assert sorted(top for top in tops if not FLOOR_PLAN.fullmatch(top)) == []


def test_imports_make_no_circle():
    graph = import_graph()
    assert sum(map(len, graph.values())) > 1000
    assert circle(graph) == []


def test_a_sentence_or_an_import_that_breaks_a_rule_is_found():
    assert HEADLESS.match("What it is told.") and not HEADLESS.match("Return what it is told.")
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) and not circle({"a": {"b"}, "b": {"c"}, "c": set()})
