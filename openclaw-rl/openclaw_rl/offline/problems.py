"""Word problems of an experiment: from a JSON file, or from a data set that the package `datasets` loads."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from openclaw_rl.offline.personas import ExperimentError, Problem

_MARK = "####"
"""GSM8K's answers end with it and the number."""
_CONFIGS, _SPLITS = ("main", "default"), ("test", "validation", "train")
"""Taken first where a data set has several."""


def problems(source: str | Path, number: int | None = None) -> tuple[Problem, ...]:
    """Return the first problems, each with `question` and `answer`. Raises ExperimentError.

    source: a JSON file with a list of problems; otherwise a folder of JSON lines or the name of a data set of the hub,
    such as `openai/gsm8k` or `openai/gsm8k:main`. The test split is taken where there is one.
    """
    path = Path(source).expanduser()
    try:
        if path.is_file() or path.suffix == ".json":
            rows = json.loads(path.read_text(encoding="utf-8"))[:number]
        else:
            rows = _data_set(str(path if path.exists() else source), number)
        return tuple(_problem(row) for row in rows)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ExperimentError(f"{source} holds no problems: {error!r}") from error


def _problem(row: Mapping[str, Any]) -> Problem:
    answer = str(row["answer"]).rpartition(_MARK)[2].strip()
    float(answer.replace(",", ""))  # ValueError: it is no number
    return Problem(str(row["question"]), answer)


def _data_set(name: str, number: int | None) -> Iterable[Mapping[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise ExperimentError(
            f'{name} is no file. A data set needs the package datasets: pip install "openclaw-rl[datasets]"'
        ) from error
    name, _, config = name.partition(":")
    try:
        config = config or _first(_CONFIGS, datasets.get_dataset_config_names(name))
        split = _first(_SPLITS, datasets.get_dataset_split_names(name, config))
        found: Iterable[Mapping[str, Any]] = datasets.load_dataset(
            name, config, split=split if number is None else f"{split}[:{number}]"
        )
        return found
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise ExperimentError(f"the data set {name} cannot be loaded: {error}") from error


def _first(wanted: Iterable[str], known: list[str]) -> str:
    return next((name for name in wanted if name in known), known[0])
