"""A program that is cancelled anywhere: each transaction happens as a whole or not at all, and what is told is true."""

from functools import partial

import anyio
import pytest

import txnbridge
from tests.aio.kit import MOMENTS, Cancelling
from txnbridge import Outcome, State, aio


class Program:
    """Transactions of all kinds, each with a number and one message of this number in two topics."""

    def __init__(self, url: str, group_commit: bool | None) -> None:
        self.url = url
        self.group_commit = group_commit
        self.transactions: dict[int, aio.Transaction] = {}
        self.told: dict[int, Outcome | None] = {}
        self.bridge: aio.Bridge | None = None

    async def run(self) -> None:
        async with aio.connect(self.url, timeout=20, group_commit=self.group_commit) as self.bridge:
            try:
                await self._work(self.bridge)
            finally:
                self.told = {number: txn.outcome for number, txn in self.transactions.items()}

    async def _work(self, bridge: aio.Bridge) -> None:
        async with bridge.transaction() as txn:
            await self._send(1, txn)
        await self._consume(bridge)
        txn = await bridge.transaction()
        async with txn:
            await self._send(3, txn)
            await txn.abort()
        with pytest.raises(ZeroDivisionError):
            async with bridge.transaction(group_commit=False) as txn:
                await self._send(4, txn)
                raise ZeroDivisionError
        async with bridge.transaction(prepare=True) as txn:
            await self._send(5, txn)
        assert txn.token is not None
        await bridge.commit(txn.token)

    async def _consume(self, bridge: aio.Bridge) -> None:
        async with bridge.consumer("in", "group") as consumer:
            batch = await consumer.poll(timeout=20)
            async with bridge.transaction() as txn:
                await txn.ack(batch)
                await self._send(2, txn)
                await txn.commit()

    async def _send(self, number: int, txn: aio.Transaction) -> None:
        self.transactions[number] = txn
        await txn.send("a", b"%d" % number)
        await txn.send_many("b", [b"%d" % number])


def judge(program: Program, url: str) -> set[int]:
    """Check what a reader finds against what the program was told; return the numbers that it finds."""
    with txnbridge.connect(url) as bridge:
        with bridge.consumer(["a", "b"]) as consumer:
            found = sorted((message.topic, int(message.value)) for message in consumer.poll(timeout=0))
        with bridge.consumer("in", "group") as consumer:
            again = [message.value for message in consumer.poll(timeout=0)]
        assert [left for left in bridge.admin.transactions() if left.state != "prepared"] == []
    happened = {number for _, number in found}
    assert found == [(topic, number) for topic in "ab" for number in sorted(happened)]
    assert again == ([] if 2 in happened else [b"in"])
    for number, txn in program.transactions.items():
        assert program.told[number] in (None, Outcome.UNKNOWN, txn.outcome)
        if txn.state is not State.PREPARED:
            assert txn.outcome is (Outcome.COMMITTED if number in happened else Outcome.ABORTED)
    return happened


# In the gate each moment once, and each way.
ALWAYS = [("asyncio", "before"), ("trio", "queued"), ("task.cancel", "running"), ("asyncio", "ended")]


@pytest.mark.parametrize(
    ("how", "moment"),
    [
        pytest.param(how, moment, marks=() if (how, moment) in ALWAYS else pytest.mark.full)
        for how in ("asyncio", "trio", "task.cancel")
        for moment in MOMENTS
    ],
)
def test_a_program_that_is_cancelled_anywhere_leaves_whole_transactions_and_tells_the_truth(
    how, moment, tmp_path, monkeypatch
):
    natively = how == "task.cancel"
    run = partial(anyio.run, backend="asyncio" if natively else how)
    for number in range(1, 100):
        url = f"embedded:{tmp_path}/{number}.db"
        with txnbridge.connect(url) as bridge:
            bridge.ensure_topics("a", "b")
            with bridge.transaction() as txn:
                txn.send("in", b"in")
        program = Program(url, group_commit=how == "trio" or None)
        with monkeypatch.context() as patch:
            cancelling = Cancelling(patch, number, moment, natively)
            run(cancelling.run, program.run)
        happened = judge(program, url)
        if not cancelling.reached:
            break
    assert number > 15 and happened == {1, 2, 5}
