"""Older versions of Pulsar, and one that keeps nothing longer than it must, pass the whole suite too."""

import pytest
from txnbridge_conformance.plugin import topic  # noqa: F401
from txnbridge_conformance.suite import *  # noqa: F403

pytestmark = pytest.mark.full
