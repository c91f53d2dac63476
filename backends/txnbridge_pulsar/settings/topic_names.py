"""Topic names as Pulsar writes them, for users' topics and for internal topics."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import quote, unquote

from txnbridge.errors import InvalidOption

# The durable subscription of every internal topic: without one, brokers drop records, and delete an idle topic.
SUBSCRIPTION = "txnbridge"

_PARTITION = re.compile(r"-partition-\d+$")
_PERSISTENT = "persistent://"


class Namespace(NamedTuple):
    """The tenant and namespace to which a short topic name belongs."""

    tenant: str
    name: str

    def __str__(self) -> str:
        return f"{self.tenant}/{self.name}"

    def full_name(self, topic: str) -> str:
        """Return `persistent://tenant/namespace/orders` for `orders`, and a full name unchanged.

        Raise `InvalidOption` if the name is invalid.
        """
        full = topic if topic.startswith(_PERSISTENT) else f"{_PERSISTENT}{self}/{topic}"
        parts = full.removeprefix(_PERSISTENT).split("/")
        if len(parts) != 3 or not all(parts) or not full.isprintable():
            raise InvalidOption(
                f"{topic!r} is not a topic's name: give a name without '/' in the URL's namespace, or"
                " persistent://tenant/namespace/name"
            )
        if _PARTITION.search(full):
            raise InvalidOption(f"{topic!r} is one partition of a topic: give the topic, and partition=")
        return full

    def short_name(self, full: str) -> str:
        """Return the name to show to users: the short name for a topic in this namespace, else the full name."""
        return full.removeprefix(f"{_PERSISTENT}{self}/")


def partitions_of(full: str, count: int) -> tuple[str, ...]:
    """Return the full names of a topic's partitions, in order."""
    return tuple(f"{full}-partition-{number}" for number in range(count))


def whole_topic(concrete: str) -> tuple[str, int]:
    """Return the topic to which the topic or partition `concrete` belongs, and its number; 0 without partitions."""
    match = _PARTITION.search(concrete)
    return (concrete[: match.start()], int(match[0].rpartition("-")[2])) if match else (concrete, 0)


def namespace_of(full: str) -> str:
    """Return `tenant/namespace` of a full name."""
    return "/".join(full.removeprefix(_PERSISTENT).split("/")[:2])


def encoded(text: str) -> str:
    """Encode any text as part of a topic's name: letters, digits, '.', '_' and '-' stay, all else becomes hex digits.

    `decoded` returns the text. `-partition-` is encoded, too: Pulsar would take a topic with this in its name for a
    partition of another topic.
    """
    safe = quote(text, safe="", errors="surrogatepass").replace("~", "%7E").replace("%", "=")
    return safe.replace("-partition-", "=2Dpartition-")


def decoded(text: str) -> str:
    """Return the text that `encoded` has encoded; a name that it has not made, unchanged."""
    with suppress(UnicodeDecodeError):
        return unquote(text.replace("=", "%"), errors="surrogatepass")
    return text
