"""The command `txnbridge new`, which writes a small service with its test, to begin from."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from string import Template

import click

from txnbridge.cli import _common
from txnbridge.cli._common import Cli

# The files of the new project, each with the template that it is made of.
_FILES = {
    "app.py": "app.py",
    "test_app.py": "test_app.py",
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "Dockerfile": "Dockerfile",
    "compose.yaml": "compose.yaml",
    ".github/workflows/test.yml": "test.yml",
    ".gitignore": "gitignore",
}


@_common.command("new", broker=False)
@click.argument("name")
def command(cli: Cli, name: str) -> None:
    """Write a service into a new folder NAME: an App, its test, Dockerfile, compose file and CI.

    Its test passes at once, without a broker.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or len(name) > 60:
        raise click.UsageError(
            "a service's name is up to 60 lower-case letters, digits and single hyphens, like my-shop"
        )
    folder = Path(name)
    if folder.exists():
        raise click.UsageError(f"{name} is there already: choose another name, or move it away")
    templates = files("txnbridge.cli") / "_project_template"
    for path, template in _FILES.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        text = (templates / f"{template}.template").read_text("utf-8")
        target.write_text(Template(text).substitute(name=name), "utf-8")
    (folder / "wheels").mkdir()
    (folder / "wheels" / ".gitkeep").touch()
    cli.answer({"folder": name, "files": sorted(_FILES)}, f"{name} is there. Next: cd {name} && pytest")
