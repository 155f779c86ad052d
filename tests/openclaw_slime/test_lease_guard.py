"""The last look at a lease: before the optimizer, once a step, and with one answer for all ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from openclaw_rl.trainer_protocol import LeaseRef
from openclaw_rl.trainers.client import TrainerClient
from openclaw_slime.lease_guard import LeaseGuard, is_over

CHILD = Path(__file__).with_name("lease_guard_child.py")
LEASE = LeaseRef(lease_id="lease-7-x", fence=7)


@pytest.mark.parametrize("is_not_finite", [False, True])
@pytest.mark.parametrize("is_lease_over", [False, True])
def test_the_step_is_made_only_on_finite_numbers_and_a_live_lease(is_not_finite: bool, is_lease_over: bool) -> None:
    asked: list[LeaseRef] = []
    optimizer = SimpleNamespace(prepare_grads=lambda: is_not_finite)

    def ask(lease: LeaseRef) -> bool:
        asked.append(lease)
        return is_lease_over

    guard = LeaseGuard(optimizer, ask)
    assert optimizer.prepare_grads() is is_not_finite  # no lease: a step of slime's own
    guard.watch(LEASE)
    assert optimizer.prepare_grads() is (is_not_finite or is_lease_over)
    assert guard.has_left_out is is_lease_over
    assert asked == [LEASE]  # every rank asks, whatever its own numbers: the answer is a collective
    assert optimizer.prepare_grads() is is_not_finite  # inside the step, when it is too late
    assert asked == [LEASE]
    guard.watch(LEASE)
    assert not guard.has_left_out


@pytest.mark.parametrize(("status", "over"), [(200, False), (409, True), (503, False), (401, False)])
def test_a_server_that_does_not_say_so_ends_no_step(status: int, over: bool) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert json.loads(request.content) == {**LEASE.model_dump(), "begins_step": True}
        return httpx.Response(status, json={"expires_at": 1.0})

    assert is_over(TrainerClient("http://server", "t", transport=httpx.MockTransport(answer)), LEASE) is over


@pytest.mark.parametrize("status", [200, 409])
def test_every_rank_has_the_answer_of_the_first(status: int, tmp_path: Path) -> None:
    """Ranks that would ask by themselves could differ: the other one's server says the opposite."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen(
            [sys.executable, CHILD, str(rank), str(said), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, said in enumerate((status, 609 - status))
    ]
    try:
        answers = [child.communicate(timeout=120)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [json.loads(out) for out in answers] == [status == 409] * 2
