"""Functions that fail as a test says, in place of what they stand for."""

from collections.abc import Callable
from itertools import count
from typing import Any, NoReturn

import pytest


def raising(error: BaseException | type[BaseException]) -> Callable[..., NoReturn]:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail


def fail_call(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, error: BaseException, number: int = 0) -> None:
    """Let the call of this number, counted from 0, raise the error; the others happen."""
    call, calls = getattr(owner, name), count()

    def called(*given: Any, **named: Any) -> Any:
        if next(calls) == number:
            raise error
        return call(*given, **named)

    monkeypatch.setattr(owner, name, called)
