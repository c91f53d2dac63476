"""Apache RocketMQ, spoken to by its remoting protocol."""

from __future__ import annotations

from txnbridge.spi import Backend, hookimpl


@hookimpl
def txnbridge_backends() -> list[Backend]:
    from txnbridge_rocketmq.backend import RocketMQBackend

    return [RocketMQBackend()]
