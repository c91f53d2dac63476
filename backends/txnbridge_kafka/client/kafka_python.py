"""The only module that imports kafka-python.

kafka-python's request classes are not documented and have moved before, so only one minor version is supported.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import socket
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from txnbridge.errors import BackendMissing
from txnbridge_kafka.settings.security import OAuthTokens

__all__ = [
    "AddOffsetsToTxnRequest",
    "ApiVersionsRequest",
    "CreatePartitionsRequest",
    "CreateTopicsRequest",
    "DeleteRecordsRequest",
    "DeleteTopicsRequest",
    "DescribeConfigsRequest",
    "DescribeProducersRequest",
    "DescribeTransactionsRequest",
    "EndTxnRequest",
    "FindCoordinatorRequest",
    "InitProducerIdRequest",
    "KafkaConnectionManager",
    "ListOffsetsRequest",
    "ListTransactionsRequest",
    "MetadataRequest",
    "OffsetFetchRequest",
    "TxnOffsetCommitRequest",
    "WriteTxnMarkersRequest",
    "check_version",
    "errors",
    "event_loop",
    "quiet",
    "silence",
]

_import_failed: ImportError | None = None
with warnings.catch_warnings():
    # kafka-python loads its schemas by a function that is deprecated in Python 3.11 and 3.12, and not in 3.13.
    warnings.simplefilter("ignore", DeprecationWarning)
    try:
        from kafka import errors  # type: ignore[import-untyped]
        from kafka.net.manager import KafkaConnectionManager  # type: ignore[import-untyped]
        from kafka.net.sasl.oauth import AbstractTokenProvider  # type: ignore[import-untyped]
        from kafka.net.selector import NetworkSelector  # type: ignore[import-untyped]
        from kafka.protocol.admin import (  # type: ignore[import-untyped]
            CreatePartitionsRequest,
            CreateTopicsRequest,
            DeleteRecordsRequest,
            DeleteTopicsRequest,
            DescribeConfigsRequest,
            DescribeProducersRequest,
            DescribeTransactionsRequest,
            ListTransactionsRequest,
        )
        from kafka.protocol.consumer import ListOffsetsRequest, OffsetFetchRequest  # type: ignore[import-untyped]
        from kafka.protocol.metadata import ApiVersionsRequest, FindCoordinatorRequest, MetadataRequest  # type: ignore[import-untyped]
        from kafka.protocol.producer import (  # type: ignore[import-untyped]
            AddOffsetsToTxnRequest,
            EndTxnRequest,
            InitProducerIdRequest,
            TxnOffsetCommitRequest,
            WriteTxnMarkersRequest,
        )

        AbstractTokenProvider.register(OAuthTokens)  # kafka-python takes no other provider
    except ImportError as error:  # kafka-python is missing or has moved a class: `check_version` raises the error
        _import_failed = error


def check_version() -> None:
    """Raise `BackendMissing` unless kafka-python is installed in the one minor version that is supported."""
    try:
        version = importlib.metadata.version("kafka-python")
    except importlib.metadata.PackageNotFoundError:
        raise BackendMissing(
            "kafka-python is not installed: in a clone of txnbridge, pip install -e '.[kafka]'"
        ) from None
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if not (3, 0, 12) <= numbers < (3, 1):
        raise BackendMissing(
            f"kafka-python {version} is installed and not supported: pip install 'kafka-python>=3.0.12,<3.1'"
        )
    if _import_failed is not None:
        raise BackendMissing(
            f"kafka-python {version} is installed and cannot be imported: {_import_failed}. One cause is a file in your"
            " program's directory with the name of a module of Python's standard library"
        ) from _import_failed


def event_loop(sockets: list[socket.socket]) -> Any:
    """Return an event loop of kafka-python that adds each of its sockets to `sockets`.

    The caller closes the sockets, because kafka-python leaks a socket that never connected.
    """

    class Loop(NetworkSelector):  # type: ignore[misc]
        def wait_read(self, fileobj: Any, timeout_at: float | None = None) -> Any:
            _track(sockets, fileobj)
            return super().wait_read(fileobj, timeout_at)

        def wait_write(self, fileobj: Any, timeout_at: float | None = None) -> Any:
            _track(sockets, fileobj)
            return super().wait_write(fileobj, timeout_at)

    return Loop()


def _track(sockets: list[socket.socket], new: socket.socket) -> None:
    if new not in sockets:
        sockets[:] = [each for each in sockets if each.fileno() >= 0] + [new]


_thread = threading.local()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop the log lines that kafka-python writes on this thread, by the filter that `silence` installs."""
    _thread.quiet = True
    try:
        yield
    finally:
        _thread.quiet = False


def _is_not_quiet(record: logging.LogRecord) -> bool:
    return not getattr(_thread, "quiet", False)


def silence() -> None:
    """Install the filter for `quiet`. Log lines of the application's own kafka-python clients are kept."""
    # A logger's filter does not apply to its child loggers, so each logger gets the filter.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("kafka."):
            logging.getLogger(name).addFilter(_is_not_quiet)
