"""Parsing of service URLs, and conversion of short topic names to full names of topics and partitions."""

from __future__ import annotations

import re
from typing import NamedTuple

_PORTS = {"pulsar": 6650, "pulsar+ssl": 6651}
_HOST = re.compile(r"(?P<host>\[[^\]]+\]|[^:\[\]/?#@\s]+)(:(?P<port>\d{1,5}))?")


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ServiceUrl(NamedTuple):
    """A parsed service URL: the addresses of some brokers of a cluster, each of which answers lookups."""

    addresses: tuple[Address, ...]
    tls: bool


def service_url(text: str) -> ServiceUrl:
    """Parse `pulsar://host:port,host2:port2` or `pulsar+ssl://...`. Raise `ValueError` if malformed."""
    scheme, mark, rest = text.partition("://")
    if not mark or scheme not in _PORTS:
        raise ValueError("a Pulsar service URL begins with pulsar:// or pulsar+ssl://")
    addresses = tuple(_address(host, _PORTS[scheme]) for host in rest.rstrip("/").split(","))
    return ServiceUrl(addresses, scheme == "pulsar+ssl")


def _address(text: str, port: int) -> Address:
    match = _HOST.fullmatch(text)
    if match is None or int(match["port"] or port) > 65535:
        raise ValueError("each broker of a Pulsar service URL is host or host:port")
    return Address(match["host"].strip("[]"), int(match["port"] or port))


def full_topic_name(topic: str) -> str:
    """Return a topic's full name: `persistent://public/default/orders` for `orders` or `public/default/orders`."""
    if "://" in topic:
        return topic
    parts = topic.split("/")
    if len(parts) == 1:
        return f"persistent://public/default/{topic}"
    if len(parts) == 3:
        return f"persistent://{topic}"
    raise ValueError(f"{topic!r} is no name of a topic: give name, tenant/namespace/name, or a full name")


def partition_name(topic: str, partition: int) -> str:
    return f"{full_topic_name(topic)}-partition-{partition}"
