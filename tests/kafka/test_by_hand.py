"""The two programs of docs/from-confluent-kafka.md: the second one takes up where the first one has stopped."""

import os
import re
import subprocess
import sys

import pytest

import txnbridge
from tests.house.rooms import ROOT


@pytest.mark.timeout(200)
def test_a_group_moves_from_the_loop_by_hand_to_a_processor(kafka_broker, tmp_path):
    page = (ROOT / "docs" / "from-confluent-kafka.md").read_text()
    (tmp_path / "by_hand.py").write_text((ROOT / "docs" / "programs" / "by_hand.py").read_text())
    for name, source in re.findall(r"^```python\n# (\w+\.py)\n(.+?)^```$", page, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(source)
    servers = kafka_broker.url.removeprefix("kafka://").partition("?")[0]

    def run(name: str) -> None:
        environment = {**os.environ, "SERVERS": servers, "TURNS": "20"}
        subprocess.run([sys.executable, name], cwd=tmp_path, env=environment, check=True, timeout=100)

    with txnbridge.connect(kafka_broker.url) as bridge:
        bridge.ensure_topics("orders", "shipments")
        for program, sent in (("by_hand.py", [b"1", b"2"]), ("ours.py", [b"3", b"4"])):
            with bridge.transaction() as txn:
                txn.send_many("orders", sent)
            run(program)
        assert [message.value for message in bridge.read("shipments", 10)] == [b"1", b"2", b"3", b"4"]
