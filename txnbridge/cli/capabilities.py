"""The command `txnbridge capabilities`, which shows the capabilities of a broker or of all backends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click

from txnbridge import plugins
from txnbridge.capabilities import Capability, Level, Limits, Support
from txnbridge.cli import _common
from txnbridge.cli._common import Cli
from txnbridge.spi import Backend

_STYLES = {Level.NATIVE: "green", Level.EMULATED: "yellow", Level.ABSENT: "red"}


@_common.command("capabilities")
@click.argument("where", metavar="[URL]", required=False)
@click.option("--all", "every", is_flag=True, help="Compare all installed backends; the default without a URL.")
def command(cli: Cli, where: str | None, every: bool) -> None:
    """Show what the broker at URL promises: natively, by emulation or not at all, and why.

    Without a URL: a table of all installed backends.
    """
    if not every and (where or cli.url):
        _one(cli, where)
    else:
        _all(cli, sorted(plugins.backends(), key=lambda backend: backend.name))


def _one(cli: Cli, where: str | None) -> None:
    from rich.text import Text

    with cli.look(where) as bridge:
        capabilities, limits = bridge.capabilities, bridge.limits
        broker, url = bridge.backend, bridge.url
    if cli.json:
        cli.document({"url": url, **_as_json(broker, capabilities, limits)})
        return
    cli.say(f"{broker} at {url}\n")
    rows = []
    for capability, support in capabilities.items():
        level = Text(support.level.value, _STYLES[support.level])
        rows.append((capability.value, level, capability.sentence + _note(support)))
    cli.table(["capability", "level", "its meaning, and how it is kept or why it is absent"], rows)
    cli.say("")
    values = asdict(limits).items()
    cli.table(["limit", "value"], [(name.replace("_", " "), "none" if v is None else str(v)) for name, v in values])


def _note(support: Support) -> str:
    if not support.note:
        return ""
    link = f" ({support.link})" if support.link else ""
    return f" {'How' if support else 'Why not'}: {support.note}{link}"


def _all(cli: Cli, backends: list[Backend]) -> None:
    from rich.text import Text

    if cli.json:
        cli.document([_as_json(backend.name, backend.capabilities, backend.limits) for backend in backends])
        return
    rows: list[list[object]] = []
    for capability in Capability:
        levels = [backend.capabilities[capability].level for backend in backends]
        rows.append([capability.value, *(Text(level.value, _STYLES[level]) for level in levels)])
    cli.table(["capability", *(backend.name for backend in backends)], rows)
    cli.say("\nWith a URL: what each means, and how it is kept or why not.")


def _as_json(broker: str, capabilities: Mapping[Capability, Support], limits: Limits) -> dict[str, Any]:
    return {
        "backend": broker,
        "capabilities": {
            capability.value: {
                "level": support.level.value,
                "sentence": capability.sentence,
                "note": support.note,
                "link": support.link,
            }
            for capability, support in capabilities.items()
        },
        "limits": asdict(limits),
    }
