"""Harbor's task folders as a sandbox follows them; broken ones are named, and the others stay."""

from pathlib import Path

import pytest
import structlog

from openclaw_rl.agents.environments.harbor_tasks import Definition, HarborTask, split_of, task_folders
from openclaw_rl.agents.sandbox import Sandboxes
from openclaw_rl.errors import EnvironmentFault


def make(folder: Path, *, config: str = "", dockerfile: str | None = None) -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "environment").mkdir()
    (folder / "task.toml").write_text(config)
    (folder / "instruction.md").write_text("Do it.")
    (folder / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt")
    (folder / "environment" / "data").mkdir()
    (folder / "environment" / "data" / "a.txt").write_text("a")
    (folder / "environment" / "run.sh").write_text("#!/bin/sh\necho run\n")
    (folder / "environment" / "run.sh").chmod(0o755)
    if dockerfile is not None:
        (folder / "environment" / "Dockerfile").write_text(dockerfile)
    return folder


def test_a_dockerfile_that_copies_is_followed(tmp_path: Path) -> None:
    text = (
        "# syntax\nFROM debian:12 AS base\nWORKDIR /srv/app\nENV A=1 B='two words'\nENV C three\n"
        'COPY --chown=1:1 data \\\n  data/\nCOPY run.sh /opt/tools/run.sh\nCMD ["sh"]\n'
    )
    found = HarborTask.read(make(tmp_path / "t", dockerfile=text)).definition
    assert found == Definition(
        tmp_path / "t" / "environment",
        None,
        "debian:12",
        "/srv/app",
        (("data", "/srv/app/data/"), ("run.sh", "/opt/tools/run.sh")),
        {"A": "1", "B": "two words", "C": "three"},
    )
    assert found.profile(with_containers=True).image == "debian:12"
    assert found.profile(with_containers=False).image is None


async def test_its_files_are_in_the_sandbox(tmp_path: Path, sandboxes: Sandboxes) -> None:
    text = "FROM debian:12\nWORKDIR /app\nCOPY data data\nCOPY run.sh .\nCOPY run.sh /opt/tools/go\nENV WORD=fig\n"
    found = HarborTask.read(make(tmp_path / "t", dockerfile=text)).definition
    async with sandboxes.sandbox(found.profile(with_containers=False)) as sandbox:
        await found.prepare(sandbox)
        done = await sandbox.run("pwd; cat data/a.txt; echo; ./run.sh; /opt/tools/go; echo $WORD; touch /tests/x")
    assert (done.output, done.errors) == (b"/app\na\nrun\nrun\nfig\n", b"")


def test_without_a_dockerfile_the_folder_is_the_work_folder(tmp_path: Path) -> None:
    found = HarborTask.read(make(tmp_path / "t", config='[environment]\nworkdir = "/repo"')).definition
    assert (found.workdir, found.copies) == ("/repo", ((".", "/repo"),))
    found = HarborTask.read(make(tmp_path / "u", config='[environment]\ndocker_image = "mine:1"')).definition
    assert (found.image, found.copies) == ("mine:1", ())
    assert found.profile(with_containers=False).image == "mine:1"


@pytest.mark.parametrize(
    ("dockerfile", "words"),
    [
        ("FROM a\nRUN apt-get update", "has RUN: build the image, and name it as environment.docker_image"),
        ("FROM a\nADD x y", "has ADD"),
        ("FROM a\nCOPY ../../secret x", "copies ../../secret, which is not beside it"),
        ("FROM a\nCOPY /etc/passwd x", "copies /etc/passwd, which is not beside it"),
        ("FROM a\nCOPY none x", "copies none"),
        ("FROM a\nCOPY --from=b x y", "copies from another image"),
        ("FROM 'a", "cannot be read"),
    ],
)
def test_a_dockerfile_that_needs_a_build_is_named(tmp_path: Path, dockerfile: str, words: str) -> None:
    with pytest.raises(EnvironmentFault, match="Dockerfile") as said:
        HarborTask.read(make(tmp_path / "t", dockerfile=dockerfile))
    assert words in str(said.value)


def test_broken_tasks_are_told_once_and_the_others_stay(tmp_path: Path) -> None:
    make(tmp_path / "good")
    make(tmp_path / "deep" / "good")
    make(tmp_path / "toml", config="[environment")
    make(tmp_path / "image", config="[environment]\ndocker_image = 3")
    (make(tmp_path / "untold") / "instruction.md").unlink()
    (make(tmp_path / "untested") / "tests" / "test.sh").unlink()
    with structlog.testing.capture_logs() as events:
        assert set(task_folders(tmp_path)) == {"good", "deep/good"}
    said = sorted(event["error"].removeprefix(f"{tmp_path}/") for event in events)
    assert [line.split(" ")[0].rstrip(":") for line in said] == [
        "image/task.toml", "toml/task.toml", "untested/tests/test.sh", "untold/instruction.md",
    ]  # fmt: skip
    assert list(task_folders(tmp_path / "good")) == ["good"]
    with pytest.raises(EnvironmentFault, match="has no whole task of Harbor"):
        task_folders(tmp_path / "toml")


def test_a_share_is_held_out_by_name_and_new_tasks_move_none() -> None:
    splits = {f"task-{n}": split_of(f"task-{n}", 0.2, seed=0) for n in range(500)}
    assert 70 < list(splits.values()).count("eval") < 130
    assert splits == {name: split_of(name, 0.2, seed=0) for name in splits}
    assert split_of("x", 0.0, 0) == "train"


TESTS = """
test -e /app/done && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
sleep 0.5
"""
CHEATS = {
    "edited tests": "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 444 /tests/test.sh",
    "a reward": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; chmod 444 /logs/verifier/reward.txt",
    "a folder in its place": "mkdir -p /logs/verifier/reward.txt",
    "a link": "mkdir -p /logs; ln -s /app /logs/verifier; echo 1 > /app/reward.txt",
    "a daemon": "(setsid bash -c 'while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; done' &)",
    "a shell's start": "echo 'touch /app/done' | tee ~/.bashrc ~/.profile ~/.bash_profile",
    "a program of that name": "mkdir -p ~/bin /tmp/bin; printf '#!/bin/sh\\necho 1\\n' | tee ~/bin/test /tmp/bin/test",
}


@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS)
async def test_what_the_agent_left_does_not_score_itself(cheat: str, tmp_path: Path, sandboxes: Sandboxes) -> None:
    folder = make(tmp_path / "t")
    (folder / "tests" / "test.sh").write_text(TESTS)
    task = HarborTask.read(folder)
    async with sandboxes.sandbox(task.definition.profile(with_containers=False)) as sandbox:
        await sandbox.run(cheat)
        assert await task.score(sandbox, 120) == 0.0
        await sandbox.run("touch done")
        assert await task.score(sandbox, 120) == 1.0


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        ("true", "wrote no reward"),
        ("echo much > /logs/verifier/reward.txt", "wrote no reward"),
        ("echo 7 > /logs/verifier/reward.txt", "wrote the reward 7.0"),
        ("sleep 100", "ended by the limit of time"),
    ],
)
async def test_tests_that_fail_are_the_environments_fault(
    tests: str, words: str, tmp_path: Path, sandboxes: Sandboxes
) -> None:
    folder = make(tmp_path / "t")
    (folder / "tests" / "test.sh").write_text(tests)
    task = HarborTask.read(folder)
    async with sandboxes.sandbox(task.definition.profile(with_containers=False)) as sandbox:
        with pytest.raises(EnvironmentFault, match=words):
            await task.score(sandbox, 1 if tests == "sleep 100" else 120)
