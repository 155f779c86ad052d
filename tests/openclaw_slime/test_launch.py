"""The node's command beside its processes: what it does again."""

from pathlib import Path

import pytest

from openclaw_rl.errors import SettingsError
from openclaw_slime import launch
from openclaw_slime.processes import Command, DoesNotStart


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Command, Command]]:
    """PRM and server of each run; every run ends because its PRM does not start."""
    found: list[tuple[Command, Command]] = []

    def run(prm: Command, server: Command, driver: Command, *, data_dir: Path) -> int:
        found.append((prm, server))
        raise DoesNotStart(prm, "does not start: OSError: [Errno 98] address already in use")

    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(launch, "is_free", lambda port: True)
    return found


def started(*more: str) -> None:
    given = launch.launch_parser().parse_args(["--method", "opd", "--hf-checkpoint", "CHECKPOINT", *more])
    launch._run(launch._plan_of(given), given)


def test_a_prm_that_does_not_start_gets_another_port_which_its_callers_know(
    runs: list[tuple[Command, Command]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SettingsError, match="prm does not start: OSError"):
        started()
    ports = [prm.port for prm, _ in runs]
    assert ports[0] == launch.PRM_PORT
    assert len(set(ports)) == launch.PRM_STARTS
    for prm, server in runs:
        assert prm.arguments[prm.arguments.index("--port") + 1] == str(prm.port)
        assert f"judge.url=http://127.0.0.1:{prm.port}/v1" in server.arguments
        assert f"method.teacher_url=http://127.0.0.1:{prm.port}" in server.arguments
    assert capsys.readouterr().err.count("again on another port") == launch.PRM_STARTS - 1


def test_a_port_that_the_user_chose_stays(runs: list[tuple[Command, Command]]) -> None:
    with pytest.raises(SettingsError, match="prm does not start"):
        started("--prm-port", "31000")
    assert [prm.port for prm, _ in runs] == [31000]


def test_a_server_that_does_not_start_is_no_matter_of_the_prms_port(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[Command] = []

    def run(prm: Command, server: Command, driver: Command, *, data_dir: Path) -> int:
        starts.append(server)
        raise DoesNotStart(server, "does not start")

    monkeypatch.setattr(launch, "run", run)
    with pytest.raises(SettingsError, match="server does not start"):
        started()
    assert len(starts) == 1
