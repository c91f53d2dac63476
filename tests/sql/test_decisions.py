"""Decisions on a log in a database."""

import uuid

import pytest

from tests.log_decisions import *  # noqa: F403
from tests.log_decisions import SECONDS, Numbered
from tests.sql.test_log import open_logs  # noqa: F401
from txnbridge.spi import Deadline

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]  # each record goes to the disk by itself


@pytest.fixture
def mirror(url, open_logs):  # noqa: F811
    logs = open_logs(url)
    return lambda origin=None: Numbered(lambda: logs.decision_log(uuid.uuid4().hex[:12], Deadline(SECONDS)), origin)
