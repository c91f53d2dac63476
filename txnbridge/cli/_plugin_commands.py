"""Returns the commands of plug-ins, and the plug-ins that could not be loaded."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from txnbridge._base.plugins import plugins

if TYPE_CHECKING:
    import click


@functools.cache
def plugin_commands() -> dict[str, click.Command]:
    """Return the commands of all plug-ins, by name. `failed_plugins` returns the plug-ins that raised an error."""
    return {command.name: command for command in plugins.commands() if command.name}


def failed_plugins() -> dict[str, BaseException]:
    """Load all plug-ins; return the errors of those that could not be loaded, by the plug-in's name."""
    plugins.backends()
    plugin_commands()
    return dict(sorted(plugins.failed.items()))
