"""Connections that a Spark process keeps after a task or a commit, because Spark mostly reuses its Python processes."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import txnbridge
from pyspark_txnbridge._write.sink_options import SinkOptions, as_keywords
from txnbridge import Bridge, BrokerUnavailable, InvalidOption, TxnBridgeError

_log = logging.getLogger("txnbridge.spark")

# Types from the decision log's interface. The id of a batch's claim is (query, sink, batch, attempt).
Claim = Any
Opening = Any

# The most idle clients that one pool keeps: a process may serve several queries, each with several sinks.
_MAX_IDLE_CLIENTS = 8
# The pause between two attempts to connect to a broker that cannot be reached.
_RECONNECT_SECONDS = 0.5


class SinkSession:
    """A process's connection to a sink's decision log and to the broker's transactions."""

    def __init__(self, options: SinkOptions, application: str) -> None:
        self.options, self.bridge = options, connect(options, application)
        self.target = {"topic": options.topic, "cluster": self.bridge.cluster}
        try:
            self.decisions = self.bridge.decisions()
        except BaseException:
            self.bridge.close()
            raise

    def close(self) -> None:
        self.bridge.close()


def connect(options: SinkOptions, application: str, transactional_id: str | None = None) -> Bridge:
    try:
        return connect_with_retry(
            options.commit_timeout,
            lambda: txnbridge.connect(
                options.url,
                transactional_id=transactional_id,
                application=application,
                timeout=options.commit_timeout,
                create_topics=options.create_topics,
                writers=1,
                decision_log=options.log_url,
                **as_keywords(options.settings),
            ),
        )
    except InvalidOption as error:
        if not str(error).startswith("timeout and hold are"):
            raise
        raise InvalidOption(f"{error}. A sink of Spark sets this timeout with its option commitTimeout") from None


def connect_with_retry(seconds: float, connect: Callable[[], Bridge]) -> Bridge:
    """Connect to a broker that may be away for some seconds, as a restarting broker is.

    Raise `BrokerUnavailable` after `seconds`, and at once for a file that is damaged or no database. Waiting is needed
    because Spark does not restart a failed query.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            return connect()
        except BrokerUnavailable as error:
            # SQLite's errors that may pass, such as a full disk, are of a subclass.
            if type(error.__cause__) is sqlite3.DatabaseError or time.monotonic() + _RECONNECT_SECONDS > until:
                raise
            _log.warning("the broker cannot be reached, and is tried again: %s", error)
        time.sleep(_RECONNECT_SECONDS)


_Kept = TypeVar("_Kept", bound=Any)


class ClientPool(Generic[_Kept]):
    """Idle clients that a process keeps for reuse. A child process never uses the clients of its parent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()  # idle clients, the longest idle first

    @contextmanager
    def held(self, key: Hashable, make: Callable[[], _Kept]) -> Iterator[_Kept]:
        """Lend the idle client of this key, or a new one, to this block alone, and keep it afterwards.

        After an error the connection may be unsound, so the client is closed instead of kept.
        """
        key = (os.getpid(), key)
        with self._lock:
            kept = self._kept.pop(key, None)
        if kept is None:
            kept = make()
        try:
            yield kept
        except BaseException:
            close_logging_errors(kept)
            raise
        self._keep(key, kept)

    def _keep(self, key: Hashable, kept: _Kept) -> None:
        with self._lock:
            surplus = [self._kept.pop(key)] if key in self._kept else []
            self._kept[key] = kept
            while len(self._kept) > _MAX_IDLE_CLIENTS:
                surplus.append(self._kept.popitem(last=False)[1])
        for each in surplus:
            close_logging_errors(each)

    def drop(self, key: Hashable) -> None:
        """Close the idle client of this key."""
        with self._lock:
            kept = self._kept.pop((os.getpid(), key), None)
        if kept is not None:
            close_logging_errors(kept)

    def clear(self) -> None:
        """Close all idle clients."""
        with self._lock:
            while self._kept:
                close_logging_errors(self._kept.popitem()[1])


def close_logging_errors(kept: Any) -> None:
    try:
        kept.close()
    except TxnBridgeError as error:
        _log.warning("closing: %s", error)


sessions: ClientPool[SinkSession] = ClientPool()
