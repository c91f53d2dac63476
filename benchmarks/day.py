"""A day in an hour: whether memory, descriptors or threads of a service grow at 200 transactions a second.

A process sends messages, and two processors in it pass them on, each in a transaction of its own; it tells what it
holds every few seconds. Messages that wait to be passed on take memory, so it says how many there were at most. The
slope is that of a line through the means of twelve parts of the time, without the first sixth, in which caches fill. A
picture of the memory is written into the current folder.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean, linear_regression

from benchmarks._harness import Estimate, Report, Settings, child
from benchmarks._ours import BODY
from benchmarks.growth import broker_of
from benchmarks.memory import resident
from txnbridge import Message, Transaction, connect

SECONDS, RATE = 3600.0, 200
_EVERY, _PARTS = 5.0, 12
_STUDENT = 2.228  # of 95 % with ten degrees of freedom
_WIDTH, _HEIGHT, _MARGIN = 720, 220, 44

Look = tuple[float, float, float, float, int, int]  # hours, MiB, descriptors, threads; messages sent and passed on


def day(settings: Settings, broker: str) -> None:
    seconds = 2 * _PARTS * 0.5 if settings.quick else SECONDS
    kit = import_module(f"benchmarks._{broker}")
    with broker_of(settings, kit) as url, child(serve, url, seconds) as pipe:
        looks: list[Look] = list(iter(pipe.recv, None))
    kept = [look for look in looks if look[0] >= looks[-1][0] / 6]
    report = Report(settings, f"{kit.NAME}: a service for {seconds / 60:.0f} minutes")
    report.single("transactions a second", sum(looks[-1][4:]) / seconds)
    report.single("most messages that waited", max(sent - passed for *_, sent, passed in kept))
    for place, (what, unit) in enumerate((("memory", "MiB"), ("descriptors", ""), ("threads", "")), 1):
        report.single(f"{what}, in the mean", fmean(float(look[place]) for look in kept), unit)
        report.figure(f"{what}, growth an hour", slope([(look[0], float(look[place])) for look in kept]), unit)
    if settings.quick:
        return
    picture = Path(f"day-{broker}.svg")
    picture.write_text(drawn(kit.NAME, looks))
    print(f"\n{picture} shows the memory")


def serve(pipe: Connection, url: str, seconds: float) -> None:
    """Be the service for some seconds, and send looks at itself, which the parent keeps: a list of them would grow."""
    passed, sent, looks = Counter[str](), 0, 0

    def pass_on(message: Message, txn: Transaction) -> None:
        txn.send("passed", message.value)
        passed[threading.current_thread().name] += 1

    with connect(url, create_topics=4) as bridge, ExitStack() as processors:
        bridge.ensure_topics("taken", "passed")
        for _ in range(2):
            processors.enter_context(bridge.processor("taken", group="day", each=pass_on, max_messages=1))
        begin = time.monotonic()
        while (now := time.monotonic() - begin) < seconds:
            if now >= looks * min(_EVERY, seconds / 50):
                held = len(os.listdir("/proc/self/fd")), threading.active_count()
                pipe.send((now / 3600, resident(), *held, sent, passed.total()))
                looks += 1
            with bridge.transaction() as txn:
                txn.send("taken", BODY)
            sent += 1
            time.sleep(max(0.0, begin + sent * 2 / RATE - time.monotonic()))
    pipe.send(None)


def slope(points: Sequence[tuple[float, float]]) -> Estimate:
    """Return the slope of a line through the means of `_PARTS` parts, with its 95 % interval."""
    size = len(points) // _PARTS
    parts = [points[at : at + size] for at in range(0, size * _PARTS, size)]
    xs, ys = ([fmean(point[axis] for point in part) for part in parts] for axis in (0, 1))
    found, at_zero = linear_regression(xs, ys)
    rest = sum((y - at_zero - found * x) ** 2 for x, y in zip(xs, ys, strict=True))
    spread = sum((x - fmean(xs)) ** 2 for x in xs)
    error = _STUDENT * (rest / (_PARTS - 2) / spread) ** 0.5
    return Estimate(found, found - error, found + error)


def drawn(name: str, looks: Sequence[Look]) -> str:
    """Return a picture of the memory over the time, from 0 on, as SVG."""
    hours, top = looks[-1][0], 1.2 * max(look[1] for look in looks)
    places = " ".join(
        f"{_MARGIN + look[0] / hours * (_WIDTH - _MARGIN - 8):.1f},{(1 - look[1] / top) * (_HEIGHT - 30) + 8:.1f}"
        for look in looks
    )
    low = _HEIGHT - 22
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" \
font-size="12">
<title>Resident memory of a service on {name}</title>
<rect width="100%" height="100%" fill="#fff"/>
<path d="M{_MARGIN},8V{low}H{_WIDTH - 8}" fill="none" stroke="#888"/>
<text x="4" y="18">{top:.0f} MiB</text><text x="30" y="{low}">0</text>
<text x="{_MARGIN}" y="{_HEIGHT - 6}">0</text>
<text x="{_WIDTH - 8}" y="{_HEIGHT - 6}" text-anchor="end">{60 * hours:.0f} minutes</text>
<polyline points="{places}" fill="none" stroke="#3f51b5" stroke-width="1.5"/>
</svg>
"""
