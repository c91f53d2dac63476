"""Calls a processor's handler inside the context managers of plug-ins, for example to trace it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from txnbridge._base.messages import Message

_log = logging.getLogger("txnbridge")

# Given the messages and the group of the processor.
MakeContext = Callable[[Sequence[Message], str], AbstractContextManager[object]]


def call_inside(
    makers: Sequence[MakeContext], messages: Sequence[Message], group: str, handler: Callable[..., object], *args: Any
) -> None:
    """Call the handler. An error of a plug-in is logged, and neither raised nor able to hide one of the handler."""
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
