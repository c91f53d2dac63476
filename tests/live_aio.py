"""Tasks of an event loop on a live broker: many transactions at once, some cancelled, and a processor beside them."""

import anyio
import pytest
from txnbridge_conformance.observing import seen

from txnbridge import Abort, Bridge, Message, Outcome, aio

TASKS = 50
SOON = 120.0


async def transact(bridge: aio.Bridge, topics: list[str], number: int, done: dict[int, aio.Transaction]) -> None:
    """Commit one message in each topic; abort every fifth transaction, and cancel the commit of every seventh."""
    with anyio.CancelScope() as scope:
        async with bridge.transaction() as txn:
            done[number] = txn
            for topic in topics:
                await txn.send(topic, b"%d" % number)
            if number % 5 == 0:
                raise Abort
            if number % 7 == 0:
                scope.deadline = anyio.current_time() + 0.001
    await txn.settle()


async def work(url: str, group: str, topics: list[str], out: str) -> dict[int, aio.Transaction]:
    done: dict[int, aio.Transaction] = {}

    async def pass_on(message: Message, txn: aio.Transaction) -> None:
        await txn.send(out, message.value)

    async with aio.connect(url, timeout=60) as bridge:
        async with bridge.processor(topics[0], group=group, each=pass_on) as processor:
            async with anyio.create_task_group() as tasks:
                for number in range(TASKS):
                    tasks.start_soon(transact, bridge, topics, number, done)
            committed = sum(txn.outcome is Outcome.COMMITTED for txn in done.values())
            with anyio.fail_after(SOON):
                while processor.stats.messages < committed:
                    await anyio.sleep(0.05)
    return done


def check_tasks(backend: str, url: str, bridge: Bridge, topics: list[str], out: str) -> None:
    """Run the tasks on an event loop, and compare what they were told with what `bridge` reads."""
    done = anyio.run(work, url, f"group-{topics[0]}", topics, out, backend=backend)
    assert {txn.outcome for txn in done.values()} == {Outcome.COMMITTED, Outcome.ABORTED}
    committed = sorted(b"%d" % number for number, txn in done.items() if txn.outcome is Outcome.COMMITTED)
    assert len(committed) >= TASKS // 2
    for topic in (*topics, out):
        assert sorted(message.value for message in seen(bridge, topic)) == committed


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_transactions_of_many_tasks_are_whole_and_told_as_they_ended(txnbridge_url, bridge, new_topic, backend):
    check_tasks(backend, txnbridge_url, bridge, [new_topic(2), new_topic(2)], new_topic(2))
