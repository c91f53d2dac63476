"""Small transactions, one after another, on a bridge that threads may share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks._harness import Contender, Lap
from txnbridge import Bridge

BODY = bytes(100)


def small(bridge: Bridge, topic: str) -> Contender:
    @contextmanager
    def contender() -> Iterator[Lap]:
        def lap() -> int:
            with bridge.transaction() as txn:
                txn.send(topic, BODY)
            return 1

        yield lap

    return contender
