"""Each file of `scripts/deploy` and `scripts/configs` names what the server has, and nothing else."""

import configparser
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import typer
from fastapi import FastAPI
from ledger import IDENTITY, commit_of, give_sample
from turns import make_request, make_turn

from openclaw_rl.cli.main import app as command_line
from openclaw_rl.errors import SettingsError
from openclaw_rl.ledger import Ledger
from openclaw_rl.server.api.control import Controls, build_admin_router
from openclaw_rl.server.api.status import Condition, ServerInfo
from openclaw_rl.settings import TrainingSettings, load
from openclaw_rl.telemetry.health import Health
from openclaw_rl.telemetry.trackers.names import NAMES

ROOT = Path(__file__).parents[2]
DEPLOY, CONFIGS = ROOT / "scripts" / "deploy", ROOT / "scripts" / "configs"
PAGE = (ROOT / "instructions" / "metrics.md").read_text()
KEYS = {"OPENCLAW_RL__SERVER__API_KEYS": '[{key = "a-long-secret"}]'}


async def scrape(folder: Path) -> str:
    """Return the answer of the server's own route, over a real ledger with one step in it."""
    training = TrainingSettings(batch_size=1, min_batch=1)
    ledger = await Ledger.open(folder / "ledger.sqlite3", identity=IDENTITY, training=training)
    try:
        await give_sample(ledger, make_request("a"), make_turn("a"))
        lease = await ledger.lease(trainer="t")
        assert lease is not None
        await ledger.commit(commit_of(lease, metrics={"ref_kl": 0.25}))
        serving: Any = SimpleNamespace(is_open=True, current=0)
        retention: Any = SimpleNamespace(is_full=False)
        condition = Condition(ledger, serving, Health(), retention, children=lambda: [], tracked=lambda: {"jsonl": 1})
        unused: Any = None
        controls = Controls(ledger, unused, unused, train_now=lambda: None, training=training)
        app = FastAPI()
        app.include_router(build_admin_router("key", condition, ServerInfo("m", "opd", 0.0, training), controls))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            reply = await client.get("/metrics", headers={"authorization": "Bearer key"})
        return reply.raise_for_status().text
    finally:
        await ledger.aclose()


@pytest.fixture
async def scraped(tmp_path: Path) -> str:
    return await scrape(tmp_path)


def names(text: str) -> set[str]:
    """Return the names of all series that the server can have: also of families that have none now."""
    found = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE):
        found |= {f"{name}_{part}" for part in ("bucket", "count", "sum")} if kind == "histogram" else {name}
    return found


def asked() -> dict[str, list[str]]:
    """Return the PromQL of each file."""
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [note["expr"] for note in dashboard["annotations"]["list"]]
    expressions += [variable["query"] for variable in dashboard["templating"]["list"]]
    rules = re.findall(r"^ +expr: (.+)$", (DEPLOY / "rules.yml").read_text(), re.MULTILINE)
    return {"grafana.json": expressions, "rules.yml": rules}


async def test_the_dashboard_and_the_alerts_ask_only_for_metrics_that_the_server_has(scraped: str) -> None:
    for file, expressions in asked().items():
        used = {name for expression in expressions for name in re.findall(r"\bopenclaw_rl_\w+", expression)}
        assert used, file
        assert used <= names(scraped), file


async def test_every_state_and_figure_that_they_choose_exists(scraped: str) -> None:
    counted = set(re.findall(r'openclaw_rl_ledger{what="([^"]+)"}', scraped))
    for expression in (expression for found in asked().values() for expression in found):
        for chosen in re.findall(r'what=~?"([^"]+)"', expression):
            assert set(chosen.split("|")) <= counted, expression
        for chosen in re.findall(r'figure=~?"([^"]+)"', expression):
            assert all(f"`{figure}`" in PAGE for figure in chosen.split("|")), expression


def test_the_dashboard_has_eight_panels_that_do_not_overlap_and_one_data_source() -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]}
    assert len(places) == len(dashboard["panels"]) == 8
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {"${datasource}"}


async def test_the_page_explains_every_metric_and_no_other(scraped: str) -> None:
    families = set(re.findall(r"^# TYPE (\S+)", scraped, re.MULTILINE))
    told = set(re.findall(r"^\| `(openclaw_rl_\w+)", PAGE, re.MULTILINE))
    assert told == families


def test_the_page_has_every_public_name_and_every_figure_of_our_trainers() -> None:
    rows = [row.split("|") for row in PAGE.splitlines() if re.match(r"\| `[a-z]", row)]
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    for short, public in NAMES.items():
        (row,) = [row for row in rows if f"`{short}`" in row[1]]
        assert f"`{public}`" in row[2] or f"`{public}`" in "|".join(row)
    assert len(set(NAMES.values())) == len(NAMES)
    sources = [
        "openclaw-rl/openclaw_rl/trainers/step.py",
        "openclaw-rl/openclaw_rl/trainers/learner.py",
        "openclaw-rl/openclaw_rl/methods/objective.py",
        "openclaw-opd/openclaw_opd/method.py",
        "slime/openclaw_slime/outcome.py",
    ]
    code = "\n".join((ROOT / source).read_text() for source in sources)
    measured = set(re.findall(r'"(\w+)": (?:Tally|float)\(', code)) | set(re.findall(r'metrics\["(\w+)"\]', code))
    assert len(measured) > 10
    assert measured <= told


def test_prometheus_reads_the_rules_and_sends_the_key_from_a_file() -> None:
    text = (DEPLOY / "prometheus.yml").read_text()
    assert re.search(r"^rule_files:\n  - rules.yml$", text, re.MULTILINE)
    assert "credentials_file: " in text
    assert f'targets: ["127.0.0.1:{load(None, {}, {}).server.port}"]' in text


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda file: file.stem)
def test_a_configuration_is_read_and_explained(file: Path) -> None:
    is_container = file.stem.startswith("container")
    settings = load(file, {}, KEYS if is_container else {})
    assert tomllib.loads(file.read_text()).keys() <= settings.model_fields_set
    assert f"scripts/configs/{file.name}" in (ROOT / "instructions" / "deploy.md").read_text()
    if is_container:
        with pytest.raises(SettingsError, match=r"set server\.api_keys first"):
            load(file, {}, {})


@pytest.mark.parametrize("file", sorted(DEPLOY.glob("Dockerfile.*")), ids=lambda file: file.name)
def test_a_dockerfile_has_no_fault_that_a_linter_finds(file: Path) -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, file], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", sorted(DEPLOY.glob("Dockerfile.*")), ids=lambda file: file.name)
def test_a_dockerfile_installs_what_exists_and_starts_with_flags_that_exist(file: Path) -> None:
    text = file.read_text()
    assert "Built where an engine exists" in text
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (named,) = re.findall(r'pip install [^"]*"\.\[([\w,]+)\]"', text)
    assert set(named.split(",")) <= set(extras)
    config = CONFIGS / f"container-{file.name.partition('.')[2]}.toml"
    assert f"scripts/configs/{config.name} /etc/openclaw-rl/openclaw-rl.toml" in text
    settings = load(config, {}, KEYS)
    assert f"EXPOSE {settings.server.port}" in text
    assert f"VOLUME {settings.data_dir}" in text
    check_command(json.loads(re.findall(r"^CMD (.*)$", text, re.MULTILINE)[-1]))


def test_the_unit_starts_the_server_with_flags_that_exist_and_lets_it_stop_in_order() -> None:
    unit = configparser.RawConfigParser(strict=False, delimiters=("=",), comment_prefixes=("#",))
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "openclaw-rl.service")
    service = unit["Service"]
    program, *words = service["ExecStart"].split()
    assert program.endswith("/bin/openclaw-rl")
    check_command(words)
    settings = load(CONFIGS / "service.toml", {}, {})
    assert str(settings.data_dir) == f"/var/lib/{service['StateDirectory']}"
    assert (service["KillMode"], service["StateDirectoryMode"]) == ("mixed", "0700")
    assert float(service["TimeoutStopSec"]) > 2 * settings.server.drain_s


def check_command(words: list[str]) -> None:
    command = typer.main.get_command(command_line).commands[words[0]]  # type: ignore[attr-defined]
    flags = {flag for option in command.params for flag in option.opts}
    assert {word for word in words if word.startswith("--")} <= flags
