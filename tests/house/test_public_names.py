"""Each public name is listed, is there, and is documented."""

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType

import pytest

import txnbridge
from tests.house.rooms import PUBLIC_MODULES, ROOT
from txnbridge import aio

EVERY_PUBLIC_MODULE = ["txnbridge", *(f"txnbridge.{name}" for name in PUBLIC_MODULES)]


@pytest.fixture(params=EVERY_PUBLIC_MODULE)
def module(request) -> ModuleType:
    return importlib.import_module(request.param)


def bound_names(source: str, imports: bool) -> Iterator[str]:
    """The public names that a module's top level binds, those that it imports only if asked for."""
    for statement in ast.parse(source).body:
        match statement:
            case ast.ImportFrom(module="__future__"):
                continue
            case ast.ClassDef() | ast.FunctionDef():
                names = [statement.name]
            case ast.Assign() | ast.AnnAssign():
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            case ast.Import() | ast.ImportFrom() if imports:
                names = [alias.asname or alias.name for alias in statement.names]
            case _:
                continue
        yield from (name for name in names if not name.startswith("_"))


def is_documented(thing: object) -> bool:
    """Whether a class, function or module has a docstring that somebody wrote; values need none."""
    if not (inspect.isclass(thing) or inspect.isroutine(thing) or inspect.ismodule(thing)):
        return True
    text = (thing.__doc__ or "").strip()
    # A dataclass without a docstring is given its signature for one.
    return bool(text) and not text.startswith(f"{thing.__name__}(")


def test_every_listed_name_exists_once_and_is_documented(module):
    assert len(set(module.__all__)) == len(module.__all__)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert [name for name in module.__all__ if not is_documented(getattr(module, name))] == []


def test_every_public_name_is_listed(module):
    # The front doors import only in order to show; the others also import for their own use.
    bound = bound_names(inspect.getsource(module), imports=module in (txnbridge, aio))
    assert sorted(set(bound) - set(module.__all__)) == []


def members(kind: type) -> dict[str, object]:
    """The public members of a class; a method as its parameters."""
    found = inspect.getmembers(kind, lambda member: inspect.isroutine(member) or isinstance(member, property))
    public = {name: member for name, member in found if not name.startswith("_")}
    return {
        name: list(inspect.signature(member).parameters.values()) if inspect.isfunction(member) else member
        for name, member in public.items()
    }


# What the asynchronous classes do not have or take, or otherwise, each with its reason.
ONLY_SYNCHRONOUS = {
    "Admin": {},
    "Bridge": {
        "decisions": "for programs that build on decision logs, in threads",
        "processor(to)": "a span is made and ended in threads",
        "resolver(check)": "is needed, without db=",
        "resolver(db)": "what is in databases is done in threads",
        "transaction(db)": "what is in databases is done in threads",
        "transaction(group)": "goes with db=",
    },
    "Consumer": {"poll_columns": "for programs that read in bulk, which use no event loop"},
    "HalfMessages": {"close": "the end of the block"},
    "HalfTransaction": {},
    "Processor": {},
    "Publisher": {},
    "Resolver": {"start": "the begin of the block", "close": "the end of the block", "stop_by": "part of closing"},
    "Transaction": {},
}


@pytest.mark.parametrize("name", ONLY_SYNCHRONOUS)
def test_the_asynchronous_classes_have_the_names_and_parameters_of_the_synchronous_ones(name):
    ours, theirs = members(getattr(aio, name)), members(getattr(txnbridge, name))
    missing = theirs.keys() - ours.keys()
    for method, parameters in theirs.items():
        if isinstance(parameters, list) and isinstance(has := ours.get(method), list):
            own = {parameter.name: str(parameter) for parameter in has}
            missing |= {f"{method}({p.name})" for p in parameters if own.get(p.name) != str(p)}
    assert missing == ONLY_SYNCHRONOUS[name].keys()
    assert [member for member in ours if not is_documented(getattr(getattr(aio, name), member))] == []


def test_a_property_that_is_delegated_has_its_type_for_every_type_checker():
    source = "".join(path.read_text() for path in (ROOT / "txnbridge" / "aio").glob("*.py"))
    written = re.findall(r"(.*) = delegated_property\(", source)
    assert len(written) > 10 and [each for each in written if "Final[" not in each] == []


def test_no_further_module_is_public():
    found = {info.name for info in pkgutil.iter_modules(txnbridge.__path__)}
    assert {name for name in found if not name.startswith("_")} - {*PUBLIC_MODULES, "cli", "sql"} == set()


def test_a_name_that_is_bound_and_public_is_seen():
    source = """
from __future__ import annotations
import os as system
from a import b, _c
x: int = 1
_y = z = 2
class K: ...
def f(): ...
"""
    assert list(bound_names(source, imports=True)) == ["system", "b", "x", "z", "K", "f"]
    assert list(bound_names(source, imports=False)) == ["x", "z", "K", "f"]


def test_an_undocumented_public_name_is_seen():
    undocumented = dataclasses.make_dataclass("Undocumented", ["field"])
    assert not is_documented(undocumented)
    assert not is_documented(lambda: None)
    assert is_documented(dataclasses.make_dataclass)
    assert is_documented(3)
