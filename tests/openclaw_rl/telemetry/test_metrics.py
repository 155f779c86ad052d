"""`/metrics`, as Prometheus parses it."""

from collections.abc import Iterator

from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from openclaw_rl.engines.pool_member import EngineStatus
from openclaw_rl.processes.supervisor import ChildStatus
from openclaw_rl.telemetry import metrics
from openclaw_rl.telemetry.health import Health

RECORDED = {
    ("openclaw_rl_weight_version", ()),
    ("openclaw_rl_ledger", ("what",)),
    ("openclaw_rl_scoring", ("what",)),
    ("openclaw_rl_scoring_mean", ("what",)),
    ("openclaw_rl_out_of_order", ("part",)),
    ("openclaw_rl_failures_total", ("part",)),
    ("openclaw_rl_restarts_total", ("part",)),
}
"""Names and labels of the first release, whose text form was written without `prometheus_client`."""
SINCE = {
    ("openclaw_rl_scoring_total", ("what",)),
    ("openclaw_rl_practice", ("what",)),
    ("openclaw_rl_step", ("figure",)),
    ("openclaw_rl_step_version", ()),
    ("openclaw_rl_step_committed_timestamp_seconds", ()),
    ("openclaw_rl_tracked_version", ("tracker",)),
    ("openclaw_rl_engine_up", ("engine",)),
    ("openclaw_rl_engine_drained", ("engine",)),
    ("openclaw_rl_engine_running", ("engine",)),
    ("openclaw_rl_engine_sessions", ("engine",)),
    ("openclaw_rl_engine_calls_total", ("engine",)),
    ("openclaw_rl_engine_failed_calls_total", ("engine",)),
}
"""Names and labels that came later, beside the histograms."""
ENGINE = EngineStatus("engine 1", "http://e", True, False, running=2, sessions=3, calls=5, failures=1, fault=None)
HISTOGRAMS = ("time_to_first_token", "step", "push", "gate")


def samples(text: str) -> Iterator[Sample]:
    for family in text_string_to_metric_families(text):
        yield from family.samples


def values(text: str) -> dict[tuple[str, str], float]:
    """Return the values by metric name and only label."""
    return {(sample.name, "".join(sample.labels.values())): sample.value for sample in samples(text)}


def full() -> str:
    """Return a scrape with a series of every metric."""
    health = Health()
    health.count("hindsight_scored")
    health.observe("gap_abs", 0.5)
    health.failed("judge", "down")
    training = metrics.Training(metrics.StepFigures(8, 1000.0, {"ref_kl": 0.25}), {"jsonl": 7})
    children = [ChildStatus("trainer", 1, 2, None)]
    return metrics.render({"trained": 3}, 7, health, ["judge: down"], children, {"wishes": 1}, training, [ENGINE])


def test_meters_are_rendered_beside_the_ledgers_counts() -> None:
    health = Health()
    health.count("hindsight_scored")
    health.count("hindsight_scored")
    for value in (0.5, 1.0):
        health.observe("gap_abs", value)
    text = metrics.render({"trained": 3}, 7, health)
    found = values(text)
    assert found["openclaw_rl_weight_version", ""] == 7
    assert found["openclaw_rl_ledger", "trained"] == 3
    assert found["openclaw_rl_scoring", "hindsight_scored"] == 2
    assert found["openclaw_rl_scoring_mean", "gap_abs"] == 0.75
    assert text.endswith("\n")


def test_each_engine_of_a_pool_has_its_figures_and_one_engine_has_none() -> None:
    found = {
        name.removeprefix("openclaw_rl_engine_"): value
        for (name, of), value in values(full()).items()
        if of == "engine 1"
    }
    assert found == {"up": 1, "drained": 0, "running": 2, "sessions": 3, "calls_total": 5, "failed_calls_total": 1}
    alone = values(metrics.render({}, 0, Health()))
    assert not [name for name, _ in alone if name.startswith("openclaw_rl_engine_")]


def test_metrics_name_the_parts_that_are_out_of_order() -> None:
    health = Health()
    for _ in range(3):
        health.failed("judge", "down")
    found = values(metrics.render({}, 0, health, ["judge: failed 3 times", "ledger: disk full"]))
    assert found["openclaw_rl_out_of_order", "judge"] == 1
    assert found["openclaw_rl_out_of_order", "ledger"] == 1
    assert found["openclaw_rl_failures_total", "judge"] == 3


def test_no_name_and_no_label_of_the_first_release_is_gone() -> None:
    found = {(sample.name, tuple(sample.labels)) for sample in samples(full())}
    assert found >= RECORDED
    parts = {(f"openclaw_rl_{name}_seconds_{part}", ()) for name in HISTOGRAMS for part in ("count", "sum")}
    buckets = {(f"openclaw_rl_{name}_seconds_bucket", ("le",)) for name in HISTOGRAMS}
    assert found == RECORDED | SINCE | parts | buckets


def test_the_newest_step_has_a_series_for_each_finite_figure() -> None:
    figures = {"ref_kl": 0.25, "gate_kl_base": float("inf"), "loss": -1.5}
    training = metrics.Training(metrics.StepFigures(8, 1000.0, figures), {"jsonl": 7, "wandb": 3})
    found = values(metrics.render({}, 7, Health(), training=training))
    assert {label: value for (name, label), value in found.items() if name == "openclaw_rl_step"} == {
        "ref_kl": 0.25,
        "loss": -1.5,
    }
    assert found["openclaw_rl_step_version", ""] == 8
    assert found["openclaw_rl_step_committed_timestamp_seconds", ""] == 1000
    assert found["openclaw_rl_tracked_version", "wandb"] == 3


def test_before_the_first_step_no_figure_is_made_up() -> None:
    found = values(metrics.render({}, 0, Health()))
    assert not any(name == "openclaw_rl_step" for name, _ in found)
    assert found["openclaw_rl_step_version", ""] == 0


def test_the_series_of_a_step_are_bounded() -> None:
    figures = {f"figure_{n}": 1.0 for n in range(1000)}
    text = metrics.render({}, 0, Health(), training=metrics.Training(metrics.StepFigures(1, 0.0, figures)))
    assert sum(name == "openclaw_rl_step" for name, _ in values(text)) == metrics.MOST_FIGURES


def test_every_metric_has_a_meaning_and_a_type() -> None:
    lines = full().splitlines()
    helped = {line.split()[2] for line in lines if line.startswith("# HELP") and len(line.split()) > 3}
    typed = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert helped == typed
    assert all(
        sample.name in typed or sample.name.rpartition("_")[0] in typed for sample in samples("\n".join(lines) + "\n")
    )


def test_a_scoring_counter_has_the_same_values_under_both_of_its_names() -> None:
    found = values(full())
    assert found["openclaw_rl_scoring", "hindsight_scored"] == found["openclaw_rl_scoring_total", "hindsight_scored"]


def test_a_label_may_hold_quotes_and_line_breaks() -> None:
    health, name = Health(), 'a "name"\nof \\ two lines'
    health.count(name)
    assert values(metrics.render({}, 0, health))["openclaw_rl_scoring", name] == 1


def test_durations_are_histograms_in_seconds() -> None:
    health = Health()
    health.first_token.observe(0.2)
    health.step.observe(20)
    health.push.observe(0.02)
    health.gate.observe(4000)
    found = list(samples(metrics.render({}, 0, health)))
    for name in HISTOGRAMS:
        full_name = f"openclaw_rl_{name}_seconds"
        buckets = [sample for sample in found if sample.name == f"{full_name}_bucket"]
        counts = [sample.value for sample in buckets]
        assert counts == sorted(counts)
        assert buckets[-1].labels["le"] == "+Inf"
        (count,) = [sample.value for sample in found if sample.name == f"{full_name}_count"]
        assert counts[-1] == count == 1
    totals = {sample.name: sample.value for sample in found if sample.name.endswith("_sum")}
    assert totals == {
        "openclaw_rl_time_to_first_token_seconds_sum": 0.2,
        "openclaw_rl_step_seconds_sum": 20,
        "openclaw_rl_push_seconds_sum": 0.02,
        "openclaw_rl_gate_seconds_sum": 4000,
    }


def test_two_servers_of_one_process_do_not_share_metrics() -> None:
    full()
    assert not any(family.name.startswith("openclaw") for family in REGISTRY.collect())
    assert values(metrics.render({}, 0, Health()))["openclaw_rl_weight_version", ""] == 0
