"""The guided teacher in the ledger's samples, against plain forward passes of base and policy.

    log q = log b(hint) + w · [log b(hint) − log b(neutral words)]     an anchor's: log b without a hint

Prompts are rendered by transformers' own chat template, and the formula stands here once more: nothing of the server's
teacher is used. Distances are compared with those that bf16 makes by itself, since w multiplies an engine's noise too.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from gpu import models
from gpu.stages import Figures
from openclaw_rl.messages import Message
from openclaw_rl.methods.hinted_prompt import HintPlace, hinted
from openclaw_rl.types import HintTerm

ANCHOR = "anchor"
LEAST_LOG_PROB, LEAST_TAIL = -20.0, 1e-6
"""Bounds of a table, as the documents of the method give them."""
LEAST_SAMPLES = 4
FOREIGN = 0.15
"""Largest share of another teacher, or of the policy, in the teacher of the ledger."""
VAGUE = 0.25
"""Largest error of a share that still tells one from the other."""
LEAST_WAY = 1e-8
NOISE = 0.005
"""Nats a token that an engine may be further from fp32 than bf16 is, per pass."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Settings of the teacher whose samples are read."""

    guidance: float
    neutral: str
    place: HintPlace = "behind"


@dataclass(frozen=True, slots=True)
class Taught:
    """A sample, and the prompts that its teacher read."""

    sample_id: str
    kind: str
    """`wish` or `anchor`; `user` for a user's own turn."""
    version: int
    """Version that was scored."""
    prompt: list[int]
    hinted: list[int]
    neutral: list[int]
    response: list[int]
    teacher: list[float]
    student: list[float] | None
    ids: list[list[int]] | None
    """Ids of the teacher's table [T, K]; None: token level."""
    table: list[list[float]] | None
    is_rendered_alike: bool
    """The messages, rendered here, are the served prompt."""

    @property
    def has_hint(self) -> bool:
        return self.kind != ANCHOR


def taught(record: Mapping[str, Any], folder: Path, reading: Reading) -> Taught | None:
    """Return the sample of a turn as `/v1/turns/{id}` returns it; None without a term of the teacher."""
    sample = record.get("sample")
    if sample is None or sample["teacher_log_probs"] is None:
        return None
    term = HintTerm.of_json(sample["extra_json"])
    messages = [Message.model_validate(message) for message in record["request"]["messages"]]
    render = _renderer(folder)
    words = term.text or ""
    kind = record["practice"] or "user"
    prompts = [render(told) for told in (_told(messages, said, reading.place) for said in ("", words, reading.neutral))]
    return Taught(
        sample_id=sample["sample_id"],
        kind=kind,
        version=sample["scored_version"],
        prompt=sample["prompt_ids"],
        hinted=prompts[1],
        neutral=prompts[2],
        response=sample["response_ids"],
        teacher=sample["teacher_log_probs"],
        student=sample["student_log_probs"],
        ids=None if term.top_k is None else [list(row) for row in term.top_k.ids],
        table=None if term.top_k is None else [list(row) for row in term.top_k.log_probs],
        is_rendered_alike=prompts[0] == list(sample["prompt_ids"]),
    )


def _told(messages: Sequence[Message], words: str, place: HintPlace) -> Sequence[Message]:
    return hinted(messages, words, place) or messages


@lru_cache
def _renderer(folder: Path) -> Callable[[Sequence[Message]], list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def render(messages: Sequence[Message]) -> list[int]:
        plain = [{"role": message.role, "content": message.text()} for message in messages]
        text = tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return render


# -- the formula -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pass:
    """Log-probs of one sample behind one prompt, at temperature 1."""

    reply: torch.Tensor  # [T]
    ids: torch.Tensor | None  # [T, K], of the table's ids


@dataclass(frozen=True, slots=True)
class Passes:
    """One sample under one model."""

    told: Pass
    aside: Pass
    """With neutral words in the hint's place."""
    plain: Pass


def token_level(told: torch.Tensor, aside: torch.Tensor, weight: float) -> torch.Tensor:
    """Return log q of each token, not normalised. told, aside: log-probs [T]."""
    return told + weight * (told - aside)


def table_level(told: torch.Tensor, aside: torch.Tensor, weight: float) -> torch.Tensor:
    """Return log q [T, K + 1], normalised: of the ids, and of the tail that holds all others. told, aside: [T, K]."""
    if not weight:
        return _with_tail(told.double())
    h, n = (_with_tail(rows.double()) for rows in (told, aside))
    h, n = (torch.cat([rows[:, :-1].clamp(min=LEAST_LOG_PROB), rows[:, -1:]], -1) for rows in (h, n))
    return (h + weight * (h - n)).log_softmax(-1)


def _with_tail(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows, (1 - rows.exp().sum(-1, keepdim=True)).clamp(min=LEAST_TAIL).log()], -1)


def _teacher(told: Pass, aside: Pass, weight: float, *, at_table: bool) -> torch.Tensor:
    """Return the teacher's log-probs as the ledger has them: [T], or [T · K] of a table."""
    if not at_table:
        return token_level(told.reply, aside.reply, weight)
    assert told.ids is not None
    assert aside.ids is not None
    return table_level(told.ids, aside.ids, weight)[:, :-1].flatten()


# -- the comparison ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """Samples, their teacher's settings, and passes of the base over them."""

    samples: Sequence[Taught]
    reading: Reading
    fp32: Sequence[Passes]
    bf16: Sequence[Passes]

    def weight(self, k: int) -> float:
        return self.reading.guidance if self.samples[k].has_hint else 0.0

    def teachers(self, passes: Sequence[Passes], chosen: Sequence[int], *, at_table: bool) -> list[torch.Tensor]:
        return [_teacher(passes[k].told, passes[k].aside, self.weight(k), at_table=at_table) for k in chosen]

    def level(self, chosen: Sequence[int], *, at_table: bool) -> tuple[Figures, list[str]]:
        """Compare tokens or tables with the base's passes, and with the teachers of neighbouring settings."""
        name = "table" if at_table else "token level"
        ours = [_of_ledger(self.samples[k], at_table=at_table) for k in chosen]
        right = self.teachers(self.fp32, chosen, at_table=at_table)
        near = self.teachers(self.bf16, chosen, at_table=at_table)
        engine, bf16 = models.differences(right, ours), models.differences(right, [row.tolist() for row in near])
        figures: Figures = {name: {"engine against fp32": engine, "bf16 against fp32": bf16}}
        findings = []
        if not engine["mean_abs"] <= 1.5 * bf16["mean_abs"] + NOISE * (1 + 2 * self.reading.guidance):
            findings.append(f"{name}: the teacher is {engine['mean_abs']} nats from fp32, bf16 {bf16['mean_abs']}")
        for other, values in self._others(chosen, at_table=at_table).items():
            found = way(right, values, ours)
            figures[name][f"share of a teacher {other}"] = found.row()
            findings += found.findings(0.0, f"{name}: towards a teacher {other}")
        if at_table:
            figures[name]["mass"] = mass = _mass([self.samples[k] for k in chosen], right, ours)
            if not (mass["largest sum of ids"] <= 1 + 1e-4 and mass["tail, mean gap"] < 0.02):
                findings.append(f"{name}: ids and tail do not sum to one: {mass}")
        return figures, findings

    def _others(self, chosen: Sequence[int], *, at_table: bool) -> dict[str, list[torch.Tensor]]:
        chosen_hints = [self.weight(k) for k in chosen]
        if not any(chosen_hints):
            return {}
        found = {
            "without guidance": [
                _teacher(self.fp32[k].told, self.fp32[k].aside, 0.0, at_table=at_table) for k in chosen
            ]
        }
        if self.reading.neutral:
            found["against no words"] = [
                _teacher(self.fp32[k].told, self.fp32[k].plain, self.weight(k), at_table=at_table) for k in chosen
            ]
        return found

    def of_policy(self, version: int, passes: Sequence[Passes], own: Sequence[int]) -> tuple[Figures, list[str]]:
        """Compare teacher and student of one version's samples `own` with the policy's passes, and with the base's."""
        ours = [_of_ledger(self.samples[k], at_table=False) for k in own]
        moved = [
            _teacher(row.told, row.aside, self.weight(k), at_table=False) for row, k in zip(passes, own, strict=True)
        ]
        base = self.teachers(self.fp32, own, at_table=False)
        plain = [self.fp32[k].plain.reply for k in own]
        students = [list(self.samples[k].student or ()) for k in own]
        policy = [row.plain.reply for row in passes]
        figures: Figures = {
            "policy against base": models.differences(plain, [row.tolist() for row in policy])["mean_abs"],
            "student against policy": models.differences(policy, students)["mean_abs"],
            "student against base": models.differences(plain, students)["mean_abs"],
            "teacher against base": models.differences(base, ours)["mean_abs"],
            "teacher against policy": models.differences(moved, ours)["mean_abs"],
        }
        in_student, in_teacher = way(plain, policy, students), way(base, moved, ours)
        figures["share of the policy in the student"] = in_student.row()
        figures["share of the policy in the teacher"] = in_teacher.row()
        findings = in_student.findings(1.0, f"v{version}: the student, from base to policy")
        return figures, findings + in_teacher.findings(0.0, f"v{version}: the teacher, from base to policy")


@dataclass(frozen=True, slots=True)
class Way:
    """Place of log-probs on the way between two others: 0 at the start, 1 at the end."""

    share: float
    error: float
    """Standard error of the share."""

    def row(self) -> list[float]:
        return [round(self.share, 3), round(self.error, 3)]

    def findings(self, place: float, what: str) -> list[str]:
        """Return a finding if the share is elsewhere, or cannot be told."""
        if not self.error < VAGUE:
            return [f"{what}: {self.row()}, too vague to tell"]
        is_there = abs(self.share - place) < FOREIGN + 2 * self.error
        return [] if is_there else [f"{what}: {self.row()}, expected {place:g}"]


def way(start: Sequence[torch.Tensor], end: Sequence[torch.Tensor], found: Sequence[Sequence[float]]) -> Way:
    """Return the place of `found` by a projection, which noise averages out."""
    a, b = torch.cat(list(start)).double(), torch.cat(list(end)).double()
    c = torch.cat([torch.tensor(row) for row in found]).double()
    length = float(((b - a) ** 2).sum())
    if length < LEAST_WAY:
        return Way(math.nan, math.inf)
    share = float(((c - a) * (b - a)).sum()) / length
    rest = c - a - share * (b - a)
    return Way(share, math.sqrt(float((rest**2).mean()) / length))


def compare(
    samples: Sequence[Taught], base: Path, policies: Mapping[int, Path], reading: Reading, device: str
) -> Figures:
    """Compare the samples' teacher with passes of the base, and with other teachers that it must not be.

    policies: the adapter of each version above 0, or its whole weights. Versions without one are compared with the base
    alone.
    """
    kinds = {kind: sum(one.kind == kind for one in samples) for kind in sorted({one.kind for one in samples})}
    figures: Figures = {"samples": len(samples), "kinds": kinds, "versions": sorted({one.version for one in samples})}
    findings = [f"{one.sample_id}: rendered otherwise than served" for one in samples if not one.is_rendered_alike]
    if sum(one.has_hint for one in samples) < LEAST_SAMPLES:
        return figures | {"findings": [*findings, f"fewer than {LEAST_SAMPLES} samples have a hint"]}
    fp32, bf16 = (_passes(samples, base, None, dtype, device) for dtype in (torch.float32, torch.bfloat16))
    work = Comparison(samples, reading, fp32, bf16)
    levels = {False: range(len(samples)), True: [k for k, one in enumerate(samples) if one.ids is not None]}
    for at_table, chosen in levels.items():
        if chosen:
            found, bad = work.level(chosen, at_table=at_table)
            figures |= found
            findings += bad
    by_version: Figures = {}
    for version in sorted({one.version for one in samples} & policies.keys()):
        own = [k for k, one in enumerate(samples) if one.version == version and one.has_hint and one.student]
        if own:
            rows = _passes([samples[k] for k in own], base, policies[version], torch.float32, device)
            by_version[f"v{version}"], bad = work.of_policy(version, rows, own)
            findings += bad
    if not by_version:
        findings.append("no sample of a version above 0 was compared with its policy")
    return figures | {"by version": by_version, "findings": findings}


def _of_ledger(one: Taught, *, at_table: bool) -> list[float]:
    return [value for row in one.table or () for value in row] if at_table else list(one.teacher)


def _mass(samples: Sequence[Taught], right: Sequence[torch.Tensor], ours: Sequence[Sequence[float]]) -> Figures:
    """Return the largest mass of a row's ids, and how far the rest is from the tail's exact mass."""
    masses, gaps = [], []
    for one, theirs, mine in zip(samples, right, ours, strict=True):
        width = len((one.ids or [[]])[0])
        masses.append(torch.tensor(mine).double().view(-1, width).exp().sum(-1))
        gaps.append((masses[-1] - theirs.view(-1, width).exp().sum(-1)).abs())
    gap = torch.cat(gaps)
    return {
        "largest sum of ids": round(float(torch.cat(masses).max()), 6),
        "tail, mean gap": round(float(gap.mean()), 5),
        "tail, largest gap": round(float(gap.max()), 5),
    }


@torch.no_grad()
def _passes(
    samples: Sequence[Taught], base: Path, policy: Path | None, dtype: torch.dtype, device: str
) -> list[Passes]:
    """Score the replies behind each of their prompts. policy: the folder of an adapter, or of whole weights."""
    is_adapter = policy is not None and (policy / "adapter_config.json").is_file()
    whole = base if policy is None or is_adapter else policy
    with models.loaded(whole, policy if is_adapter else None, dtype, device) as model:
        return [
            Passes(*(_scored(model, ids, one, device) for ids in (one.hinted, one.neutral, one.prompt)))
            for one in samples
        ]


def _scored(model: Any, prompt: Sequence[int], one: Taught, device: str) -> Pass:
    ids = torch.tensor([[*prompt, *one.response]], device=device)
    log_probs = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    reply = log_probs.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
    if one.ids is None:
        return Pass(reply, None)
    return Pass(reply, log_probs.gather(1, torch.tensor(one.ids, device=device)).cpu())
