"""Bridges to the brokers of a span, whose ends of parts by token a test sees, and may let fail."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

from txnbridge import Bridge, Outcome

End = Callable[[int, Callable[[], Outcome]], Outcome]  # is given its number among those of its name, and the call


class Ends:
    """The timeouts of the ends "commit" and "abort" so far, and in `by` what answers them in the bridges' stead."""

    def __init__(self) -> None:
        self.timeouts: dict[str, list[Any]] = defaultdict(list)
        self.by: dict[str, End] = {}

    def end(self, name: str, bridge: Bridge, *given: Any) -> Outcome:
        self.timeouts[name].append(given[1] if len(given) > 1 else None)
        call: Callable[[], Outcome] = partial(getattr(bridge, name), *given)
        return self.by[name](len(self.timeouts[name]) - 1, call) if name in self.by else call()


class EndedBridge:
    """A bridge, but for its ends by token."""

    admin: Any

    def __init__(self, bridge: Bridge, ends: Ends) -> None:
        self.bridge = bridge
        self.commit, self.abort = (partial(ends.end, name, bridge) for name in ("commit", "abort"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bridge, name)


def failing(error: Exception, *numbers: int, happens: bool = False) -> End:
    """Let the ends of these numbers raise the error, without numbers all; with `happens` they happen all the same."""

    def end(number: int, call: Callable[[], Outcome]) -> Outcome:
        fails = number in numbers or not numbers
        outcome = None if fails and not happens else call()
        if fails:
            raise error
        assert outcome is not None
        return outcome

    return end
