"""Calls an application's handlers inside the context managers of plug-ins, and tells of their errors.

Log lines may contain these texts: they have no data of messages.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from txnbridge._base.messages import Message
from txnbridge.errors import Poison, TxnBridgeError

_log = logging.getLogger("txnbridge")

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep

# Given the messages and the group of the processor.
MakeContext = Callable[[Sequence[Message], str], AbstractContextManager[object]]


def call_inside(
    makers: Sequence[MakeContext], messages: Sequence[Message], group: str, handler: Callable[..., object], *args: Any
) -> None:
    """Call a handler of messages inside the context managers that `makers` return; only log plug-ins' errors."""
    entered: list[AbstractContextManager[object]] = []
    for make in makers:
        try:
            context = make(messages, group)
            context.__enter__()
        except Exception:
            _log.exception("a plug-in failed before the handler of group %r", group)
        else:
            entered.append(context)
    error: BaseException | None = None
    try:
        handler(*args)
    except BaseException as raised:
        error = raised
        raise
    finally:
        for context in reversed(entered):
            try:
                context.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
            except Exception:
                _log.exception("a plug-in failed after the handler of group %r", group)
        del error  # it refers to this frame


def reason_of(error: BaseException) -> str:
    """Return as one line why a message is poison: the text of a `Poison`, or the class and text of another error."""
    if isinstance(error, BaseExceptionGroup):  # of a task group
        return "; ".join(map(reason_of, error.exceptions))
    try:
        text = " ".join(str(error).split())
    except Exception:  # the error of a library may fail to make its text
        text = ""
    if isinstance(error, Poison) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def loggable(error: BaseException | None) -> str:
    """Return an error as text for log lines: only its class, unless it is an error of txnbridge without data."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(map(loggable, error.exceptions))
    return reason_of(error) if isinstance(error, TxnBridgeError | Poison) else type(error).__name__


def handler_location(error: BaseException, caller: str = "") -> str:
    """Return an error as text with the file and line of the handler from which it came, possibly through libraries.

    `caller` is the file of the module of txnbridge that called the handler. It is not needed for an error that was
    caught there.
    """
    frames = traceback.extract_tb(error.__traceback__)
    calls = [index for index, frame in enumerate(frames) if frame.filename == caller]
    inside = [f for f in frames[calls[-1] + 1 if calls else 0 :] if not f.filename.startswith(_PACKAGE)]
    place = next((f for f in reversed(inside) if f.filename == inside[0].filename), None)
    return loggable(error) if place is None else f"{loggable(error)} at {place.filename}:{place.lineno}"


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and, recursively, its `__cause__` or `__context__`, and the errors in a task group's error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        for one in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
            yield from causes(one)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
