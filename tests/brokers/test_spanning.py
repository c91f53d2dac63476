"""Spans over two real brokers: everything is copied once, wherever the process dies."""

import time
import uuid
from functools import partial
from itertools import permutations
from pathlib import Path

import pytest
import sqlalchemy as sa

import txnbridge
from tests.core.half.span_programs import Pair, copy_all, send_and_wait
from tests.in_time import wait_until
from tests.sql.span_programs import Shop, rows, sell_all
from txnbridge.testing.child_processes import Child

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

STEPS = {"prepare/after", "half.store/after", "resolve/before", "resolve/after", "half.end/before"}
SALE_STEPS = {"prepare/after", "half.store/after", "database.commit/before", "database.commit/after", "resolve/before"}
# Each pair takes minutes: a dead member of a group has to be missed, and the time of a span to be over.
SOON = [("embedded", "kafka"), ("kafka", "pulsar"), ("pulsar", "rocketmq"), ("rocketmq", "kafka")]
PAIRS = [
    pytest.param(*pair, marks=[] if pair in SOON else [pytest.mark.full])
    for pair in permutations(["embedded", "kafka", "pulsar", "rocketmq"], 2)
]


def url_of(request: pytest.FixtureRequest, name: str) -> str:
    """Return the URL of a broker that is started at its first use. Dead members of groups are noticed soon."""
    broker = request.getfixturevalue(f"{name}_broker")
    options = {
        "kafka": "session.timeout.ms=6000&heartbeat.interval.ms=300&half_check_seconds=0.5",
        "pulsar": f"admin_url={broker.admin_url}&half_check_seconds=0.5",
        "rocketmq": "tls=false",
    }
    return f"{broker.url}?{options[name]}"


def reads(bridge: txnbridge.Bridge, topic: str, values: list[bytes]) -> bool:
    return sorted(message.value or b"" for message in bridge.read(topic, 100)) == values


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_everything_is_copied_once_wherever_its_process_dies(request, tmp_path, kill_walk, source, target):
    urls = [f"embedded:{tmp_path}/a.db" if name == "embedded" else url_of(request, name) for name in (source, target)]
    everything = [b"0", b"1", b"2", b"3"]
    with txnbridge.connect(urls[0]) as first, txnbridge.connect(urls[1]) as second:

        def fresh() -> Pair:
            name = uuid.uuid4().hex[:8]
            made = Pair(urls[0], urls[1], f"source-{name}", f"target-{name}", timeout=10)
            first.ensure_topics(made.source, made.target)
            second.ensure_topics(made.target)
            with first.transaction() as txn:
                txn.send_many(made.source, everything)
            return made

        def check(made: Pair) -> None:
            for bridge in (first, second):
                wait_until(partial(reads, bridge, made.target, everything))

        kill_walk(copy_all, check, fresh, STEPS, at_once=4, timeout=180)


@pytest.mark.parametrize(("one", "other"), [("kafka", "rocketmq"), ("rocketmq", "pulsar")])
def test_a_database_decides_about_everything_wherever_its_process_dies(request, tmp_path, kill_walk, one, other):
    urls = url_of(request, one), url_of(request, other)
    with txnbridge.connect(urls[0]) as first, txnbridge.connect(urls[1]) as second:

        def fresh() -> Shop:
            name = uuid.uuid4().hex[:8]
            engine = sa.create_engine(f"sqlite:///{tmp_path}/{name}.db")
            with engine.begin() as connection:
                connection.exec_driver_sql("CREATE TABLE sales (number INTEGER)")
            engine.dispose()
            for bridge in (first, second):
                bridge.ensure_topics(name)
            return Shop(*urls, str(engine.url), topic=name, timeout=15)

        def check(shop: Shop) -> None:
            engine = sa.create_engine(shop.database)
            assert rows(engine) == [0, 1]
            engine.dispose()
            for bridge in (first, second):
                wait_until(partial(reads, bridge, shop.topic, [b"0", b"1"]))

        kill_walk(sell_all, check, fresh, SALE_STEPS, at_once=4, timeout=180)


def test_a_dead_process_s_open_part_on_kafka_is_aborted_before_its_hold(request: pytest.FixtureRequest, tmp_path: Path):
    here, kafka, topic = f"embedded:{tmp_path}/a.db", url_of(request, "kafka"), uuid.uuid4().hex
    with txnbridge.connect(here) as first, txnbridge.connect(kafka) as second:
        second.ensure_topics(topic)
        with Child(send_and_wait, here, kafka, topic) as child:
            child.told()
            wait_until(lambda: any(each.prepares_until for each in second.admin.transactions()))
            child.kill()
        with second.transaction() as txn:
            txn.send(topic, b"behind")
        with txnbridge.spanning(first, second):
            pass
        until = time.monotonic() + 200  # 5 s for the span, a minute for other clocks; the hold is ten minutes
        while not (found := [message.value for message in second.read(topic, 9)]) and time.monotonic() < until:
            time.sleep(1)
        assert found == [b"behind"]
