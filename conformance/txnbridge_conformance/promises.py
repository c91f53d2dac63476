"""Marks for tests of the suite: which capability a test proves, and which ones it needs."""

from __future__ import annotations

import pytest

from txnbridge import Capability


def proves(*capabilities: Capability, chance: bool = False) -> pytest.MarkDecorator:
    """Mark a test that fails on a broker without one of these capabilities.

    If a backend declares a capability absent, the test runs and is expected to fail: a pass shows that the declaration
    is out of date. A test with `chance` may pass by luck without the capability, so it is skipped instead.
    """
    return pytest.mark.proves(*capabilities, chance=chance)


def needs(*capabilities: Capability) -> pytest.MarkDecorator:
    """Mark a test that uses these capabilities to prove something else; without one of them it is skipped."""
    return pytest.mark.needs(*capabilities)
