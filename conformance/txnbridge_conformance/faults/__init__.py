"""Faults for tests: a proxy that makes the network fail, and processes that are killed or paused at an event.

    with faults.proxy(broker) as proxy:
        late = proxy.hold(requests="EndTxn")
        ...                                 # connect to proxy.url and commit
        late.wait()
        proxy.cut()
        late.release()

`txnbridge.testing.Child` runs a function of `programs` in a process that is killed or paused at an event.
`txnbridge.testing.crash_everywhere` does so for each event of a function in turn.
"""

from __future__ import annotations

from txnbridge_conformance.faults._protocols import Request
from txnbridge_conformance.faults._proxy import Hold, Proxy, proxy

__all__ = ["Hold", "Proxy", "Request", "proxy"]
