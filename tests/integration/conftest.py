"""One real server with the bundled model for the whole folder: real engine, real trainer, real processes.

The chaos run runs beside the other tests.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from beside import Beside

from openclaw_rl.testing.running_server import RunningServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, bundled_cache: Path) -> Iterator[RunningServer]:
    data_dir: Path = tmp_path_factory.mktemp("server") / "data"
    shutil.copytree(bundled_cache, data_dir / "cache", copy_function=os.link)
    with RunningServer(
        data_dir, ["--batch-size", "2", "--set", "server.api_keys=[{key='sk-test', user='uma'}]"]
    ) as server:
        yield server


CHAOS = "test_chaos.py"
CHAOS_ARGUMENTS = (
    "--minutes 1.9 --sessions 120 --streams 24 --embedded 3 --tokens-per-s 20 --say-every-s 10"
    " --kills engine=4,judge=4,trainer=5,server=2 --embedded-kills engine=1,trainer=1,server=1"
)
"""With starting and coming to rest about three minutes. CHAOS_SEED draws the same fates again."""
_chaos = pytest.StashKey[Beside]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the test that waits for the chaos run to the end."""
    items.sort(key=lambda item: item.path.name == CHAOS)


def pytest_runtestloop(session: pytest.Session) -> None:
    """Start the chaos run with the first test, if its own test is selected."""
    if any(item.path.name == CHAOS for item in session.items) and not session.config.option.collectonly:
        session.config.stash[_chaos] = _start(Path(tempfile.mkdtemp(prefix="chaos-")))


def pytest_sessionfinish(session: pytest.Session) -> None:
    run = session.config.stash.get(_chaos, None)
    if run is not None:
        run.stop()


def _start(folder: Path) -> Beside:
    script = Path(__file__).parents[2] / "scripts" / "chaos.py"
    seed = os.environ.get("CHAOS_SEED")
    arguments = CHAOS_ARGUMENTS.split() + (["--seed", seed] if seed else [])
    return Beside([str(script), str(folder / "run"), *arguments], folder / "out")


@pytest.fixture(scope="session")
def chaos_run(request: pytest.FixtureRequest) -> Beside:
    return request.config.stash[_chaos]
