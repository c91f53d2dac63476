"""The data source, whose tasks also say how much memory their process has had at most."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.types import StructType
from pyspark_txnbridge._source import BatchWriter, DefaultSource, TaskMessage

from tests.spark.naive import given

FILE = "TXNBRIDGE_TEST_MEASURED"


class _Writer(BatchWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskMessage:
        message = super().write(iterator)
        with open(os.environ[FILE], "a") as file:
            file.write(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}\n")
        return message


class Measured(DefaultSource):
    @classmethod
    def name(cls) -> str:
        return "measured"

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        return _Writer(*given(super().writer(schema, overwrite)))
