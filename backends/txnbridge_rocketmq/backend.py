"""The RocketMQ backend: its URL scheme, options and limits, and opening a connection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from txnbridge.spi import Backend, Broker, Context, Deadline, Url
from txnbridge_rocketmq.capabilities import CAPABILITIES, LIMITS
from txnbridge_rocketmq.settings import OPTIONS, parse_settings


class RocketMQBackend(Backend):
    """Apache RocketMQ 5.0 and later. The client is our own: Apache's Python client cannot look up sent messages."""

    name = "rocketmq"
    schemes = ("rocketmq",)
    capabilities = CAPABILITIES
    limits = LIMITS
    options = OPTIONS

    def open(self, url: Url, options: Mapping[str, Any], context: Context, deadline: Deadline) -> Broker:
        from txnbridge_rocketmq.broker import RocketMQBroker

        return RocketMQBroker(parse_settings(url, options, context), context, deadline)
