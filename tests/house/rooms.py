"""The places of our packages, for the tests of the house."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]
PUBLIC_MODULES = ("aio", "capabilities", "codecs", "commands", "errors", "metrics", "opentelemetry", "spi", "testing")


def packages() -> list[Path]:
    """The folder of every package of ours that is there: the core first, then backends, suite and Spark."""
    found = [ROOT / "txnbridge"]
    for room in ("backends", "conformance", "spark"):
        found += sorted(init.parent for init in (ROOT / room).glob("*/__init__.py"))
    return found


@functools.cache
def parsed(source: str) -> ast.Module:
    """Return the syntax tree of a module. The tests that ask for all modules run in one process (`xdist_group`)."""
    return ast.parse(source)
