"""Loads an object of a user's module, found from the current folder, for `txnbridge run` and `txnbridge resolver`."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click


@contextmanager
def telling() -> Iterator[None]:
    """Write txnbridge's log lines to stderr during the block, unless the user's module has set up logging."""
    logger = logging.getLogger("txnbridge")
    if logger.hasHandlers():
        yield
        return
    handler, level = logging.StreamHandler(), logger.level
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def load(target: str, fits: Callable[[Any], bool], what: str) -> Any:
    """Import MODULE and return its object NAME, given as MODULE:NAME.

    Raise `click.UsageError` if there is none, or `fits` refuses it; `what` is the error's text about valid objects.
    """
    name, colon, attribute = target.partition(":")
    if not (name and colon and attribute):
        raise click.UsageError(f"{target!r} is not MODULE:NAME")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise click.UsageError(f"there is no module {error.name!r} here or among what is installed") from None
        raise
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise click.UsageError(f"module {name} has no {attribute!r}")
        found = getattr(found, part)
    if not fits(found):
        raise click.UsageError(f"{target} is {type(found).__name__}, {what}")
    return found
