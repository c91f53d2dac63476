"""`ServedProcessor`: the processor of one function of an app. Its end stops the app."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from txnbridge._app.event_loop import EventLoop
from txnbridge._app.outgoing import UnfitResult
from txnbridge._base.service_stop import StopNow, leaving_seconds
from txnbridge._bridge import Bridge
from txnbridge._process.processor import Processor

if TYPE_CHECKING:
    from txnbridge._app.handler import Handler


class ServedProcessor(Processor):
    """The processor of one function. `ended` is called when its loop ends in its thread."""

    def __init__(
        self,
        bridge: Bridge,
        name: str,
        handler: Handler,
        state: Any,
        loop: EventLoop | None,
        *,
        stop_timeout: float,
        ended: Callable[[], None],
    ) -> None:
        settings = handler.settings.copy()
        fatal = settings.pop("fatal", ())
        super().__init__(
            bridge._consumers,
            partial(bridge.transaction, group_commit=False),
            handler.inputs,
            group=handler.group,
            each=handler.each(state, loop),
            stop_timeout=stop_timeout,
            fatal=(UnfitResult, *((fatal,) if isinstance(fatal, type) else fatal)),
            **settings,
        )
        self.name = name
        self._event_loop = loop
        self._ended = ended

    @property
    def stopping(self) -> bool:
        return self._stop.asked

    def _loop_in_thread(self) -> None:
        super()._loop_in_thread()
        self._ended()

    def _hurry(self, at: float) -> None:
        """Move the transaction's deadline to `at`, and cancel an asynchronous function in time for an abort by then."""
        super()._hurry(at)
        if self._event_loop is not None:
            self._event_loop.cancel_at(at - 2 * leaving_seconds(self._stop_timeout))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop and wait for the end; on a second signal (`StopNow`) abort the transaction and do not wait."""
        try:
            if kind is not StopNow:
                return super().__exit__(kind, error, trace)
        except StopNow:
            self._give_up()
            raise
        self._give_up()
        return None
