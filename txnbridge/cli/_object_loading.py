"""Loads an object of a user's module, found from the current folder, for `txnbridge run` and `txnbridge resolver`."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

import txnbridge
from txnbridge._process.handler import reason_of
from txnbridge.commands import asked_for
from txnbridge.errors import InvalidOption, TxnBridgeError

_NOT_THE_USERS = (*(path + os.sep for path in (*txnbridge.__path__, *importlib.__path__)), "<frozen importlib")


@contextmanager
def telling(prefix: str = "") -> Iterator[None]:
    """Write txnbridge's log lines to stderr during the block, unless the user's module has set up logging.

    `prefix` stands in front of each message.
    """
    logger = logging.getLogger("txnbridge")
    if logger.hasHandlers():
        yield
        return
    handler, level = logging.StreamHandler(), logger.level
    handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(message)s"))
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
    Raise `InvalidOption` if the module cannot be imported.
    """
    name, colon, attribute = target.partition(":")
    if not (name and colon and attribute):
        raise click.UsageError(f"{target!r} is not MODULE:NAME")
    found = _import(name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise click.UsageError(f"module {name} has no {attribute!r}")
        found = getattr(found, part)
    if not fits(found):
        raise click.UsageError(f"{target} is {type(found).__name__}, {what}")
    return found


def _import(name: str) -> Any:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except TxnBridgeError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            hint = f"; write {name.removesuffix('.py')}:…" if name.endswith(".py") else ""
            raise click.UsageError(f"there is no module {name!r} in the current folder or installed{hint}") from None
        show_traceback(error)
        raise InvalidOption(f"module {name} cannot be imported: {reason_of(error)}") from error


def show_traceback(error: Exception) -> None:
    """Write an error's traceback to stderr, without the frames of txnbridge and of Python's import system.

    Call this only for errors of the user's module before any message is read: their text is shown. With --json write
    nothing.
    """
    if asked_for(click.get_current_context(), "json"):
        return
    shown = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in shown.stack if not frame.filename.startswith(_NOT_THE_USERS)]
    shown.stack = traceback.StackSummary.from_list(frames)
    click.echo("".join(shown.format() if frames else shown.format_exception_only()), err=True, nl=False)
