"""A broker of a few lines that speaks RocketMQ's frames, and records encoded as a broker stores them."""

from __future__ import annotations

import ctypes
import json
import queue
import socket
import ssl
import struct
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.connection import Credentials
from txnbridge_rocketmq.client.protocol import read_requests
from txnbridge_rocketmq.client.protocol.frames import RemotingCommand, RpcRequest
from txnbridge_rocketmq.client.protocol.records import MessageExt
from txnbridge_rocketmq.client.protocol.send_requests import WireMessage, send
from txnbridge_rocketmq.cluster import RocketMQCluster, open_cluster
from txnbridge_rocketmq.settings import RocketMQSettings

from txnbridge.spi import Context, Deadline, Emitter

ANSWER, ONE_WAY = 1, 2


def frame(
    code: int,
    opaque: int = 0,
    flag: int = 0,
    fields: Mapping[str, str] | None = None,
    body: bytes = b"",
    remark: str | None = None,
) -> bytes:
    """Return a frame whose header is JSON, with all fields that Java writes."""
    header = {
        "code": code,
        "extFields": fields,
        "flag": flag,
        "language": "JAVA",
        "opaque": opaque,
        "remark": remark,
        "serializeTypeCurrentRPC": "JSON",
        "version": 485,
    }
    return around(json.dumps({name: value for name, value in header.items() if value is not None}).encode(), body)


def around(header: bytes, body: bytes = b"", kind: int = 0) -> bytes:
    return struct.pack(">iI", 4 + len(header) + len(body), kind << 24 | len(header)) + header + body


def binary_frame(
    code: int, opaque: int, flag: int, fields: Mapping[str, str], body: bytes = b"", remark: str = ""
) -> bytes:
    """Return a frame with a header of the binary kind."""
    told = remark.encode()
    packed = b""
    for name, value in fields.items():
        packed += struct.pack(">h", len(name.encode())) + name.encode()
        packed += struct.pack(">i", len(value.encode())) + value.encode()
    head = struct.pack(">hBhii", code, 0, 485, opaque, flag) + struct.pack(">i", len(told)) + told
    return around(head + struct.pack(">i", len(packed)) + packed, body, kind=1)


SHORT_TOPIC, LONG_TOPIC = -626843481, -626843477


def stored(
    body: bytes,
    topic: str = "orders",
    properties: str = "",
    *,
    queue: int = 3,
    queue_offset: int = 7,
    log_offset: int = 4711,
    system_flag: int = 0,
    prepared_offset: int = 0,
    magic: int = SHORT_TOPIC,
    born_host: bytes = bytes(8),
    stored_host: bytes = bytes(8),
    born: int = 1_700_000_000_001,
    stored_at: int = 1_700_000_000_002,
) -> bytes:
    """Return a record as PULL_MESSAGE and other responses contain it."""
    name, packed = topic.encode(), properties.encode()
    head = struct.pack(">iiiqqi", zlib.crc32(body) & 0x7FFFFFFF, queue, 5, queue_offset, log_offset, system_flag)
    rest = head + struct.pack(">q", born) + born_host + struct.pack(">q", stored_at) + stored_host
    rest += struct.pack(">iqi", 2, prepared_offset, len(body)) + body
    rest += (bytes([len(name)]) if magic == SHORT_TOPIC else struct.pack(">h", len(name))) + name
    rest += struct.pack(">h", len(packed)) + packed
    return struct.pack(">ii", 8 + len(rest), magic) + rest


def batched(body: bytes, properties: str) -> bytes:
    """Return a message as the body of a batch contains it."""
    packed = properties.encode()
    rest = struct.pack(">iiii", 0, 0, 1, len(body)) + body + struct.pack(">h", len(packed)) + packed
    return struct.pack(">i", 4 + len(rest)) + rest


def java_hash(text: str) -> int:
    """Return Java's `String.hashCode`: s[0]*31^(n-1) + ..., as a signed 32-bit number."""
    data = text.encode("utf-16-be")
    found = 0
    for unit in struct.unpack(f">{len(data) // 2}H", data):
        found = (31 * found + unit) & 0xFFFFFFFF
    return found - 2**32 if found >= 2**31 else found


def pairs(**properties: str) -> str:
    return "".join(f"{name}\x01{value}\x02" for name, value in properties.items())


@dataclass
class Peer:
    """One connection of `FakeBroker`, from the broker's side."""

    socket: socket.socket
    asked: queue.Queue[RemotingCommand | None] = field(default_factory=queue.Queue)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self, command: RemotingCommand, code: int = 0, **more: Any) -> None:
        self.send(frame(code, command.opaque, ANSWER, **more))

    def next(self, timeout: float = 30) -> RemotingCommand:
        """Return the next request. Raise `EOFError` at the end of the connection."""
        command = self.asked.get(timeout=timeout)
        if command is None:
            raise EOFError
        return command

    def hang_up(self) -> None:
        with suppress(OSError):
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def vanish(self) -> None:
        """Let the kernel drop every packet for this connection unanswered, as if the host were gone. Linux only."""
        drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF_RET, of 0 bytes
        program = struct.pack("HP", 1, ctypes.addressof(drop_all))
        self.socket.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER, for which Python has no name


class FakeBroker:
    """Accepts connections and reads requests. `reply` answers them; without it, the test answers by `peer`."""

    def __init__(
        self,
        reply: Callable[[Peer, RemotingCommand], object] | None = None,
        tls: ssl.SSLContext | None = None,
        reads: bool = True,
    ) -> None:
        self._reply, self._tls, self._reads = reply, tls, reads
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.peers: list[Peer] = []
        self._arrived: queue.Queue[Peer] = queue.Queue()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def peer(self, timeout: float = 30) -> Peer:
        """Wait for the next connection, and return it."""
        return self._arrived.get(timeout=timeout)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        if self._tls is not None:
            try:
                connection = self._tls.wrap_socket(connection, server_side=True)
            except OSError:
                connection.close()
                return
        peer = Peer(connection)
        self.peers.append(peer)
        self._arrived.put(peer)
        if self._reads:
            with suppress(OSError):
                self._read(peer)
        peer.asked.put(None)

    def _read(self, peer: Peer) -> None:
        with peer.socket.makefile("rb") as stream:
            while len(word := stream.read(4)) == 4:
                command = read_command(stream.read(int.from_bytes(word, "big")))
                if self._reply is not None:
                    self._reply(peer, command)
                else:
                    peer.asked.put(command)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for peer in self.peers:
            peer.hang_up()
        for thread in self._threads:
            thread.join()
        for peer in self.peers:
            peer.socket.close()

    def __enter__(self) -> FakeBroker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_command(data: bytes) -> RemotingCommand:
    """Decode a request by other code than the client's."""
    (size,) = struct.unpack_from(">i", data)
    header = json.loads(data[4 : 4 + size])
    assert header["language"] == "OTHER" and header["version"] == 485 and header["serializeTypeCurrentRPC"] == "JSON"
    assert all(isinstance(value, str) for value in header["extFields"].values())
    return RemotingCommand(header["code"], header["opaque"], header["flag"], header["extFields"], "", data[4 + size :])


def echo(number: int = 1, body: bytes = b"") -> RpcRequest[str]:
    """Return a request whose response's remark or body is returned."""
    return RpcRequest(f"echo {number}", 9000 + number, lambda answer: answer.remark or answer.body.decode(), body=body)


def our_threads(before: Sequence[threading.Thread] = ()) -> list[threading.Thread]:
    """Return the running threads of clients, except those in `before`, which belong to other clients."""
    return [each for each in threading.enumerate() if each.name.startswith("rocketmq") and each not in before]


def becomes_true(true: Callable[[], bool], seconds: float = 90) -> bool:
    """Return whether a condition becomes true within the time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


BROKER = "broker-1"
LONG = 30.0


def read_all(client: RemotingClient, topic: str, broker: str = BROKER, queue: int = 0) -> list[MessageExt]:
    """Return all messages in a queue of a topic, up to a marker message that is sent now."""
    marker = client.call(broker, send(WireMessage(topic, b"marker"), "markers", queue), LONG).queue_offset
    found: list[MessageExt] = []
    at = client.call(broker, read_requests.min_offset(topic, queue), LONG)
    while at <= marker:
        pulled = client.call(broker, read_requests.pull(topic, queue, at, "markers"), LONG)
        found += pulled.records
        at = max(pulled.next_offset, at)
    return [record for record in found if record.body != b"marker"]


def bodies(client: RemotingClient, topic: str, broker: str = BROKER) -> list[bytes]:
    return [record.payload() for record in read_all(client, topic, broker)]


def one_user(root: Credentials) -> dict[str, str]:
    """Return a broker's settings with which it authenticates its clients, and knows one user."""
    provider = "org.apache.rocketmq.auth.authentication.provider"
    user = {"accessKey": root.access_key, "secretKey": root.secret_key}
    return {
        "authenticationEnabled": "true",
        "authenticationProvider": f"{provider}.DefaultAuthenticationProvider",
        "authenticationMetadataProvider": f"{provider}.LocalAuthenticationMetadataProvider",
        "initAuthenticationUser": json.dumps({"username": root.access_key, "password": root.secret_key}),
        "innerClientAuthenticationCredentials": json.dumps(user),
    }


def settings_for(url: str, **given: Any) -> RocketMQSettings:
    """Return the settings of a bridge to a URL."""
    defaults: dict[str, Any] = {"timeout": LONG, "hold": None, "application": "tests", "create_topics": 0}
    return RocketMQSettings((url.removeprefix("rocketmq://"),), **{**defaults, **given})


def context_for(**given: Any) -> Context:
    """Return the context that the core passes to a backend."""
    defaults: dict[str, Any] = {"application": "tests", "timeout": LONG, "hold": None, "create_topics": None}
    return Context("tests", Emitter("tests", ()), **{**defaults, **given})


def cluster_for(url: str, timeout: float = LONG, **given: Any) -> RocketMQCluster:
    """Connect to a cluster without a bridge. The caller closes its `client`."""
    return open_cluster(settings_for(url, **given), context_for(), Deadline(timeout))
