"""A broker that a test writes: it speaks the protocol, and does with each command what it is told to."""

import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

from txnbridge_pulsar import client as wire
from txnbridge_pulsar.client.format.frames import Frame, command, parse

Handler = Callable[["Peer", dict[str, Any]], object]


class Peer:
    """One client's connection, as the broker sees it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.seen: list[Frame] = []

    def say(self, name: str, **fields: Any) -> None:
        self.sock.sendall(command(name, **fields))

    def answer(self, request: dict[str, Any], name: str, **fields: Any) -> None:
        self.say(name, request_id=request["request_id"], **fields)

    def raw(self, data: bytes) -> None:
        self.sock.sendall(data)

    def hang_up(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


def replies(name: str, **given: Any) -> Handler:
    return lambda peer, fields: peer.answer(fields, name, **given)


def connected(peer: Peer, fields: dict[str, Any], largest: int = 1000) -> None:
    peer.say("connected", server_version="fake", protocol_version=21, max_message_size=largest)


class FakeBroker:
    """Listens on a port of the loopback. Commands without a handler are kept in `seen` of their peer, unanswered."""

    def __init__(self, tls: ssl.SSLContext | None = None, **handlers: Handler) -> None:
        self.handlers: dict[str, Handler] = {"connect": connected, **handlers}
        self.peers: list[Peer] = []
        self._tls = tls
        self._changed = threading.Condition()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"{'pulsar' if tls is None else 'pulsar+ssl'}://127.0.0.1:{self.port}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def wait_for(self, name: str, count: int = 1, timeout: float = 60) -> list[Frame]:
        """The commands of that name, once there are so many, over all peers."""

        def found() -> list[Frame]:
            return [frame for peer in self.peers for frame in peer.seen if frame.name == name]

        with self._changed:
            assert self._changed.wait_for(lambda: len(found()) >= count, timeout), f"{name} did not come"
            return found()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True)
            peer = Peer(sock)
            self.peers.append(peer)
            while True:
                (size,) = struct.unpack(">I", _exactly(sock, 4))
                self._handle(peer, parse(_exactly(sock, size)))
        except OSError:
            pass
        finally:
            sock.close()

    def _handle(self, peer: Peer, frame: Frame) -> None:
        with self._changed:
            peer.seen.append(frame)
            self._changed.notify_all()
        handler = self.handlers.get(frame.name)
        if handler is not None:
            handler(peer, frame.fields)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in self.peers:
            peer.hang_up()
        for thread in self._threads:
            thread.join(5)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise OSError("the client is gone")
        data += more
    return data


def fake_broker(tls: ssl.SSLContext | None = None, **handlers: Handler) -> closing[FakeBroker]:
    return closing(FakeBroker(tls, **handlers))


@contextmanager
def served(room: int = 1 << 26, **handlers: Handler) -> Iterator[tuple[FakeBroker, wire.PulsarClient]]:
    """A broker that serves all topics, and a client of it with room for so many unconfirmed bytes."""
    with fake_broker(None, **handlers) as broker, wire.PulsarClient(broker.url, unconfirmed_bytes=room) as client:
        owns_everything(broker)
        yield broker, client


def owns_everything(broker: FakeBroker) -> None:
    """Answer lookups with itself, and openings with success."""

    def lookup(peer: Peer, fields: dict[str, Any]) -> None:
        urls = {"broker_service_url": broker.url, "broker_service_url_tls": broker.url}
        peer.answer(fields, "lookup_response", response=1, **urls)

    def producer(peer: Peer, fields: dict[str, Any]) -> None:
        name = fields.get("producer_name", "given")
        peer.answer(fields, "producer_success", producer_name=name, last_sequence_id=-1)

    names = ("subscribe", "close_producer", "close_consumer")
    broker.handlers.update(lookup=lookup, producer=producer, **dict.fromkeys(names, replies("success")))
