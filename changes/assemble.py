"""Make one section of the changelog from the fragments in this folder: see README.md beside this file."""

from __future__ import annotations

import argparse
import datetime
import re
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
CHANGELOG = HERE.parent / "CHANGELOG.md"
KINDS = ("added", "changed", "fixed", "removed")
NAME = re.compile(rf"[a-z0-9]+(-[a-z0-9]+)*\.({'|'.join(KINDS)})\.md")


def fragments(folder: Path = HERE) -> list[Path]:
    return sorted(path for path in folder.glob("*.md") if path.name != "README.md")


def fault(name: str, text: str) -> str | None:
    """What is wrong with a fragment, or None."""
    if not NAME.fullmatch(name):
        return f"{name}: a fragment is named <words-with-hyphens>.<{'|'.join(KINDS)}>.md"
    if "\n\n" in text.strip() or not text.strip().endswith("."):
        return f"{name}: a fragment is one paragraph that ends with a full stop"
    return None


def section(version: str, date: str, paths: Iterable[Path]) -> str:
    """The fragments as one section, by kind."""
    lines = [f"## {version} ({date})"]
    by_kind = {kind: [path for path in paths if path.suffixes[-2] == f".{kind}"] for kind in KINDS}
    for kind, files in by_kind.items():
        if files:
            entries = (" ".join(path.read_text().split()) for path in files)
            lines += ["", f"### {kind.capitalize()}", "", *(f"- {entry}" for entry in entries)]
    return "\n".join(lines) + "\n"


def release(changelog: Path, text: str, paths: Iterable[Path]) -> None:
    """Put a section on top of the changelog, and delete the fragments that it came from."""
    title, _, older = changelog.read_text().partition("\n") if changelog.exists() else ("# Changelog", "", "")
    changelog.write_text(f"{title}\n\n{text}{older}")
    for path in paths:
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version")
    parser.add_argument("--write", action="store_true", help="put it into CHANGELOG.md, delete the fragments")
    arguments = parser.parse_args()
    paths = fragments()
    faults = [problem for path in paths if (problem := fault(path.name, path.read_text()))]
    if faults or not paths:
        parser.error("; ".join(faults) or "there are no fragments")
    text = section(arguments.version, datetime.date.today().isoformat(), paths)
    if arguments.write:
        release(CHANGELOG, text, paths)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
