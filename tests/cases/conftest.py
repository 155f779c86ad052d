"""The small model that every case is told in, and the server processes forked for them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.host import Host
from harness.model import make_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("case-model")
    make_folder(folder)
    return folder


@pytest.fixture(scope="session")
def host(model_folder: Path) -> Iterator[Host]:
    with Host(model_folder) as host:
        yield host
