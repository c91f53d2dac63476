"""`ServedProcessor`: the processor of one function of an app. Its end stops the app."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from txnbridge._app.event_loop import EventLoop
from txnbridge._app.outgoing import UnfitResult
from txnbridge._base.service_stop import StopNow, leaving_seconds
from txnbridge._bridge import Bridge
from txnbridge._process.polled_batch import PolledBatch
from txnbridge._process.processor import Processor, _TimeToPoll
from txnbridge.errors import NotFound

if TYPE_CHECKING:
    from txnbridge._app.handler import Handler


class ServedProcessor(Processor):
    """The processor of an app's function. It sends to the bridge `to`; if `to` is None, to the bridge it reads from.

    `ended` is called when the processor's loop ends in its thread.
    """

    def __init__(
        self,
        bridge: Bridge,
        to: Bridge | None,
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
            bridge._begins_passes(to, settings.get("db")),
            handler.inputs,
            group=handler.group,
            stop_timeout=stop_timeout,
            fatal=(UnfitResult, *((fatal,) if isinstance(fatal, type) else fatal)),
            **handler.calls(state, loop),
            **settings,
        )
        self.name = name
        self.paused = self._held = False
        self._event_loop = loop
        self._ended = ended

    @property
    def stopping(self) -> bool:
        return self._stop.asked

    def _pass(self, until_idle: bool) -> bool:
        assert self._inputs is not None
        if self.paused:
            self._held, self._since = True, time.monotonic()
            try:
                self._inputs.hold()
            except NotFound:
                if not self._follow_topics(failed=True):
                    raise
            self._measure_lag(self._inputs, now=False)
            self._stop.sleep(0.25)  # it resumes soon, and polls often enough to stay in its group
            return self._stop.asked
        if self._held:
            self._inputs.resume()
            self._held = False
        return super()._pass(until_idle)

    def _process(self, items: PolledBatch) -> None:
        if self.paused:
            raise _TimeToPoll  # it was paused during the poll: the messages are taken back
        super()._process(items)

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
            self._give_up()
        except StopNow:
            self._give_up()
            raise
