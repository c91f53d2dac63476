"""Texts about errors of an application's handlers that log lines may contain: without data of messages."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator

from txnbridge.errors import Poison, TxnBridgeError

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def reason_of(error: BaseException) -> str:
    """Return as one line why a message is poison: the text of a `Poison`, or the class and text of another error."""
    text = " ".join(str(error).split())
    if isinstance(error, Poison) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def loggable(error: BaseException | None) -> str:
    """Return an error as text for log lines: only its class, unless it is an error of txnbridge without data."""
    if isinstance(error, TxnBridgeError | Poison):
        return reason_of(error)
    return type(error).__name__


def handler_location(error: BaseException, caller: str = "") -> str:
    """Return an error as text with the file and line of the handler from which it came, possibly through libraries.

    `caller` is the file of the module of txnbridge that called the handler. It is not needed for an error that was
    caught there.
    """
    frames = traceback.extract_tb(error.__traceback__)
    calls = [index for index, frame in enumerate(frames) if frame.filename == caller]
    inside = [f for f in frames[calls[-1] + 1 if calls else 0 :] if not f.filename.startswith(_PACKAGE)]
    place = next((f for f in reversed(inside) if f.filename == inside[0].filename), frames[-1] if frames else None)
    return loggable(error) if place is None else f"{loggable(error)} at {place.filename}:{place.lineno}"


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and, recursively, its `__cause__` or `__context__`."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
