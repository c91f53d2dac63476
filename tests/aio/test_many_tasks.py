"""Many tasks at once on the embedded broker, as on the real ones."""

from __future__ import annotations

import pytest

import txnbridge
from tests.live_aio import check_tasks
from txnbridge import Topic


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_transactions_of_many_tasks_are_whole_and_told_as_they_ended(url, backend):
    with txnbridge.connect(url) as bridge:
        bridge.ensure_topics(*(Topic(name, partitions=2) for name in ("in", "beside", "out")))
        check_tasks(backend, url, bridge, ["in", "beside"], "out")
