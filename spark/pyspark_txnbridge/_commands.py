"""The plug-in that brings `txnbridge spark` and `txnbridge pipeline`.

It is loaded with every bridge, so it imports nothing before it must.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from txnbridge import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def txnbridge_commands() -> list[click.Command]:
    """The commands about Spark queries."""
    from pyspark_txnbridge._pipeline_command import command as pipeline
    from pyspark_txnbridge._query_command import command as query

    return [query, pipeline]
