"""Connections that outlive a task or a commit: Spark keeps its Python processes, mostly."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import txnbridge
from pyspark_txnbridge._options import SinkOptions, as_keywords
from txnbridge import Bridge, BrokerUnavailable, InvalidOption, TxnBridgeError

_log = logging.getLogger("txnbridge.spark")

# Of a decision log. The id of a batch's claim is (query, sink, batch, attempt).
Claim = Any
Opening = Any

# Of each kind, in one process, beside those in use: a query needs one for each of its sinks, and several queries or
# jobs may take turns.
_MOST_KEPT = 8
# Between two attempts to connect.
_PAUSE_SECONDS = 0.5


class Session:
    """One process's connection to a decision log and to the broker's transactions."""

    def __init__(self, options: SinkOptions, application: str) -> None:
        self.options = options
        self.bridge = connect(options, application)
        try:
            self.decisions = self.bridge.decisions()
        except BaseException:
            self.bridge.close()
            raise

    def close(self) -> None:
        self.bridge.close()


def connect(options: SinkOptions, application: str, transactional_id: str | None = None) -> Bridge:
    return patiently(
        options.commit_timeout,
        lambda: txnbridge.connect(
            options.url,
            transactional_id=transactional_id,
            application=application,
            timeout=options.commit_timeout,
            create_topics=options.create_topics,
            writers=1,
            decision_log=options.log_place,
            **as_keywords(options.settings),
        ),
    )


def patiently(seconds: float, connect: Callable[[], Bridge]) -> Bridge:
    """Connect to a broker that may be away for some seconds, as it is when it restarts.

    Raises `BrokerUnavailable` if it is away for longer: Spark does not start a query again by itself.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            return connect()
        except InvalidOption as error:
            if "timeout" not in str(error):
                raise
            raise InvalidOption(f"{error}. Here timeout is the option commitTimeout of a sink") from None
        except BrokerUnavailable as error:
            if time.monotonic() + _PAUSE_SECONDS > until:
                raise
            _log.warning("the broker is away, it is waited for: %s", error)
        time.sleep(_PAUSE_SECONDS)


_Kept = TypeVar("_Kept", bound=Any)


class Keeper(Generic[_Kept]):
    """Keeps the last few things that have to be closed. What a parent process made is never used in its child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()  # those that nobody uses

    @contextmanager
    def held(self, key: Hashable, make: Callable[[], _Kept]) -> Iterator[_Kept]:
        """One for this block alone: one that is kept, or a new one. It is kept for the next who asks with this key.

        After an error nobody knows how sound a connection is: then it is closed, and the next one begins anew.
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
            while len(self._kept) > _MOST_KEPT:
                surplus.append(self._kept.popitem(last=False)[1])
        for each in surplus:
            close_logging_errors(each)

    def drop(self, key: Hashable) -> None:
        """Close the one that is kept for this key."""
        with self._lock:
            kept = self._kept.pop((os.getpid(), key), None)
        if kept is not None:
            close_logging_errors(kept)

    def clear(self) -> None:
        """Close everything that nobody uses."""
        with self._lock:
            while self._kept:
                close_logging_errors(self._kept.popitem()[1])


def close_logging_errors(kept: Any) -> None:
    try:
        kept.close()
    except TxnBridgeError as error:
        _log.warning("closing: %s", error)


sessions: Keeper[Session] = Keeper()
