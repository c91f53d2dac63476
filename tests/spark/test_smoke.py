"""PySpark in every run, on the embedded broker: what is run again is written once, and read back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyspark.sql", reason="needs PySpark")

from tests.spark import kit, test_reader, test_writer
from tests.spark.test_reader import topic  # noqa: F401

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def spark(spark_faults: Path) -> Iterator[object]:
    """Gone with its test: nothing runs beside a broker."""
    with kit.local_spark(spark_faults) as session:
        yield session


@pytest.fixture
def url(tmp_path):
    return f"embedded:{tmp_path / 'broker.db'}"


def test_a_job_that_is_run_again_is_not_published_twice_and_a_batch_reads_what_is_committed(
    spark,
    sink,
    url,
    bridge,
    topic,  # noqa: F811
):
    """Run two tests in one session, which takes longer to start than the tests take."""
    test_writer.test_a_named_job_that_is_run_again_is_not_published_twice(spark, sink)
    test_reader.test_a_batch_reads_what_is_committed_now(spark, url, bridge, topic)
