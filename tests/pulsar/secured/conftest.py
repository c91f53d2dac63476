from collections.abc import Iterator

import pytest

from tests.pulsar.secured_kit import Secured, start_secured


@pytest.fixture(scope="session")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with start_secured(tmp_path_factory.mktemp("secured")) as found:
        yield found
