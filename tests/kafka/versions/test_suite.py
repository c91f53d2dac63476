"""The older versions of Kafka pass the whole suite, too."""

import pytest
from txnbridge_conformance.suite import *  # noqa: F403

pytestmark = pytest.mark.full
