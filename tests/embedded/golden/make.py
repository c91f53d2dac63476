"""Makes `v2.db.xz`, a file of version 2 with something in every table, and `v2.json`, the tokens that go with it.

They were made once, by `python -m tests.embedded.golden.make` in the top folder, and are never made again: what a
version wrote has to stay readable by the next one. A new version gets a file of its own beside them.
"""

import json
import lzma
import tempfile
from pathlib import Path

import txnbridge
from tests.inside import broker_of
from txnbridge.spi import Deadline, Half, HalfMessage

HERE = Path(__file__).parent


def fill(path: Path) -> dict[str, str]:
    """Write a little of everything, and return the tokens by name."""
    tokens = {}
    with txnbridge.connect(f"embedded:{path}", transactional_id="billing", application="golden") as bridge:
        bridge.admin.create_topic("orders", 3, retention_seconds=10**9, retention_bytes=10**12)
        with bridge.transaction() as txn:
            txn.send("orders", b"1", key=b"key", headers=[("h", b"\xff\x00"), ("h", "ü")], partition=0, timestamp=1234)
            txn.send("orders", None, key=b"", partition=1, timestamp=1235)
            txn.send("orders", b"", partition=2, timestamp=1236)
            txn.send_many("inputs", [b"%d" % number for number in range(10)])
        with bridge.consumer("inputs", "group") as consumer:
            batch = consumer.poll(4, timeout=10)
            with bridge.transaction() as txn:
                txn.ack(batch[0])
                txn.ack(batch[2])
            with bridge.transaction(prepare=True, hold=10**9) as txn:
                txn.ack(batch[1])
                txn.send("orders", b"prepared", partition=0, timestamp=1237)
            tokens["prepared"] = str(txn.token)
        for name, end in (("committed", bridge.commit), ("aborted", bridge.abort)):
            with bridge.transaction(prepare=True) as txn:
                txn.send("ended", name.encode())
            tokens[name] = str(txn.token)
            end(tokens[name])
        with bridge.publisher("import") as publisher:
            publisher.send("published", b"7", sequence=7)
        log = broker_of(bridge).decision_log("golden", Deadline(10))
        for record in (b"first", b"second", b"third"):
            log.append(record, Deadline(10))
        log.trim((1,), Deadline(10))
        halves = broker_of(bridge).half_store()
        assert halves is not None
        message = HalfMessage("halves", b"h", b"k", [("a", b"b")])
        halves.put(Half("g", "half", [message], 1, 2), Deadline(10))
    return tokens


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "v2.db")
        (HERE / "v2.json").write_text(json.dumps(fill(path), indent=1) + "\n")
        (HERE / "v2.db.xz").write_bytes(lzma.compress(path.read_bytes(), preset=9))


if __name__ == "__main__":
    main()
