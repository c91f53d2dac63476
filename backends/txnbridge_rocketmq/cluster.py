"""What every part of a bridge to one cluster shares."""

from __future__ import annotations

from dataclasses import dataclass

from txnbridge.spi import Context
from txnbridge_rocketmq import client as remoting
from txnbridge_rocketmq.outcome.producer_groups import Members
from txnbridge_rocketmq.settings import Settings
from txnbridge_rocketmq.settings.broker_config import Brokers
from txnbridge_rocketmq.topics import Topics


@dataclass(frozen=True)
class Cluster:
    """The settings, and the ways to ask."""

    id: str  # stable, and nobody else's
    settings: Settings
    client: remoting.Client
    topics: Topics
    brokers: Brokers
    members: Members
    context: Context
