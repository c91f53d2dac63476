"""confluent-kafka's clients, which a forked child may forget.

Their threads stay behind in the parent, and a child in which one is let go (by a garbage collection, or at its end)
waits for them and dies of a segmentation fault. So a child keeps them all, and never uses them.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from typing import Any

import confluent_kafka
import confluent_kafka.admin

# A program that configures no logging is not to find the clients' lines on its screen.
logging.getLogger("txnbridge.kafka").addHandler(logging.NullHandler())

_clients: weakref.WeakSet[Any] = weakref.WeakSet()


class Producer(confluent_kafka.Producer):
    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        _clients.add(self)


class Consumer(confluent_kafka.Consumer):
    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        _clients.add(self)


class AdminClient(confluent_kafka.admin.AdminClient):
    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        _clients.add(self)


def _keep() -> None:
    for client in list(_clients):
        # No reference that Python knows of would outlive the end of the interpreter.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


os.register_at_fork(after_in_child=_keep)
