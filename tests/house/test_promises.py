"""The page that says which test shows which promise is true."""

import ast
import re
from collections import defaultdict
from pathlib import Path

from tests.house.rooms import ROOT
from txnbridge import Capability

PAGE = (ROOT / "docs" / "promises.md").read_text()
SUITE = sorted((ROOT / "conformance" / "txnbridge_conformance" / "suite").glob("*.py"))


def held_by(module: Path) -> list[ast.FunctionDef]:
    nodes = ast.parse(module.read_text()).body
    return [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def proven(test: ast.FunctionDef) -> list[str]:
    """The names of the capabilities in its `@proves(...)`."""
    calls = [each for each in test.decorator_list if isinstance(each, ast.Call) and ast.unparse(each.func) == "proves"]
    return [argument.attr for call in calls for argument in call.args if isinstance(argument, ast.Attribute)]


def capability_table() -> str:
    shown = defaultdict(list)
    for module in SUITE:
        for test in held_by(module):
            for name in proven(test):
                shown[name].append(f"`{test.name}`")
    rows = [f"| {c.value} | {', '.join(shown[c.name]) or 'tests of its own'} |" for c in Capability]
    return "\n".join(["| capability | shown by |", "|---|---|", *rows])


def rows(text: str) -> dict[str, str]:
    """A table's first column, with the rest of each row."""
    found = re.findall(r"^\| ([^|]+?) \| (.+) \|$", text, re.MULTILINE)
    return {first: rest for first, rest in found if first != "promise"}


def test_each_promise_of_the_readme_has_tests_and_they_are_there():
    promised = (ROOT / "README.md").read_text().partition("## What is promised")[2].partition("\n## ")[0]
    shown = rows(PAGE.partition("## Capabilities")[0])
    assert list(shown) == list(rows(promised))
    there = {test.name for module in SUITE for test in held_by(module)}
    for promise, named in shown.items():
        assert (names := re.findall(r"`(\w+)`", named)), promise
        assert set(names) <= there, promise


def test_each_capability_is_listed_with_the_tests_that_prove_it():
    assert capability_table() in PAGE, f"docs/promises.md has to hold this table:\n\n{capability_table()}"
