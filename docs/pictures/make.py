"""Makes the pictures of README and site: python docs/pictures/make.py. Demo and report are of a run on this machine."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.terminal_theme import MONOKAI
from rich.text import Text

HERE = Path(__file__).parent
COLUMNS = 100


def main() -> None:
    """Write all pictures into the folder of this script."""
    with tempfile.TemporaryDirectory() as folder:
        (HERE / "models.svg").write_text(models())
        (HERE / "demo.svg").write_text(demo(folder))
        (HERE / "report.svg").write_text(report(folder))


# --- three models behind one interface --------------------------------------------------------------------------------

# Each broker: its name, the colour of its box, and how it makes several messages visible together.
MODELS = (
    ("Apache Kafka", "#fef3c7", ["a coordinator decides,", "control markers end the", "transaction in each partition"]),
    (
        "Apache Pulsar",
        "#dbeafe",
        ["a coordinator decides,", "each topic's buffer hides it,", "each subscription its acks"],
    ),
    (
        "Apache RocketMQ",
        "#fee2e2",
        ["half messages wait unseen,", "and the broker asks back", "what became of the work"],
    ),
    ("embedded", "#dcfce7", ["one SQLite file,", "one commit,", "many processes"]),
)


def models() -> str:
    """Return the picture of the three models, and the embedded broker, behind one interface."""
    width, box, gap = 920, 208, 16
    parts = [
        _box(
            20,
            16,
            width - 40,
            44,
            "#eef2ff",
            ["your program:  with bridge.transaction() as txn: txn.send(…), txn.ack(…)"],
        ),
        _box(
            20,
            92,
            width - 40,
            62,
            "#e0e7ff",
            ["txnbridge", "atomic · fenced · exactly once · three outcomes · tokens · one deadline"],
        ),
    ]
    parts += [_arrow(width // 2, 60, 92)]
    for number, (name, colour, lines) in enumerate(MODELS):
        x = 20 + number * (box + gap)
        parts += [_arrow(x + box // 2, 154, 190), _box(x, 190, box, 112, colour, [name, *lines])]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 318" role="img"'
        ' font-family="system-ui, sans-serif" font-size="12.5">'
        "<title>One interface, and three models of transactions behind it</title>"
        f'<rect width="{width}" height="318" rx="8" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def _box(x: int, y: int, width: int, height: int, colour: str, lines: list[str]) -> str:
    """Return a box with lines of text, of which the first is bold if there are more."""
    top = y + height / 2 - 10 * (len(lines) - 1) + 5
    middle, texts = x + width / 2, ""
    for number, line in enumerate(lines):
        weight = 600 if number == 0 and len(lines) > 1 else 400
        texts += f'<text x="{middle}" y="{top + 20 * number}" font-weight="{weight}">{line}</text>'
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{colour}" stroke="#6b7280"/>'
    return f'{shape}<g text-anchor="middle" fill="#111827">{texts}</g>'


def _arrow(x: int, top: int, bottom: int) -> str:
    return (
        f'<path d="M{x} {top} V{bottom - 2} M{x - 4} {bottom - 8} L{x} {bottom - 1} L{x + 4} {bottom - 8}"'
        ' stroke="#6b7280" fill="none"/>'
    )


# --- pictures of a terminal -------------------------------------------------------------------------------------------


def demo(folder: str) -> str:
    """Return the picture of the end of the demo: its claims, and how each was checked."""
    lines = _on_a_terminal([sys.executable, "-m", "txnbridge.cli", "demo"], folder).splitlines()
    begin = next(number for number, line in enumerate(lines) if "claims checked" in line)
    end = next(number for number, line in enumerate(lines) if "What to try next" in line)
    return _picture([Text.from_ansi(line) for line in lines[begin:end]], "txnbridge demo")


def report(folder: str) -> str:
    """Return the picture of a conformance run's verdict on each promise."""
    command = [sys.executable, "-m", "txnbridge.cli", "conformance", "run", f"embedded:{folder}/trial.db"]
    subprocess.run([*command, "--time", "60", "--seed", "7", "--out", f"{folder}/run"], cwd=folder, check=True)
    found = json.loads(Path(folder, "run", "report.json").read_text())
    table = Table("promise", "verdict", "evidence", box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for promise in found["promises"]:
        kept = promise["verdict"] == "kept"
        table.add_row(promise["name"], Text(promise["verdict"], "green" if kept else "yellow"), promise["evidence"])
    return _picture([Text(found["sentence"], "bold"), Text(), table], "txnbridge conformance run embedded:trial.db")


def _on_a_terminal(command: list[str], folder: str) -> str:
    """Return what a command writes to a terminal."""
    ours, terminal = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    with subprocess.Popen(command, stdout=terminal, stderr=terminal, cwd=folder, env=environment) as process:
        os.close(terminal)
        written = b""
        while True:
            try:
                written += os.read(ours, 65536)
            except OSError:  # the command has ended
                break
    os.close(ours)
    assert process.returncode == 0, written.decode()
    return written.decode().replace("\r\n", "\n")


def _picture(parts: list[Text | Table], title: str) -> str:
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))
    for part in parts:
        console.print(part)
    # Without the fonts of another server.
    return re.sub(r"@font-face \{.+?\}", "", console.export_svg(title=title, theme=MONOKAI), flags=re.DOTALL)


if __name__ == "__main__":
    main()
