"""Bridges to the brokers of a span. A test sees the calls that prepare and end parts, and may let them fail."""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from tests.conformance.broken import Around, around
from txnbridge import Bridge, connect

# Answers a call, by its number among those of its name, and by the call itself, with what it is given.
Answer = Callable[[int, "partial[Any]"], Any]


class Ends:
    """What each call was given, by its name, and in `by` what answers it in the broker's stead.

    "commit" and "abort" end parts by token; "prepare", "store" and "drop" (an abort) are those of their writers, and
    "put" stores a span's record, "checks" asks for those of dead processes, and "rewind" takes a reader back.
    """

    def __init__(self) -> None:
        self.given: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
        self.by: dict[str, Answer] = {}

    def end(self, name: str, call: Callable[..., Any], *given: Any) -> Any:
        self.given[name].append(given)
        ended = partial(call, *given)
        return self.by[name](len(self.given[name]) - 1, ended) if name in self.by else ended()

    def parts(self) -> dict[str, type[Around]]:
        """Return the parts of a broken broker that tell their calls here."""
        return {
            "Preparing": around(
                prepare=lambda inner, *given: self.end("prepare", inner.prepare, *given),
                store=lambda inner, *given: self.end("store", inner.store, *given),
                abort=lambda inner, *given: self.end("drop", inner.abort, *given),
            ),
            "Reading": around(rewind=lambda inner, *given: self.end("rewind", inner.rewind, *given)),
            "Halving": around(
                put=lambda inner, *given: self.end("put", inner.put, *given),
                checks=lambda inner, *given: self.end("checks", inner.checks, *given),
            ),
        }


@contextmanager
def span_pair(folder: str, ends: Ends, like: str = "") -> Iterator[tuple[Any, Any]]:
    """Open bridges to two brokers in a folder, of which `ends` is told; check that it was told what it answers."""
    with connect(f"{folder}/a.db{like}") as a, connect(f"{folder}/b.db") as b:
        yield EndedBridge(a, ends), EndedBridge(b, ends)
    assert all(ends.given[name] for name in ends.by), "such a call has not come"


def addresses(pair: tuple[Any, Any]) -> list[str]:
    """Return the URLs of these brokers for other processes."""
    return [re.sub("^broken-made[0-9]+", "embedded", bridge.url) for bridge in pair]


class EndedBridge:
    """A bridge, but for its ends by token."""

    admin: Any

    def __init__(self, bridge: Bridge, ends: Ends) -> None:
        self.bridge = bridge
        self.commit, self.abort = (partial(ends.end, name, getattr(bridge, name)) for name in ("commit", "abort"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bridge, name)


def no_checks(*_: object) -> list[object]:
    time.sleep(0.1)
    return []


def failing(error: Exception, *numbers: int, happens: bool = False) -> Answer:
    """Let the calls of these numbers raise the error, without numbers all; with `happens` they happen all the same."""

    def answer(number: int, call: Callable[[], Any]) -> Any:
        fails = number in numbers or not numbers
        done = None if fails and not happens else call()
        if fails:
            raise error
        return done

    return answer
