"""`App`: a service of several functions, each of which processes the messages of a topic exactly once.

Underneath, each function is the handler of a `Processor`, which keeps its promises: this package only prepares the
arguments of the function and publishes what it returns.

The modules, from the application down to one message:
- `app` opens the bridge, and starts and stops the processors of all functions together; if one fails, all stop.
- `router` gathers the functions of a module by the decorator `process`; its lifespans open and close what the functions
  of a process share.
- `handler` reads the signature of a function, and calls it with a message. `event_loop` runs it if it is asynchronous.
- `outgoing` publishes what a function returns.
- `value_types` chooses codecs by types.
- `description` describes an app as a document of AsyncAPI.
"""

from __future__ import annotations

from txnbridge._app.app import App
from txnbridge._app.outgoing import Outgoing
from txnbridge._app.router import Router

__all__ = ["App", "Outgoing", "Router"]
