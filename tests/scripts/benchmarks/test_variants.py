"""Every variant of the learning benchmark's presets uses settings that exist, so that no GPU call ends on a typo."""

import pytest

from benchmarks.learning.experiment import METHODS, Job, Plan, Run, Variant, shared_out
from benchmarks.learning_preferences import PLANS, SEEDS, SHIPPED, VARIANTS
from openclaw_rl.settings import ModelSettings

EVERY = [(method, text) for of_method in VARIANTS.values() for method, some in of_method.items() for text in some]


@pytest.mark.parametrize(("method", "text"), [*EVERY, ("combine", SHIPPED)])
def test_a_variant_is_made_of_settings_that_exist(method: str, text: str) -> None:
    variant = Variant.parse(text)
    trainer, own = variant.settings("cuda", 0, method)
    assert own.name == method
    assert trainer.device == "cuda"
    assert variant.name == text.partition(":")[0]
    changed = {key: getattr(trainer, key, getattr(own, key, None)) for key, _ in variant.changes}
    assert all(float(changed[key]) == float(value) for key, value in variant.changes if isinstance(changed[key], float))


def test_every_preset_has_a_plan_seeds_and_all_methods() -> None:
    assert set(PLANS) == set(SEEDS) > set(VARIANTS)
    assert all(set(of_method) == set(METHODS) for of_method in VARIANTS.values())


def test_runs_are_shared_out_once_and_never_with_another_kind_of_user(tmp_path) -> None:
    runs = [Run(m, "short", seed, Variant.parse(text)) for m, text in EVERY for seed in range(2)]
    jobs = shared_out(runs, 5, Job(ModelSettings(), tmp_path, "cuda", 2, Plan(), tmp_path / "r.jsonl"))
    assert sorted(map(str, runs)) == sorted(str(run) for job in jobs for run in job.runs)
    assert all(len({run.variant.has_user("follows_up") for run in job.runs}) == 1 for job in jobs)
