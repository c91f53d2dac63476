"""The toy backend of the docs passes the tests that need no other process, and the docs show it unchanged."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from txnbridge_conformance import suite
from txnbridge_conformance.plugin import NewTopic

from tests.house.rooms import ROOT
from txnbridge import plugins

FILE = ROOT / "docs" / "toy_backend.py"
LINES = 200

NOT_KEPT = {
    # The toy creates any topic at first use.
    "test_a_missing_topic_is_named_where_none_may_be_created",
    # The first member gets all partitions.
    "test_members_share_the_partitions_and_take_over_from_those_who_leave",
    # These tests start processes.
    "test_of_two_owners_that_race_for_an_id_one_commits",
}


def is_claimed(name: str, found: Any) -> bool:
    if name.startswith("test_"):
        return name not in NOT_KEPT and not {"run", "kill_walk"} & inspect.signature(found).parameters.keys()
    return not name.startswith("_")  # a fixture


# The suite itself skips tests of absent capabilities, or expects them to fail.
globals().update({name: found for name, found in vars(suite).items() if is_claimed(name, found)})


@pytest.fixture(scope="module")
def toy() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("toy_backend", FILE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["toy_backend"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with plugins.registered(module):
        yield module
    del sys.modules["toy_backend"]


@pytest.fixture(scope="module")
def txnbridge_url(toy: Any) -> str:
    return "toy:suite"


@pytest.fixture
def new_topic(toy: Any, unique: Callable[[str], str], bridge: Any) -> NewTopic:
    def create(partitions: int = 1) -> str:
        name = unique("conformance")
        toy.BROKERS["suite"].logs.update({(name, number): [] for number in range(partitions)})
        return name

    return create


def test_the_docs_include_the_toy_and_it_is_short() -> None:
    shown = (ROOT / "docs" / "writing-a-backend.md").read_text().split("## The toy\n\n```python\n")[1]
    assert shown == f'--8<-- "{FILE.relative_to(ROOT).as_posix()}"\n```\n'
    assert len(FILE.read_text().splitlines()) <= LINES
