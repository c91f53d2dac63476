"""Everything at once: whatever dies or stands still, each committed row has its message, once, and no other has one."""

import itertools
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import sqlalchemy as sa
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers import Pulsar, RocketMQ
from txnbridge_conformance.run import official_readers as official
from txnbridge_conformance.run.bodies import text_of
from txnbridge_conformance.run.plan import Plan

import txnbridge
from tests import chaos
from tests.core import half_topic_backend
from tests.sql import chaos_programs
from txnbridge import Outcome, TxnBridgeError, plugins
from txnbridge.testing import Child, Unvisited

pytestmark = [pytest.mark.full, pytest.mark.live, pytest.mark.timeout(chaos.SECONDS + 900)]

COMMITTED, ABORTED = Outcome.COMMITTED.value, Outcome.ABORTED.value
WRITERS, WORKERS = 3, 2
QUIET_SECONDS = 15.0  # without a message; then nothing comes any more
OPTIONS = {
    "embedded": "lease_seconds=1.5&half_check_seconds=0.3&half_checks=1000",
    "half-topic": "lease_seconds=1.5&half_check_seconds=0.3&half_checks=1000",
    "kafka": "session.timeout.ms=6000&heartbeat.interval.ms=300&half_check_seconds=1&half_checks=1000",
    "pulsar": "half_check_seconds=1&half_checks=1000",
    "rocketmq": "",
}


@contextmanager
def started(name, tmp_path):
    """Start a broker; yield its URL, and the broker if it can be killed."""
    if name in ("embedded", "half-topic"):
        yield f"{name}:{tmp_path / 'broker.db'}", None
    else:
        with getattr(brokers, name)() as broker:
            yield (f"{broker.url}?admin_url={broker.admin_url}" if broker.admin_url else broker.url), broker


class Attack:
    """Processes of writers and workers, and what is done to them, to the broker and to the database."""

    def __init__(self, place, broker, server, chance, bridge):
        self.place, self.broker, self.server, self.chance, self.bridge = place, broker, server, chance, bridge
        self.deeds: Counter[str] = Counter()
        self._wake_at: dict[Child, float] = {}
        self._starts = itertools.count()
        self.children = [self._start(number) for number in range(WRITERS + WORKERS)]

    def _start(self, number):
        name, ahead = f"{chaos.SEED}-{next(self._starts)}", self.chance.choice((0, 0, -5, 5))
        stops = {self.chance.choice(("kill", "pause")): self._point()}
        if number < WRITERS:
            return Child(chaos_programs.write_until_killed, self.place, name, ahead, **stops)
        return Child(chaos_programs.work_until_killed, self.place, ahead, **stops)

    def _point(self):
        """Return an event at which a new process is killed or paused: of a step that counts, or any."""
        if self.chance.random() < 0.3:
            return Unvisited(frozenset(), int(2000 ** self.chance.random()))
        step, phase = self.chance.choice(chaos_programs.STEPS[self.place.way]), self.chance.choice(("before", "after"))
        return f"{step}/{phase}/{int(30 ** self.chance.random())}"

    def do_one(self):
        for number, child in enumerate(self.children):
            if child._exit_code() is not None:
                self.children[number] = self._replaced(number, child)
            elif is_stopped(child):
                wake_at = self._wake_at.setdefault(child, time.monotonic() + self.chance.uniform(0, 15))
                if time.monotonic() > wake_at:
                    del self._wake_at[child]
                    self.deeds["woken"] += 1
                    child.unpause()
        deed = self.chance.choice(
            ("kill", "kill", "pause", "pause", "abort", "cut", "database", "broker", "freeze", "unload")
        )
        if deed == "unload":
            done = isinstance(self.broker, Pulsar) and self._unload()
        elif deed in ("broker", "freeze"):
            done = self.broker is not None and self._hit_broker(deed)
        elif deed in ("cut", "database"):
            done = self.server is not None and self._hit_database(deed)
        else:
            done = self._hit_process(deed, self.chance.choice(self.children))
        self.deeds += Counter({deed: done})

    def _hit_process(self, deed, child):
        if deed == "kill":
            child.kill()
        elif deed == "pause":
            child.pause()
        elif self.place.way != "outbox":
            return False  # an administrator who ends a half message overrides the row
        with suppress(TxnBridgeError):
            for each in self.bridge.admin.transactions() if deed == "abort" else ():
                if any(topic in chaos_programs.TOPICS for topic, _ in each.partitions):
                    self.bridge.admin.abort(each.transaction, reason="test")
        return True

    def _hit_database(self, deed):
        if deed == "cut":
            others = "pid <> pg_backend_pid() AND datname = current_database() AND random() < 0.5"
            end = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}"
            self.server.run(self.place.database, end)
        else:
            self.server.kill()
            time.sleep(self.chance.choice((0, 0, 5)))
            self.server.start()
        return True

    def _hit_broker(self, deed):
        if self.chance.random() < 0.5:  # it takes seconds to start
            return False
        if deed == "broker":
            self.broker.restart()
        else:
            self.broker.pause()
            time.sleep(self.chance.uniform(0, 6))
            self.broker.resume()
        return True

    def _unload(self):
        """Let the broker give up all topics, as when they move to another broker."""
        address = f"{self.broker.admin_url}/admin/v2/namespaces/public/default/unload"
        with urllib.request.urlopen(urllib.request.Request(address, method="PUT"), timeout=60):
            return True

    def _replaced(self, number, child):
        if child._exit_code() != -signal.SIGKILL:
            child.result(1)  # raises the error by which it has ended
        self.deeds["died"] += 1
        self._wake_at.pop(child, None)
        return self._start(number)

    def stop(self):
        for child in self.children:
            child.kill()


def is_stopped(child):
    with suppress(OSError):  # it may have ended meanwhile
        return Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


@pytest.mark.parametrize("way", chaos_programs.WAYS)
@pytest.mark.parametrize(
    ("name", "new_database"),
    [("embedded", "sqlite"), *((name, "postgresql") for name in OPTIONS)],
    indirect=["new_database"],
)
def test_each_committed_row_has_its_message_once(way, name, new_database, tmp_path, request):
    chance = chaos.begin()
    database = new_database()
    server = request.getfixturevalue("postgres") if database.startswith("postgresql") else None
    engine = sa.create_engine(database, pool_pre_ping=True)
    chaos_programs.create_tables(engine)
    with plugins.registered(half_topic_backend), started(name, tmp_path) as (address, broker):
        url = f"{address}{'&' if '?' in address else '?'}{OPTIONS[name]}"
        place = chaos_programs.Place(way, url, database, str(tmp_path / "outcomes"))
        with txnbridge.connect(url, timeout=60, application="judge") as bridge:
            for topic, partitions in chaos_programs.TOPICS.items():
                bridge.admin.create_topic(topic, partitions)
            attack = Attack(place, broker, server, chance, bridge)
            try:
                until = time.monotonic() + chaos.SECONDS
                while time.monotonic() < until:
                    attack.do_one()
                    time.sleep(chance.uniform(0, 1))
                attack.stop()
                attack.children = [
                    Child(chaos_programs.work_until_killed, place, 0) for _ in range(WORKERS)
                ]  # end what is left
                sold = settled(bridge, engine)
            finally:
                attack.stop()
            chaos.say(f"{way} on {name}: {len(sold)} rows, {dict(attack.deeds)}")
            read = [message for topic in chaos_programs.TOPICS for message in bridge.read(topic, 10_000_000)]
        assert len(sold) > 50, "too little was sold to prove anything"
        judge(sold, [(m.topic, m.partition, text_of(m)) for m in read], ordered=way == "outbox")
        for message in read:
            row, size = sold[text_of(message)], -1 if message.value is None else len(message.value)
            assert (row.key, row.size) == (message.key, size)
        judge_outcomes(place, sold)
        if broker is not None:
            read = officially(address, broker)
            if name == "rocketmq":
                # It stores a message again in its queue when a request comes late (docs/rocketmq.md). Our readers drop
                # such copies: they have just returned each message once.
                chaos.say(f"the official client received {len(read) - len(set(read))} copies")
                read = list(dict.fromkeys(read))
            judge(sold, read, ordered=way == "outbox")
    engine.dispose()


def settled(bridge, engine):
    """Read until each row has its message and nothing comes any more; return the rows by their names."""
    found, last, until = set(), time.monotonic(), time.monotonic() + chaos.SETTLING
    with bridge.consumer(list(chaos_programs.TOPICS)) as consumer:
        while True:
            if batch := consumer.poll(5_000, timeout=1):
                found |= {text_of(message) for message in batch}
                last = time.monotonic()
            elif time.monotonic() > last + QUIET_SECONDS:
                with engine.connect() as connection:
                    sold = {row.name: row for row in connection.execute(sa.select(chaos_programs.SOLD))}
                if not (missing := sorted(sold.keys() - found)):
                    return sold
                if time.monotonic() > until:
                    still_open, advice = list(bridge.admin.transactions()), bridge.admin.doctor()
                    found_missing = f"{len(missing)} of {len(sold)} are not published: {missing}"
                    pytest.fail(f"{found_missing}; open: {still_open}; the doctor: {advice}")


def officially(address, broker):
    """Return topic, partition and name of all messages as the broker's own client reads them, in its own process."""
    plan = Plan(address, "chaos", 0, 0, "", grpc=broker.grpc_address() if isinstance(broker, RocketMQ) else "")
    if official.name_of(plan) is None:
        pytest.skip("the broker's own client is not installed; our reader has found nothing wrong")
    command = [sys.executable, "-m", official.__name__, *chaos_programs.TOPICS]
    done = subprocess.run(command, input=plan.to_json().encode(), capture_output=True, timeout=300, check=True)
    return [(topic, partition, name) for topic, partition, _, name in map(json.loads, done.stdout.splitlines())]


def judge(sold, read, ordered):
    """Compare rows with messages, given as topic, partition and name, and with `ordered` each key's order."""
    rows, messages = Counter((row.topic, row.name) for row in sold.values()), Counter((t, name) for t, _, name in read)
    assert (messages - rows, rows - messages) == (Counter(), Counter())
    newest: dict[tuple[str, bytes], int] = {}
    for topic, _, name in read if ordered else ():
        if (row := sold[name]).number is None:
            continue
        assert newest.get((topic, row.key), 0) < row.number, f"{name} is behind a later message of its key"
        newest[topic, row.key] = row.number


def judge_outcomes(place, sold):
    """Compare what writers were told, by the name of a transaction's first row, with the rows."""
    path = Path(place.outcomes)
    told = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    wrong = [(name, outcome) for name, outcome in told if outcome == (ABORTED if name in sold else COMMITTED)]
    chaos.say(f"writers were told {dict(Counter(outcome for _, outcome in told))}")
    assert wrong == []
