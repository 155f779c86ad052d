"""The words with which a container is started. A container itself needs docker or podman and an image."""

from pathlib import Path

from openclaw_rl.agents.sandbox import Limits, Profile
from openclaw_rl.agents.sandbox.containers import answers, start_words


def test_a_container_has_no_network_no_capabilities_and_the_limits() -> None:
    words = start_words(Profile(image="debian:12", gateway=Path("/g"), programs=(Path("/opt/x"),)), Limits(), "name")
    text = " ".join(words)
    for part in (
        "--network none", "--cap-drop ALL", "--security-opt no-new-privileges", "--pull never", "--pids-limit 128",
        "--memory 2048m", "--ulimit fsize=104857600", "--volume /g:/run/gateway:ro", "--volume /opt/x:/opt/x:ro",
    ):  # fmt: skip
        assert part in text
    assert words[-4:] == ["--entrypoint", "sleep", "debian:12", "infinity"]


async def test_a_program_that_is_not_there_does_not_answer() -> None:
    assert not await answers("no-such-program-as-this")
