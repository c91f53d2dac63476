"""A broker of a few lines that speaks frames like Kafka's, and a client for it and for Kafka."""

from __future__ import annotations

import itertools
import queue
import socket
import struct
import threading
from contextlib import suppress

API_VERSIONS, METADATA, END_TXN, PRODUCE = 18, 3, 26, 0


class Client:
    """A connection that sends and receives whole frames."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 30)
        self._numbers = itertools.count(1)

    def send(self, kind: int, body: bytes = b"", version: int = 0) -> int:
        number = next(self._numbers)
        data = struct.pack(">hhih", kind, version, number, -1) + body
        self.socket.sendall(struct.pack(">i", len(data)) + data)
        return number

    def receive(self) -> tuple[int, bytes]:
        """The number of the next answer and its body. Raises `EOFError` if the connection ended."""
        (size,) = struct.unpack(">i", self.exactly(4))
        number, body = struct.unpack(f">i{size - 4}s", self.exactly(size))
        return number, body

    def exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def ask(self, kind: int, body: bytes = b"", version: int = 0) -> bytes:
        number = self.send(kind, body, version)
        answered, data = self.receive()
        assert answered == number
        return data

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Echo:
    """Answers each request with its own body, and notes what arrived and which connections ended."""

    def __init__(self) -> None:
        self.arrived: queue.Queue[bytes] = queue.Queue()
        self.ended: queue.Queue[bool] = queue.Queue()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def hang_up(self) -> None:
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as frames, suppress(OSError):
            while len(size := frames.read(4)) == 4:
                data = frames.read(*struct.unpack(">i", size))
                if len(data) < int.from_bytes(size, "big"):
                    break  # it was cut
                self.arrived.put(data[10:])
                answer = data[4:8] + data[10:]
                connection.sendall(struct.pack(">i", len(answer)) + answer)
        self.ended.put(True)

    def __enter__(self) -> Echo:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        self.hang_up()
        for thread in self._threads:
            thread.join()
