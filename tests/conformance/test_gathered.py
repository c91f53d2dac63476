"""The embedded broker keeps the contract of transactions also if each one is gathered, although it is alone."""

import pytest

from tests.conformance.conftest import URL
from tests.gathered import *  # noqa: F403


@pytest.fixture(scope="module")
def txnbridge_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return URL.replace("{folder}", str(tmp_path_factory.mktemp("gathered"))) + "&group_commit=true"
