"""Exactly-once writing from PySpark to every broker that txnbridge speaks to.

    df.write.format("txnbridge").option("url", "kafka://broker:9092").option("topic", "orders").mode("append").save()

Spark imports every installed module whose name begins with `pyspark_`, and a module that fails to import takes all
Python data sources down, so importing this package never fails. The package imports a module only when one of its names
is accessed, because txnbridge itself loads the package to find its commands.

Spark's JVM and executors start the Python that `PYSPARK_PYTHON` names, else `python3`, which in a virtual environment
does not have this package. So importing it in a driver names the driver's own Python, unless the variable is set.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark_txnbridge._batch_logger import BatchLogger
    from pyspark_txnbridge._read.offset_lag import offsets_behind
    from pyspark_txnbridge._source import DefaultSource
    from pyspark_txnbridge._write.batch_identity import BatchInDoubt
    from pyspark_txnbridge._write.foreach import write_exactly_once

__all__ = ["BatchInDoubt", "BatchLogger", "DefaultSource", "offsets_behind", "write_exactly_once"]

_MODULES = {
    "BatchInDoubt": "_write.batch_identity",
    "BatchLogger": "_batch_logger",
    "DefaultSource": "_source",
    "offsets_behind": "_read.offset_lag",
    "write_exactly_once": "_write.foreach",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        try:
            return getattr(importlib.import_module(f"pyspark_txnbridge.{_MODULES[name]}"), name)
        except ImportError as error:
            # PySpark is missing, or too old to write Arrow batches. Spark looks names up with hasattr().
            raise AttributeError(f"pyspark_txnbridge.{name} needs PySpark 4.1 or newer: {error}") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _PySparkImport:
    """A finder that finds no module: when PySpark is imported, it sets the Python of Spark's workers to this one."""

    @staticmethod
    def find_spec(name: str, *more: object) -> None:
        # `spark-submit` has chosen its Python before it started this one, and a worker starts no Spark.
        if name == "pyspark" and not os.environ.keys() & {"PYSPARK_GATEWAY_PORT", "PYTHON_WORKER_FACTORY_SECRET"}:
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


sys.meta_path.insert(0, _PySparkImport)
if "pyspark" in sys.modules:
    _PySparkImport.find_spec("pyspark")
