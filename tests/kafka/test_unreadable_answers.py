"""Whatever bytes a broker answers with, what comes out is an error of ours, or one after which it is asked again."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any, TypeVar

import pytest
from txnbridge_kafka.client.connection import AttemptError
from txnbridge_kafka.client.connections import Connections
from txnbridge_kafka.client.librdkafka import GroupMembership
from txnbridge_kafka.client.protocol_types import RetryLaterError
from txnbridge_kafka.client.request_retry import RequestRunner
from txnbridge_kafka.client.requests import Requests

from tests.kafka.test_settings import read
from txnbridge import TxnBridgeError
from txnbridge.spi import Deadline

pytestmark = pytest.mark.offline

T = TypeVar("T")

_API_VERSIONS = 18
_KEYS = range(80)
_VERSIONS = (
    struct.pack(">hB", 0, len(_KEYS) + 1) + b"".join(struct.pack(">hhhx", key, 0, 12) for key in _KEYS) + bytes(5)
)
ASKED: dict[str, Callable[[Requests, Deadline], object]] = {
    "describe": lambda requests, by: requests.describe(["id"], by),
    "end": lambda requests, by: requests.end("id", 1, 1, True, by),
    "fence": lambda requests, by: requests.fence("id", 1000, by),
    "acknowledge": lambda requests, by: requests.acknowledge(
        "id", 1, 1, GroupMembership("g", 1, "", None), {("t", 0): 1}, by
    ),
    "offsets": lambda requests, by: requests.list_offsets({("t", 0): -1}, by),
    "positions": lambda requests, by: requests.positions("g", [("t", 0)], by, decided=True),
    "topics": lambda requests, by: requests.topic_ids(["t"], by),
    "transactions": lambda requests, by: requests.transactions(by),
    "producers": lambda requests, by: requests.producers([("t", 0)], by),
    "settings": lambda requests, by: requests.configs(2, ["t"], by),
    "create": lambda requests, by: requests.create_topic("t", 1, 1, {}, by),
    "cluster": lambda requests, by: requests.cluster_id(by),
}


class Once(RequestRunner):
    """It asks once, and says what came of that."""

    def repeat(self, deadline: Deadline, what: str, attempt: Callable[[Connections], T], *_: Any, **__: Any) -> T:
        return self._once(attempt, deadline.left())


class Babbler:
    """A server that speaks Kafka's protocol only as far as to say which requests it takes."""

    def __init__(self) -> None:
        self.random = random.Random(0)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, struct.error), connection, connection.makefile("rb") as incoming:
            while True:
                (size,) = struct.unpack(">i", incoming.read(4))
                key, _, correlation = struct.unpack_from(">hhi", incoming.read(size))
                body = _VERSIONS if key == _API_VERSIONS else self._babble()
                connection.sendall(struct.pack(">ii", 4 + len(body), correlation) + body)

    def _babble(self) -> bytes:
        """Small numbers mostly: they are lengths and codes, so that more of an answer is read before it ends."""
        size = self.random.choice((0, 3, 20, 80, 300))
        most = self.random.choice((1, 3, 255))
        return bytes(self.random.randint(0, most) for _ in range(size))

    def close(self) -> None:
        self._server.close()


@pytest.fixture(scope="module")
def babbler() -> Iterator[Babbler]:
    with closing(Babbler()) as babbler:
        yield babbler


@pytest.mark.parametrize("asked", ASKED)
def test_an_answer_that_is_none_is_an_error_that_is_understood(babbler: Babbler, asked: str) -> None:
    settings = read()
    requests = Requests(settings)
    requests._runner = Once(settings)
    requests._runner._servers = [babbler.address]
    with closing(requests):
        for _ in range(20):
            with suppress(TxnBridgeError, RetryLaterError, AttemptError):
                ASKED[asked](requests, Deadline(0.15))
