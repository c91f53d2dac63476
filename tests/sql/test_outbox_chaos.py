"""Everything at once: whatever dies, the rows that were committed are published, one for one and in order."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter, defaultdict
from contextlib import contextmanager, suppress

import pytest
import sqlalchemy as sa
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers import RocketMQ
from txnbridge_conformance.run import official
from txnbridge_conformance.run.plan import Plan

import txnbridge
from tests import chaos
from tests.sql.outbox_programs import SENT, TOPIC, Shop, outbox, relay_until_killed, shop_until_killed
from txnbridge import TxnBridgeError
from txnbridge.spi import Deadline
from txnbridge.sql.relay import OutboxStore
from txnbridge.testing import Child

pytestmark = [pytest.mark.full, pytest.mark.live, pytest.mark.timeout(chaos.SECONDS + 900)]

SHOPS, RELAYS = 3, 2


@contextmanager
def started(name, tmp_path):
    """Start a broker; yield its URL, and the broker if it can be killed."""
    if name == "embedded":
        yield f"embedded:{tmp_path / 'broker.db'}", None
    else:
        with getattr(brokers, name)() as broker:
            yield (f"{broker.url}?admin_url={broker.admin_url}" if broker.admin_url else broker.url), broker


class Attack:
    """Processes of shops and relays, and what is done to them, to the broker and to the database."""

    def __init__(self, shop, broker, server, chance, bridge):
        self.shop, self.broker, self.server, self.chance, self.bridge = shop, broker, server, chance, bridge
        self.deeds: Counter[str] = Counter()
        self._numbers = 0
        self.shops = [self._shop() for _ in range(SHOPS)]
        self.relays = [self._relay() for _ in range(RELAYS)]

    def _shop(self):
        self._numbers += 1
        return Child(shop_until_killed, self.shop, f"shop{self._numbers}", chaos.SEED)

    def _relay(self):
        return Child(relay_until_killed, self.shop, {"takeover": 1.5, "hold": 2, "batch": 200})

    def do_one(self):
        deed = self.chance.choice(("shop", "relay", "relay", "pause", "abort", "broker", "database"))
        self.deeds[deed] += 1
        number = self.chance.randrange(RELAYS)
        match deed:
            case "shop":
                self.shops.pop(0).kill()
                self.shops.append(self._shop())
            case "relay":
                self.relays[number].kill()
                self.relays[number] = self._relay()
            case "pause":
                self.relays[number].pause()
                time.sleep(self.chance.uniform(0, 6))
                self.relays[number].unpause()
            case "abort":
                with suppress(TxnBridgeError):
                    for each in self.bridge.admin.transactions():
                        if any(topic == TOPIC for topic, _ in each.partitions):
                            self.bridge.admin.abort(each.transaction, reason="test")
            case "broker" if self.broker is not None and self.chance.random() < 0.5:
                self.broker.kill(self.broker.nodes[0])
                self.broker.start(self.broker.nodes[0])
            case "database" if self.server is not None:
                self.server.kill()
                self.server.start()

    def stop(self):
        for child in (*self.shops, *self.relays):
            child.kill()


@pytest.mark.parametrize("name", ["embedded", "kafka", "pulsar", "rocketmq"])
def test_what_was_committed_is_published_one_for_one(name, new_database, tmp_path, request):
    chance = chaos.begin()
    url = new_database()
    server = request.getfixturevalue("postgres") if url.startswith("postgresql") else None
    engine = sa.create_engine(url)
    outbox().create(engine)
    SENT.create(engine)
    with started(name, tmp_path) as (address, broker), txnbridge.connect(address, timeout=10) as bridge:
        bridge.admin.create_topic(TOPIC, 3)
        shop = Shop(address, url)
        attack = Attack(shop, broker, server, chance, bridge)
        try:
            until = time.monotonic() + chaos.SECONDS
            while time.monotonic() < until:
                attack.do_one()
                time.sleep(chance.uniform(0, 3))
            for child in attack.shops:
                child.kill()
            store = OutboxStore(outbox(), engine)
            eventually_long(lambda: store.count(Deadline(30)) == 0)
        finally:
            attack.stop()
        assert store.parked(Deadline(30)) == []
        with engine.connect() as connection:
            sent = list(connection.scalars(sa.select(SENT.c.value)))
        assert len(sent) > 50, "too little was sent to prove anything"
        chaos.say(f"{len(sent)} messages, {dict(attack.deeds)}")
        judge(sent, ours(address))
        if broker is not None:
            judge(sent, officially(address, broker))
    engine.dispose()


def eventually_long(condition):
    until = time.monotonic() + chaos.SETTLING
    while not condition():
        assert time.monotonic() < until, "rows are not published"
        time.sleep(0.5)


def ours(address):
    """Return partition and value of all messages, as our reader reads them."""
    with txnbridge.connect(address, timeout=60) as bridge:
        found = bridge.read(TOPIC, 10_000_000)
    return [(message.partition, message.value.decode().partition("|")[0]) for message in found]


def officially(address, broker):
    """Return the same as the broker's own client reads it, in a process of its own."""
    plan = Plan(address, "outbox", 0, 0, "", grpc=broker.grpc_address() if isinstance(broker, RocketMQ) else "")
    if official.name_of(plan) is None:
        chaos.say("the broker's own client is not installed")
        return ours(address)
    command = [sys.executable, "-m", official.__name__, plan.to_json(), TOPIC]
    done = subprocess.run(command, capture_output=True, timeout=300, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return [(partition, value) for _, partition, _, value in lines]


def judge(sent, read):
    twice = [value for value, times in Counter(value for _, value in read).items() if times > 1]
    assert (twice, set(sent) - {value for _, value in read}, {value for _, value in read} - set(sent)) == (
        [],
        set(),
        set(),
    )
    newest: defaultdict[tuple[int, str], int] = defaultdict(int)
    for partition, value in read:  # a shop sends by one connection, so its messages of a partition keep their order
        shop, _, number = value.partition("/")
        assert newest[partition, shop] <= int(number), f"{value} is behind a later message of its shop"
        newest[partition, shop] = int(number)
