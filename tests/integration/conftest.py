"""Two real servers for the whole folder, with real engines, trainers and processes.

One has the bundled model, the other its first layers. The chaos run runs beside the other tests.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import bundled
import pytest
from beside import Beside

from openclaw_rl.testing.running_server import RunningServer

ARGUMENTS = (
    *("--batch-size", "2", "--set", "server.api_keys=[{key='sk-test', user='uma'}]"),
    *("--set", "trainer.nice=0"),  # a nice trainer would wait minutes for a step where another job has the cores
)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, bundled_cache: Path) -> Iterator[RunningServer]:
    data_dir: Path = tmp_path_factory.mktemp("server") / "data"
    bundled.link(bundled_cache, data_dir / "cache")
    with RunningServer(data_dir, ARGUMENTS) as server:
        yield server


@pytest.fixture(scope="session")
def short_server(tmp_path_factory: pytest.TempPathFactory, short_model: Path) -> Iterator[RunningServer]:
    arguments = [*ARGUMENTS, "--set", f"model.path={short_model}"]
    with RunningServer(tmp_path_factory.mktemp("short-server") / "data", arguments) as server:
        yield server


CHAOS = "test_chaos.py"
CHAOS_ARGUMENTS = (
    "--minutes 1.9 --sessions 120 --streams 24 --embedded 3 --tokens-per-s 20 --say-every-s 10"
    " --kills engine=4,judge=4,trainer=5,server=2 --embedded-kills engine=1,trainer=1,server=1"
    " --least pairs=101,trained=51,versions=4 --embedded-least pairs=1"
)
"""With starting and coming to rest about three minutes. CHAOS_SEED draws other fates, TEST_SEEDS=new each time."""
_chaos = pytest.StashKey[Beside]()


def pytest_runtestloop(session: pytest.Session) -> None:
    """Start the chaos run with the first test, if its own test is selected."""
    if any(item.path.name == CHAOS for item in session.items) and not session.config.option.collectonly:
        model = bundled.shortened(session.config.cache.mkdir("bundled"))
        session.config.stash[_chaos] = _start(Path(tempfile.mkdtemp(prefix="chaos-")), model)


def pytest_sessionfinish(session: pytest.Session) -> None:
    run = session.config.stash.get(_chaos, None)
    if run is not None:
        run.stop()


def _start(folder: Path, model: Path) -> Beside:
    script = Path(__file__).parents[2] / "scripts" / "chaos.py"
    seed = os.environ.get("CHAOS_SEED") or (None if os.environ.get("TEST_SEEDS") == "new" else "7")
    arguments = [*CHAOS_ARGUMENTS.split(), "--embedded-model", str(model), *(["--seed", seed] if seed else [])]
    return Beside([str(script), str(folder / "run"), *arguments], folder / "out")


@pytest.fixture(scope="session")
def chaos_run(request: pytest.FixtureRequest) -> Beside:
    return request.config.stash[_chaos]
