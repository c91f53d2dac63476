"""What a commit says after the network failed, besides what test_outcomes shows: the table in docs/kafka.md."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from txnbridge_conformance import faults
from txnbridge_conformance.brokers._broker import wait_until
from txnbridge_conformance.looking import seen, send, values

import txnbridge
from txnbridge import Bridge, Outcome, Transaction
from txnbridge.errors import OutcomeUnknown
from txnbridge.spi import TokenState

# The deadline of a transaction: as long as a test waits for an answer that does not come. The other is for the rest,
# and is what the broker lets a transaction live.
SHORT, LONG = 5.0, 20.0


@pytest.fixture
def through(proxy: faults.Proxy, owner: str) -> Iterator[Bridge]:
    """A bridge with one writer behind the proxy."""
    with txnbridge.connect(proxy.url, writers=1, timeout=LONG, transactional_id=owner) as bridge:
        yield bridge
        proxy.release()


def store(txn: Transaction) -> None:
    """Return when everything is stored, so that only the commit is left to be sent."""
    txn._writer.flush(txn._begin.deadline)


def test_when_the_connection_drops_and_comes_back_it_is_committed(proxy, through, bridge, topic):
    with through.transaction(timeout=SHORT) as txn:
        txn.send(topic, b"1")
        store(txn)
        answer = proxy.hold(answers="EndTxn")

        def cut() -> None:
            answer.wait()
            proxy.cut()

        cutting = threading.Thread(target=cut)
        cutting.start()
    cutting.join()
    assert txn.outcome is Outcome.COMMITTED
    assert values(seen(bridge, topic)) == [b"1"]


@pytest.mark.full
def test_when_the_request_is_lost_and_nobody_comes_back_it_is_aborted_when_its_time_is_over(
    proxy, through, bridge, topic
):
    with pytest.raises(OutcomeUnknown) as caught:
        with through.transaction(timeout=SHORT) as txn:
            txn.send(topic, b"never")
            store(txn)
            proxy.hold(requests="EndTxn", count=None)
    assert wait_until(lambda: bridge.status(caught.value.token).state is TokenState.ABORTED, 60)
    send(bridge, topic, b"next")
    assert values(seen(bridge, topic)) == [b"next"]
