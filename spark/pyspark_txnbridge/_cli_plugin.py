"""The plug-in that adds `txnbridge spark` and `txnbridge pipeline` to the command line.

Every bridge loads this module, so its functions import other modules only when a command runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from txnbridge import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def txnbridge_commands() -> list[click.Command]:
    """Return the commands about Spark queries and pipelines."""
    from pyspark_txnbridge._commands import pipeline_command, spark_command

    return [spark_command, pipeline_command]
