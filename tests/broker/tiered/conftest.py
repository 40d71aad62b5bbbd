"""A broker with a tier for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace_protocol.tier.location import Location
from tests.support.broker import BrokerUnderTest
from tests.support.object_server import serving
from tests.support.tiered_broker import start


@pytest.fixture
def broker(tmp_path: Path) -> BrokerUnderTest:
    return start(tmp_path)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Location]:
    with serving(tmp_path_factory.mktemp("s3")) as location:
        yield location
