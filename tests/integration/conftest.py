"""One real server with the bundled model for the whole folder: the real engine, the real trainer, real processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from openclaw_rl.testing.running_server import RunningServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    data_dir: Path = tmp_path_factory.mktemp("server") / "data"
    with RunningServer(
        data_dir, ["--batch-size", "2", "--set", "server.api_keys=[{key='sk-test', user='uma'}]"]
    ) as server:
        yield server
