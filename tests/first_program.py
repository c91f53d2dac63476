"""The README's first program, as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import txnbridge
from tests.house.rooms import ROOT

URL = "embedded:shop.db"


def program() -> str:
    found = re.findall(r"^```python\n(.+?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (source,) = (each for each in found if URL in each)
    return str(source)


def check_first_program(url: str, folder: Path) -> None:
    """Run it against a broker, in a process of its own, and look at what came of it."""
    source = program().replace(URL, url)
    done = subprocess.run([sys.executable, "-c", source], cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    with txnbridge.connect(url) as bridge:
        assert [(m.key, m.value) for m in bridge.read("shipments", 10)] == [(b"42", b"ship order 42")]
        assert [m.value for m in bridge.read("audit", 10)] == [b"order 42 taken"]
        assert bridge.read("orders-dead", 10) == []
        assert bridge.admin.topic("orders").partitions == 6
