"""Stand-ins for functions: they fail, answer or tell what they are given, as a test says."""

from collections.abc import Callable, Container
from itertools import count
from typing import Any, NoReturn

import pytest

EACH = range(1 << 30)


def raising(error: BaseException | type[BaseException]) -> Callable[..., NoReturn]:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail


def replace_method(patch: pytest.MonkeyPatch, owner: object, name: str, by: Callable[..., object]) -> None:
    """Let `by` answer each call, by the method that it replaces and what the call is given."""
    call = getattr(owner, name)
    patch.setattr(owner, name, lambda *given, **named: by(call, *given, **named))


def on_call(patch: pytest.MonkeyPatch, owner: object, name: str, act: Callable[..., object]) -> None:
    """Let `act` see what each call is given before the call happens."""
    replace_method(patch, owner, name, lambda call, *given, **named: (act(*given, **named), call(*given, **named))[1])


def _given(*given: Any, **_: Any) -> Any:
    return given


def note_calls(patch: pytest.MonkeyPatch, owner: object, name: str, note: Callable[..., Any] = _given) -> list[Any]:
    """Return a list of what `note` says of each call, by what it is given; the calls happen."""
    noted: list[Any] = []
    on_call(patch, owner, name, lambda *given, **named: noted.append(note(*given, **named)))
    return noted


def answer_calls(
    patch: pytest.MonkeyPatch, owner: object, name: str, answer: object = None, note: Callable[..., Any] = _given
) -> list[Any]:
    """Let each call return `answer` and do nothing; return a list of what `note` says of each, by what it is given."""
    replace_method(patch, owner, name, lambda *_, **__: answer)
    return note_calls(patch, owner, name, note)


def fail_call(
    patch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    error: BaseException | type[BaseException],
    number: int | Container[int] = 0,
    happens: bool = False,
    when: Callable[..., object] = lambda *_, **__: True,
) -> list[Any]:
    """Let the call of this number, counted from 0 among those for which `when` holds, raise the error.

    The other calls happen, and with `happens` this one, too, before its error. Return a list of what is given to those
    that fail.
    """
    calls, failed = count(), list[Any]()
    numbers = (number,) if isinstance(number, int) else number

    def called(call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        fails = when(*given, **named) and next(calls) in numbers
        done = None if fails and not happens else call(*given, **named)
        if fails:
            failed.append(given)
            raise error
        return done

    replace_method(patch, owner, name, called)
    return failed
