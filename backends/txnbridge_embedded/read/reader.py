"""Opens the kind of reader that a subscription's group and `sharing` need."""

from __future__ import annotations

from txnbridge.spi import Deadline, Emitter, Reader, ReaderListener, Subscription
from txnbridge_embedded.client.store import Store
from txnbridge_embedded.read.base_reader import PollingReader
from txnbridge_embedded.read.ordered import OrderedReader
from txnbridge_embedded.read.shared import SharedReader
from txnbridge_embedded.read.ungrouped import UngroupedReader
from txnbridge_embedded.settings import Settings


def open_reader(
    store: Store,
    settings: Settings,
    subscription: Subscription,
    listener: ReaderListener,
    events: Emitter,
    deadline: Deadline,
) -> Reader:
    """Return a new reader of committed messages. Raise `NotFound` if a topic is missing and may not be created."""
    kinds: dict[str, type[PollingReader]] = {"partition": OrderedReader, "message": SharedReader}
    kind: type[PollingReader] = UngroupedReader if subscription.group is None else kinds[subscription.sharing]
    return kind(store, settings, subscription, listener, events, deadline)
