"""Tests of turning columns into messages, without Spark and without a broker."""

from __future__ import annotations

import pytest

pa = pytest.importorskip("pyarrow", reason="needs pyarrow")
from pyspark_txnbridge._write.rows import Columns, _warn_of_ignored_timestamps  # noqa: E402

from txnbridge import InvalidOption  # noqa: E402

pytestmark = pytest.mark.offline

KINDS = {
    "value": pa.string(),
    "key": pa.string(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
}


def fingerprint(*rows, topic=None, columns=tuple(KINDS)):
    arrays = [pa.array([row.get(name) for row in rows], KINDS[name]) for name in columns]
    batch = pa.RecordBatch.from_arrays(arrays, list(columns))
    return Columns(frozenset(columns), topic).send(batch, None).fingerprint


@pytest.mark.parametrize(
    "other",
    [
        {"topic": "another"},
        {"partition": 0},
        {"timestamp": 1_700_000_000_000_000},
        {"headers": [{"key": "a", "value": b"1"}]},
    ],
    ids=lambda other: next(iter(other)),
)
def test_rows_that_differ_in_any_column_have_another_fingerprint(other):
    row = {"value": "1", "key": "k", "topic": "one"}
    assert fingerprint(row | other) != fingerprint(row)
    second = {"value": "2", "key": "k", "topic": "one"}
    assert fingerprint(row | other, second) != fingerprint(row, second | other)
    assert fingerprint(row | other, second) == fingerprint(second, row | other)


@pytest.mark.parametrize("header", [None, {"key": None, "value": b"1"}], ids=["null", "null key"])
def test_a_header_without_a_name_is_refused_by_its_column(header):
    with pytest.raises(InvalidOption, match="column headers"):
        fingerprint({"value": "1", "headers": [header]}, topic="out")


def test_columns_without_anything_do_not_change_a_fingerprint():
    row = {"value": "1", "key": "k"}
    short = fingerprint(row, topic="out", columns=("value", "key"))
    assert fingerprint(row | {"headers": []}, topic="out") == short
    assert fingerprint(row | {"topic": "unused"}, topic="out") == short
    assert fingerprint(row | {"timestamp": -1_000}, topic="out") == short  # of a message of Kafka without a time
    assert fingerprint({"value": "1"}, topic="out") == fingerprint({"value": "1"}, topic="out", columns=("value",))


def test_the_column_timestamp_is_ignored_with_a_warning_unless_an_option_asks_for_it(caplog):
    types = pytest.importorskip("pyspark.sql.types", reason="needs PySpark")
    schema = types.StructType().add("value", "string").add("timestamp", "timestamp").add("topic", "string")
    _warn_of_ignored_timestamps.cache_clear()
    assert Columns.of(schema, None).names == {"value", "topic"}
    assert Columns.of(schema.add("key", "string"), None).names == {"value", "topic", "key"}
    assert caplog.text.count("the column timestamp is ignored") == 1
    assert "timestamp" in Columns.of(schema, None, timestamps=True).names
    Columns.of(types.StructType().add("value", "string").add("timestamp", "string"), "topic")  # Spark's sink takes it
