"""The check of the guided teacher finds the teacher that it is made for, and no other."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu import guided_teacher, models, practice_load
from gpu.guided_teacher import Reading, Taught
from openclaw_opd.guidance import Weights, guided, guided_table

READING = Reading(guidance=2.0, neutral="Thank you.")
K = 5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base and a policy, as folders of whole weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.4,
        )
        made.append(tmp_path_factory.mktemp("model"))
        LlamaForCausalLM(config).save_pretrained(made[-1])
    return made[0], made[1]


def samples(
    base: Path, policy: Path, term: Callable[..., tuple[tuple[float, ...], Any]], *, student: Path
) -> list[Taught]:
    """Return samples as an exact engine would score them; `term` makes the teacher's numbers."""
    found = []
    for number in range(6):
        dice = torch.Generator().manual_seed(number)

        def ids(count: int, dice: torch.Generator = dice) -> list[int]:
            return torch.randint(0, 64, (count,), generator=dice).tolist()

        one = Taught(
            sample_id=f"s{number}",
            kind="anchor" if number == 5 else "wish",
            version=number % 2,
            prompt=ids(6),
            hinted=ids(9),
            neutral=ids(8),
            response=ids(12),
            teacher=[],
            student=[],
            ids=[torch.randperm(64, generator=dice)[:K].tolist() for _ in range(12)],
            table=[],
            is_rendered_alike=True,
        )
        if one.kind == "anchor":
            one = replace(one, hinted=one.prompt)
        teacher, table = term(one, passes(base, one), passes(policy, one))
        with models.loaded(student if one.version else base, None, torch.float32, "cpu") as model:
            own = guided_teacher._scored(model, one.prompt, one, "cpu").reply.tolist()
        found.append(replace(one, teacher=list(teacher), table=[list(row) for row in table], student=own))
    return found


def passes(folder: Path, one: Taught) -> guided_teacher.Passes:
    return guided_teacher._passes([one], folder, None, torch.float32, "cpu")[0]


def by_the_product(one: Taught, base: guided_teacher.Passes, weight: float) -> tuple[tuple[float, ...], Any]:
    """Return the teacher as the method itself computes it."""
    told, aside = (tuple(row.reply.tolist()) for row in (base.told, base.aside))
    assert base.told.ids is not None
    assert base.aside.ids is not None
    tables = [[tuple(row) for row in rows.tolist()] for rows in (base.told.ids, base.aside.ids)]
    weights = Weights(weight if one.has_hint else 0.0)
    return guided(told, aside, aside, weights), guided_table(*tables, tables[1], weights)


def test_the_teacher_of_the_method_is_found(folders: tuple[Path, Path]) -> None:
    base, policy = folders
    rows = samples(base, policy, lambda one, of_base, _: by_the_product(one, of_base, 2.0), student=policy)
    found = guided_teacher.compare(rows, base, {1: policy}, READING, "cpu")
    assert found["findings"] == []
    for level in ("token level", "table"):
        assert found[level]["engine against fp32"]["max_abs"] < 1e-4
    assert found["by version"]["v1"]["share of the policy in the student"] == [1.0, 0.0]
    assert found["by version"]["v1"]["share of the policy in the teacher"][1] == 0.0


@pytest.mark.parametrize(
    ("term", "says"),
    [
        (lambda one, base, policy: by_the_product(one, base, 0.0), "without guidance"),
        (lambda one, base, policy: by_the_product(one, policy, 2.0), "the teacher, from base to policy"),
        (lambda one, base, policy: by_the_product(one, replace(base, aside=base.plain), 2.0), "against no words"),
    ],
    ids=["no guidance", "the policy", "no neutral words"],
)
def test_another_teacher_is_a_finding(folders: tuple[Path, Path], term: Any, says: str) -> None:
    base, policy = folders
    found = guided_teacher.compare(samples(base, policy, term, student=policy), base, {1: policy}, READING, "cpu")
    assert any(says in finding for finding in found["findings"]), found["findings"]


def test_a_student_that_is_the_base_is_a_finding(folders: tuple[Path, Path]) -> None:
    base, policy = folders
    rows = samples(base, policy, lambda one, of_base, _: by_the_product(one, of_base, 2.0), student=base)
    found = guided_teacher.compare(rows, base, {1: policy}, READING, "cpu")
    assert any("the student, from" in finding for finding in found["findings"])
    assert guided_teacher.compare(rows[:2], base, {1: policy}, READING, "cpu")["findings"]


def test_the_way_is_what_noise_leaves_of_it() -> None:
    start, end = [torch.zeros(4)], [torch.ones(4)]
    found = guided_teacher.way(start, end, [[0.3, 0.5, 0.1, 0.1]])
    assert found.share == pytest.approx(0.25)
    assert found.findings(1.0, "x")
    assert guided_teacher.way(start, start, [[0.0] * 4]).findings(0.0, "x") == ["x: [nan, inf], too vague to tell"]


def test_progress_needs_versions_a_measure_and_the_users_words() -> None:
    progress = practice_load.Progress(serving=2, practised={1: 6, 2: 6, 3: 6}, wish={"text": practice_load.CORRECTION})
    assert progress.served == [1, 2]
    assert progress.findings(2, must_learn=False) == ["the learned share was not measured: []"]
    progress.shares = {0: 0.0, 1: 0.2}
    assert progress.findings(2, must_learn=True) == []
    assert progress.findings(3, must_learn=True) == ["only 2 practised versions served"]
    progress.shares = {0: 0.0, 1: -0.2}
    assert progress.findings(2, must_learn=False) == []
    assert "does not rise" in progress.findings(2, must_learn=True)[0]
    progress.wish = {}
    assert "not the user's words" in progress.findings(2, must_learn=False)[0]


def test_chosen_records_are_of_the_versions_and_of_each_kind() -> None:
    rows = [
        {"practice": kind, "sample": {"scored_version": version}, "n": n}
        for version in (0, 1, 2)
        for kind in ("wish", "anchor", None)
        for n in range(3)
    ]
    rows.append({"practice": "wish", "sample": None, "n": 9})
    found = practice_load.chosen(rows, [0, 2], of_each=2)
    assert [(row["sample"]["scored_version"], row["practice"], row["n"]) for row in found] == [
        (version, kind, n)
        for version in (0, 2)
        for kind, count in (("wish", 2), ("anchor", 1), (None, 1))
        for n in range(count)
    ]
