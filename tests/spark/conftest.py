from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark_txnbridge._write.sink_options import SinkOptions
from txnbridge_conformance import brokers

import txnbridge
from tests.spark import kit
from txnbridge import Bridge


@pytest.fixture(
    params=["embedded", "kafka", *(pytest.param(name, marks=pytest.mark.full) for name in ("pulsar", "rocketmq"))]
)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A broker; but on the embedded one each test has topics of its own."""
    if request.param == "embedded":
        return f"embedded:{tmp_path / 'broker.db'}"
    broker: brokers.Broker
    if request.param == "loaded rocketmq":
        broker = request.getfixturevalue("start_rocketmq")(settings=kit.LOADED_ROCKETMQ)
    else:
        broker = request.getfixturevalue(f"{request.param}_broker")
    return f"{broker.url}?admin_url={broker.admin_url}" if broker.admin_url else broker.url


@pytest.fixture
def bridge(url: str) -> Iterator[Bridge]:
    """Return a bridge that creates no topics."""
    with txnbridge.connect(url, create_topics=0) as bridge:
        yield bridge


@pytest.fixture
def query() -> str:
    """The id of a query that nobody has run."""
    return kit.new_run()


@pytest.fixture
def sink(url: str) -> SinkOptions:
    """The options of a sink with a topic and ids of its own."""
    return kit.options(url, topic=f"out-{kit.new_run()}", transactionalIdPrefix=f"test-{kit.new_run()}")


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    yield
    kit.forget()


@pytest.fixture(scope="session")
def spark_faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder by which a test sets faults in the processes of `spark`."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="session")
def spark(spark_faults: Path) -> Iterator[object]:
    with kit.local_spark(spark_faults) as session:
        yield session


@pytest.fixture
def start(sink, query):
    return sink, query
