"""The places of our packages, for the tests of the house."""

import ast
import functools
import gc
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
def nodes(source: str) -> list[ast.AST]:
    """Return the nodes of a module that tests look at. The tests of all modules run in one process (`xdist_group`)."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Import | ast.ImportFrom
    gc.disable()  # all nodes stay, and every collection would look at them again
    found: list[ast.AST] = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds | ast.Call | ast.Attribute)
    ]
    gc.freeze()
    gc.enable()
    return found
