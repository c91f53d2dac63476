"""The house has a budget. Its numbers fall; one that has to rise does so with a reason in the commit."""

import ast

import pytest

from tests.house.rooms import ROOT, nodes, packages
from tests.house.test_public_names import EVERY_PUBLIC_MODULE

pytestmark = pytest.mark.xdist_group("sources")

MODULES_IN_A_FOLDER = 15
FULLER_FOLDERS = {"txnbridge/cli": 27}  # a module for each command
LINES = 79_305  # of the packages, as `wc -l` counts them
WORDS = 54_700  # of the docs, the README and the page for contributors, as `wc -w` counts them
PUBLIC_NAMES = 197
PRIVATE_REACHES = 234  # of tests, into objects of the packages


def lines() -> int:
    files = (path for package in packages() for kind in ("py", "proto", "sql") for path in package.rglob(f"*.{kind}"))
    return sum(path.read_bytes().count(b"\n") for path in files)


def words() -> int:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return sum(len(page.read_text().split()) for page in pages)


def public_names() -> int:
    modules = (__import__(name, fromlist=["__all__"]) for name in EVERY_PUBLIC_MODULE)
    return sum(len(module.__all__) for module in modules)


def private_reaches() -> int:
    """Return how often tests name a private attribute of something else than `self`."""
    found = 0
    for path in (ROOT / "tests").rglob("*.py"):
        for node in nodes(path.read_text()):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                found += not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    return found


@pytest.mark.parametrize(
    ("count", "limit"),
    [(lines, LINES), (words, WORDS), (public_names, PUBLIC_NAMES), (private_reaches, PRIVATE_REACHES)],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_the_house_keeps_its_budget(count, limit):
    assert 0.9 * limit < count() <= limit, "a number that has fallen far is set lower"


def test_a_folder_has_few_modules():
    folders = {path.parent for package in packages() for path in package.rglob("*.py")}
    modules = {folder.relative_to(ROOT).as_posix(): len([*folder.glob("*.py")]) for folder in folders}
    assert len(modules) > 20
    assert {
        name: count for name, count in modules.items() if count > FULLER_FOLDERS.get(name, MODULES_IN_A_FOLDER)
    } == {}
