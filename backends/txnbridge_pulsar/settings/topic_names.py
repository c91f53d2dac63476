"""Names: topics of the user's and of our own, as Pulsar calls them."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import quote, unquote

from txnbridge.errors import InvalidOption

# The durable subscription of every topic of our own: without one, brokers drop records and, idle, the topic itself.
SUBSCRIPTION = "txnbridge"

_PARTITION = re.compile(r"-partition-\d+$")
_PERSISTENT = "persistent://"


class Namespace(NamedTuple):
    """Where topics without a longer name are."""

    tenant: str
    name: str

    def __str__(self) -> str:
        return f"{self.tenant}/{self.name}"

    def full_name(self, topic: str) -> str:
        """`orders` as `persistent://tenant/namespace/orders`; a full name as it is. Raises `InvalidOption`."""
        full = topic if topic.startswith(_PERSISTENT) else f"{_PERSISTENT}{self}/{topic}"
        parts = full.removeprefix(_PERSISTENT).split("/")
        if len(parts) != 3 or not all(parts) or not full.isprintable():
            raise InvalidOption(
                f"{topic!r} is no name of a topic: on Pulsar that is a name without '/' in the URL's namespace, or"
                " persistent://tenant/namespace/name"
            )
        if _PARTITION.search(full):
            raise InvalidOption(f"{topic!r} is one partition of a topic: name the topic, and choose by partition=")
        return full

    def short_name(self, full: str) -> str:
        """The other way round: the name that users have for a topic."""
        return full.removeprefix(f"{_PERSISTENT}{self}/")


def partitions_of(full: str, count: int) -> tuple[str, ...]:
    """The full names of a topic's partitions, in their order."""
    return tuple(f"{full}-partition-{number}" for number in range(count))


def whole_topic(concrete: str) -> tuple[str, int]:
    """The topic and the number of what may be a partition; 0 for a topic that has none."""
    found = _PARTITION.search(concrete)
    if found is None:
        return concrete, 0
    return concrete[: found.start()], int(found[0].rpartition("-")[2])


def namespace_of(full: str) -> str:
    """`tenant/namespace` of a full name."""
    return "/".join(full.removeprefix(_PERSISTENT).split("/")[:2])


def encoded(text: str) -> str:
    """Any text as part of a topic's name, one to one: letters, digits, '.', '_', '-', and '=' with two digits.

    A `-partition-` in it would make Pulsar take the topic for a partition of another.
    """
    safe = quote(text, safe="", errors="surrogatepass").replace("~", "%7E").replace("%", "=")
    return safe.replace("-partition-", "=2Dpartition-")


def decoded(text: str) -> str:
    """The text that was encoded so."""
    return unquote(text.replace("=", "%"), errors="surrogatepass")
