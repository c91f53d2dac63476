"""What a test of the suite says about the capabilities that it stands on."""

from __future__ import annotations

import pytest

from txnbridge import Capability


def proves(*capabilities: Capability, chance: bool = False) -> pytest.MarkDecorator:
    """This test fails on a broker that lacks one of these capabilities.

    Where one is declared absent the test still runs, and is expected to fail: one that passes says that the
    declaration is out of date. With `chance` it may pass by luck without the capability, so there it is skipped.
    """
    return pytest.mark.proves(*capabilities, chance=chance)


def needs(*capabilities: Capability) -> pytest.MarkDecorator:
    """This test uses these capabilities to prove something else; where one is declared absent it is skipped."""
    return pytest.mark.needs(*capabilities)
