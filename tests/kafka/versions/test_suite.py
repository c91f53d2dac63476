"""Kafka as it was before transactions had an epoch each passes the whole suite too."""

import pytest
from txnbridge_conformance.suite import *  # noqa: F403

pytestmark = pytest.mark.full
