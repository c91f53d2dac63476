"""Commands of plug-ins, and plug-ins that could not be loaded."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from txnbridge._plugins import plugins

if TYPE_CHECKING:
    import click


@functools.cache
def plugin_commands() -> dict[str, click.Command]:
    """Return the commands of all plug-ins by name. A plug-in that fails is listed in `failed_plugins`."""
    return {command.name: command for command in plugins.commands() if command.name}


def failed_plugins() -> dict[str, BaseException]:
    """Return the plug-ins that could not be loaded, by name, after trying all of them."""
    plugins.backends()
    plugin_commands()
    return dict(sorted(plugins.failed.items()))
