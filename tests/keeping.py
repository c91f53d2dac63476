"""The body of fixtures that open as many of a kind as their test asks for, and close them in the end."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any


def keeping(
    open_one: Callable[..., Any], close: Callable[[Any], object] = lambda opened: opened.close()
) -> Iterator[Callable[..., Any]]:
    """Yield a function that opens one as `open_one` does; in the end close all, the last one first."""
    with ExitStack() as stack:

        def open_and_keep(*args: Any, **how: Any) -> Any:
            opened = open_one(*args, **how)
            stack.callback(close, opened)
            return opened

        yield open_and_keep
