"""The conformance checker: reading and judging a history of 100,000 transactions with 1,000,000 messages.

The yardstick parses the same lines as JSON and does nothing with them. Memory is the growth of a process of its own.
"""

from __future__ import annotations

import json
import random
import resource
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from txnbridge_conformance.checker import check
from txnbridge_conformance.history import read_history

from benchmarks._harness import Report, Settings, at_most, child, estimate

TRANSACTIONS = 100_000
MESSAGES = 10  # per transaction
PARTITIONS = 4


def write_history(path: Path, transactions: int) -> None:
    """Write a history without findings: one process commits transactions, and a reader reads all of them."""
    with open(path, "w") as file:
        file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in _lines(transactions))


def _lines(transactions: int) -> Iterator[dict[str, Any]]:
    chance = random.Random(1)
    logs: list[list[str]] = [[] for _ in range(PARTITIONS)]
    yield {"history": 1, "process": "writer", "client": "none", "host": "here", "pid": 1}
    for number in range(transactions):
        yield {"start": number, "what": "transaction", "transaction": f"t{number}", "mono": 2 * number}
        committed = chance.random() < 0.9
        for half in range(2):
            partition = chance.randrange(PARTITIONS)
            values = [f"{number}.{half}.{place}" for place in range(MESSAGES // 2)]
            yield {"send": number, "to": ["t", partition], "values": values}
            if committed:
                logs[partition] += values
        yield {"end": number, "result": "ok" if committed else "fail", "mono": 2 * number + 1}
    yield {"start": transactions, "what": "read", "topics": ["t"], "mono": 2 * transactions}
    for partition, log in enumerate(logs):
        for at in range(0, len(log), 500):
            messages = [["t", partition, [at + place], value] for place, value in enumerate(log[at : at + 500])]
            yield {"poll": transactions, "group": None, "messages": messages}
    yield {"end": transactions, "result": "ok", "mono": 2 * transactions + 1}


def judge(pipe: Connection) -> None:
    """Judge the history whose path comes through the pipe; send the seconds, and the process's memory in MiB."""
    path = pipe.recv()
    begin = time.perf_counter()
    findings = check(read_history([path]))
    seconds = time.perf_counter() - begin
    assert findings.counts == {}, findings.counts
    pipe.send((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def checker(settings: Settings, broker: str) -> None:
    path = settings.folder / "history.jsonl"
    transactions = 1_000 if settings.quick else TRANSACTIONS
    write_history(path, transactions)
    ours: list[tuple[float, float]] = []
    parsing: list[float] = []
    for _ in range(settings.rounds):
        with child(judge) as pipe:
            pipe.send(path)
            ours.append(pipe.recv())
        begin = time.perf_counter()
        with open(path, "rb") as file:
            for line in file:
                json.loads(line)
        parsing.append(time.perf_counter() - begin)
    report = Report(settings, f"Judging a history of {transactions:,} transactions of {MESSAGES} messages")
    seconds, memory = zip(*ours, strict=True)
    report.figure("reading and checking", estimate(seconds), "s", at_most(60))
    report.figure("parsing the same lines as JSON", estimate(parsing), "s")
    report.figure("reading and checking / parsing", estimate([a / b for a, b in zip(seconds, parsing, strict=True)]))
    report.single("memory of the process", max(memory), "MiB", at_most(2048))
