"""Settings: sources and their order, and one-line errors that name the key."""

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from openclaw_opd.settings import OpdSettings
from openclaw_rl.engines.kind import load_kind
from openclaw_rl.errors import SettingsError
from openclaw_rl.methods.binary_rl import BinarySettings
from openclaw_rl.settings import Settings, base, installed_methods, load, method_settings, tracking


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[server]\nport = 1\nkeepalive_s = 3.5\n[training]\nbatch_size = 5\n")
    environ = {"OPENCLAW_RL__SERVER__PORT": "2", "OPENCLAW_RL__TRAINING__MAX_STALENESS": "9", "UNRELATED": "x"}
    settings = load(file, {"server.port": "3"}, environ)
    assert settings.server.port == 3
    assert settings.training.max_staleness == 9
    assert settings.server.keepalive_s == 3.5
    assert settings.training.batch_size == 5
    assert settings.sampling == Settings().sampling


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("server.prot", "1", "server.prot: no such setting"),
        ("server.port", "99999", "server.port: "),
        ("server.port", "many", "server.port: "),
        ("training.min_batch", "17", "training.min_batch 17 is larger than training.batch_size 16"),
        ("judge.quorum", "4", "judge: quorum 4 is larger than votes 3"),
        ("server.host", "0.0.0.0", "server.host '0.0.0.0' is not loopback: set server.api_keys first"),
        ("server.host", "example.org", "is not loopback"),
        ("engine.kind", "url", "engine.url or engine.urls is needed"),
        ("server.port.low", "1", "server.port"),
        ("server", "5", "server: it is a table of settings, not a value (it is 5)"),
    ],
)
def test_a_wrong_key_or_value_is_one_line_that_names_it(key: str, value: str, says: str) -> None:
    with pytest.raises(SettingsError) as error:
        load(None, {"server.port": "1"} | {key: value} if key != "server.port" else {key: value}, {})
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_wrong_key_in_a_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[judge]\nvoes = 3\n")
    with pytest.raises(SettingsError, match=r"settings\.toml: judge\.voes: no such setting"):
        load(file, None, {})
    file.write_text("[judge\n")
    with pytest.raises(SettingsError, match=r"settings\.toml"):
        load(file, None, {})
    file.write_bytes(b"[judge]\n# \xff")
    with pytest.raises(SettingsError, match=r"settings\.toml: it is not UTF-8: .* at byte 10"):
        load(file, None, {})
    with pytest.raises(SettingsError, match="No such file"):
        load(tmp_path / "absent.toml", None, {})


def test_a_small_batch_size_needs_no_word_about_smaller_batches(tmp_path: Path) -> None:
    assert load(None, {"training.batch_size": 2}, {}).training.batch_size == 2
    file = tmp_path / "settings.toml"
    file.write_text("[training]\nmin_batch = 2\n")
    assert load(file, {"training.batch_size": 8}, {}).training.min_batch == 2


def test_one_vote_needs_no_word_about_the_quorum() -> None:
    assert load(None, {"judge.votes": 1}, {}).judge.needed_votes == 1
    assert load(None, {"judge.votes": 5}, {}).judge.needed_votes == 2


def test_a_public_host_with_a_key_is_accepted_and_the_key_is_not_printed() -> None:
    settings = load(None, {"server.host": "0.0.0.0", "server.api_keys": [{"key": "sk-secret", "user": "uma"}]}, {})
    assert settings.server.api_keys[0].user == "uma"
    assert "sk-secret" not in repr(settings)


def test_the_tree_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().server.port = 1  # type: ignore[misc]


def test_every_branch_documents_what_is_not_plain() -> None:
    undocumented = [
        f"{name}.{key}"
        for name, branch in Settings()
        if hasattr(branch, "model_fields_set")
        for key, field in type(branch).model_fields.items()
        if not field.description and field.annotation is bool
    ]
    assert undocumented == []


@pytest.mark.parametrize(("method", "guidance"), [("opd", 3), ("combine", 2)])
def test_guidance_by_the_request_is_at_most_that_by_the_wish(method: str, guidance: float) -> None:
    both = {"method.name": method, "method.guidance": 1.0, "method.request_guidance": 1.0}
    assert load(None, both, {}).method.model_dump()["request_guidance"] == 1.0
    with pytest.raises(SettingsError, match=r"method\.request_guidance 1\.5 is larger than method\.guidance 1:"):
        load(None, both | {"method.request_guidance": 1.5}, {})
    # Guidance that the bundled model's own values bring counts.
    tuned = load(None, {"method.name": method, "method.request_guidance": 1.5}, {})
    assert tuned.method.model_dump()["guidance"] == guidance


@pytest.mark.parametrize("method", ["opd", "combine"])
def test_guidance_is_for_a_teacher_that_does_not_move(method: str) -> None:
    guided = {"method.name": method, "method.guidance": 0.5}
    assert load(None, guided, {}).method.model_dump()["guidance"] == 0.5
    assert load(None, FULL | guided | {"method.teacher_url": "http://127.0.0.1:30001"}, {}).method.needs_engine
    for teacher in ("policy", "ema"):
        with pytest.raises(SettingsError, match=r'method\.guidance is for method\.teacher = "base"'):
            load(None, guided | {"method.teacher": teacher}, {})
    for wrong in ("-0.1", "inf", "nan"):
        with pytest.raises(SettingsError, match=r"method\.guidance: "):
            load(None, guided | {"method.guidance": wrong}, {})


@pytest.mark.parametrize("asks", [{"judge.kind": "llm"}, {"method.name": "opd", "method.hint_source": "judge"}])
@pytest.mark.parametrize("named", [{"judge.model": "grader"}, {"judge.api_key": "sk-1"}])
def test_a_judge_that_is_named_has_an_address(asks: dict[str, str], named: dict[str, str]) -> None:
    """Else a small base would write the hints in place of the model that the user named."""
    (name,) = named
    with pytest.raises(SettingsError, match=rf"{name} is for a judge at judge\.url"):
        load(None, asks | named, {})
    assert load(None, asks | named | {"judge.url": "http://judge/v1"}, {}).judge.url
    assert load(None, asks, {}).judge.url is None
    assert load(None, named, {}).judge.kind == "rules"  # no model is asked


FULL = {"training.weights": "full", "trainer.kind": "external"}


def test_full_weights_have_one_policy() -> None:
    of_own = {"policies.mode": "per_user"}
    assert load(None, of_own, {}).policies.of("ann") == "user:ann"
    assert load(None, {}, {}).policies.of("ann") == "policy"
    with pytest.raises(SettingsError, match=r'policies\.mode "per_user" is for training\.weights = "lora"'):
        load(None, FULL | of_own, {})


POOL = {"engine.kind": "url", "engine.urls": ["http://a:1", "http://b:1"]}


def test_a_pool_of_engines_is_named_once_and_runs_already() -> None:
    assert load(None, POOL, {}).engine.urls == ("http://a:1", "http://b:1")
    for more, says in (
        ({"engine.kind": "sglang"}, r'engine\.urls is for engine\.kind = "url"'),
        ({"engine.url": "http://a:1"}, "both set"),
        ({"engine.urls": ["http://a:1", "http://a:1/"]}, "names an engine twice"),
    ):
        with pytest.raises(SettingsError, match=says):
            load(None, POOL | more, {})


def test_replicas_are_engines_that_the_server_starts() -> None:
    assert not load(None, {}, {}).engine.is_pool
    assert load(None, POOL, {}).engine.is_pool
    assert load(None, {}, {}).engine.first_url is None
    assert load(None, POOL, {}).engine.first_url == POOL["engine.urls"][0]
    assert load(None, {"engine.kind": "url", "engine.url": "http://a"}, {}).engine.first_url == "http://a"
    assert load(None, {"engine.kind": "sglang", "engine.replicas": 2}, {}).engine.is_pool
    for more, says in (
        (POOL | {"engine.replicas": 2}, r"engine\.replicas 2: the server starts no engine here; name each one in"),
        ({"engine.kind": "sglang", "engine.replicas": 0}, r"engine\.replicas: .*greater than or equal to 1"),
    ):
        with pytest.raises(SettingsError, match=says):
            load(None, more, {})


def test_an_ema_teacher_needs_a_trainer_that_writes_one() -> None:
    ema = {"method.name": "opd", "method.teacher": "ema"}
    assert load(None, ema, {}).method.needs_ema
    assert not load(None, {"method.name": "binary_rl"}, {}).method.needs_ema
    assert not load(None, ema | {"method.name": "combine", "method.opd_weight": 0}, {}).method.needs_ema
    with pytest.raises(SettingsError, match="others write no teacher"):
        load(None, ema | {"trainer.kind": "external"}, {})


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({}, None),
        ({"judge.kind": "llm"}, "judge.url is needed"),
        ({"judge.kind": "llm", "judge.url": "http://judge/v1"}, None),
        ({"method.name": "opd", "method.teacher": "policy"}, None),
        ({"method.name": "opd", "method.teacher": "policy", "method.hint_source": "judge"}, "judge.url is needed"),
        ({"method.name": "opd"}, 'not to be had .* use "policy"'),
        ({"method.name": "opd", "method.teacher_url": "http://127.0.0.1:30001"}, None),
        ({"method.name": "opd", "method.teacher": "ema"}, "not to be had"),
    ],
)
def test_full_weights_need_a_judge_of_their_own(more: dict[str, str], says: str | None) -> None:
    if says is None:
        assert load(None, FULL | more, {}).training.weights == "full"
        return
    with pytest.raises(SettingsError, match=says):
        load(None, FULL | more, {})


@pytest.mark.parametrize(
    ("method", "key", "owners"),
    [
        ("binary_rl", "opd_clip", "opd and combine"),
        ("opd", "baseline", "binary_rl, combine and agent"),
        ("opd", "binary_weight", "combine"),
    ],
)
def test_a_key_of_another_method_is_refused_with_its_owners(method: str, key: str, owners: str) -> None:
    with pytest.raises(SettingsError) as error:
        load(None, {"method.name": method, f"method.{key}": 1}, {})
    assert str(error.value) == f"method.{key}: it belongs to {owners}, and method.name is {method}"


def test_a_file_for_one_method_runs_with_another_one(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[method]\nname = "combine"\nopd_clip = 3.0\nbaseline = "none"\n')
    assert load(file, {}, {}).method.model_dump()["opd_clip"] == 3.0
    other = load(file, {"method.name": "binary_rl"}, {}).method
    assert (other.name, other.model_dump()["baseline"], "opd_clip" in other.model_dump()) == (
        "binary_rl",
        "none",
        False,
    )
    for opd in ("opd", '"opd"'):  # a bare word, or a TOML string
        assert load(file, {}, {"OPENCLAW_RL__METHOD__NAME": opd}).method.model_dump()["opd_clip"] == 3.0
    with pytest.raises(SettingsError, match=r"method.opd_clip: it belongs to opd and combine"):
        load(file, {"method.name": "binary_rl", "method.opd_clip": 1}, {})  # the user wrote it for this run
    file.write_text('[method]\nname = "combine"\nopd_clap = 3.0\n')
    with pytest.raises(SettingsError, match=r"method.opd_clap: no such setting"):
        load(file, {"method.name": "binary_rl"}, {})


def test_a_method_that_is_not_installed_is_refused_with_the_known_names() -> None:
    with pytest.raises(
        SettingsError, match=r"^method.name: no method 'dpo'; installed: agent, binary_rl, combine, opd$"
    ):
        load(None, {"method.name": "dpo", "method.beta": 1}, {})


def test_the_shipped_methods_are_those_of_the_packages_metadata() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    declared = project["entry-points"][method_settings.ENTRY_POINT_GROUP]
    assert declared == {name: point.value for name, point in installed_methods().items()}
    assert declared == method_settings._SHIPPED
    assert project["entry-points"][base.ENGINE_KINDS] == base._SHIPPED_KINDS
    assert project["entry-points"][tracking.TRACKERS] == tracking._SHIPPED


def test_without_the_packages_metadata_the_shipped_methods_and_kinds_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child's environment may have our packages on PYTHONPATH alone."""
    monkeypatch.setattr(base, "entry_points", lambda group: ())
    assert load(None, {"engine.kind": "sglang", "method.name": "opd"}, {}).engine.kind == "sglang"
    assert load_kind("embedded").loses_adapter_count is False


def test_a_method_that_cannot_be_imported_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("broken", "no_such_module:METHOD", method_settings.ENTRY_POINT_GROUP)
    monkeypatch.setattr(base, "entry_points", lambda group: (broken,))
    with pytest.raises(SettingsError, match=r"^method\.name: method 'broken': no_such_module:METHOD cannot be loaded"):
        load(None, {"method.name": "broken"}, {})
    with pytest.raises(SettingsError, match=r"^method.opd_clip: it belongs to opd and combine"):
        load(None, {"method.opd_clip": 1}, {})  # the broken one does not hide the user's own mistake


def test_a_program_passes_the_settings_of_its_method() -> None:
    assert Settings().method == BinarySettings()
    assert Settings(method=OpdSettings(opd_clip=3.0)).method == OpdSettings(opd_clip=3.0)
    assert Settings.model_validate({"method": {"name": "opd"}}).method == OpdSettings(name="opd")


@pytest.mark.parametrize("text", ["123456789012345678901234567890", "2024-01-01", "nan", "true", "0x10", "a-key"])
@pytest.mark.parametrize("is_flag", [False, True], ids=["environment", "flag"])
def test_a_setting_that_is_a_text_is_taken_as_it_is_written(text: str, is_flag: bool) -> None:
    names = ("server.admin_key", "judge.api_key", "server.served_model_name")
    environ = {f"OPENCLAW_RL__{name.replace('.', '__').upper()}": text for name in names}
    settings = load(None, dict.fromkeys(names, text), {}) if is_flag else load(None, None, environ)
    assert settings.server.admin_key is not None
    assert settings.judge.api_key is not None
    shown = (settings.server.admin_key.get_secret_value(), settings.judge.api_key.get_secret_value())
    assert (*shown, settings.server.served_model_name) == (text,) * 3


def test_an_empty_variable_is_not_set() -> None:
    names = ("DATA_DIR", "SERVER__PORT", "JUDGE__URL", "METHOD__NAME")
    assert load(None, None, {f"OPENCLAW_RL__{name}": "" for name in names}) == load(None, None, {})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("OPENCLAW_RL_SERVER_PORT", "OPENCLAW_RL__SERVER__PORT"),
        ("OPENCLAW_RL_TRAINING_BATCH_SIZE", "OPENCLAW_RL__TRAINING__BATCH_SIZE"),
        ("OPENCLAW_RL_DATA_DIR", "OPENCLAW_RL__DATA_DIR"),
    ],
)
def test_a_variable_with_one_underscore_names_the_right_one(name: str, meant: str) -> None:
    with pytest.raises(SettingsError, match=f"^{name}: .*; write {meant}$"):
        load(None, None, {name: "1"})


def test_a_variable_of_another_program_is_none_of_ours() -> None:
    assert load(None, None, {"OPENCLAW_RL_OF_MINE": "1", "OPENCLAW_RLX": "2"}) == load(None, None, {})


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("first", ["# a comment", "", "[server]"])
def test_a_file_may_be_as_an_editor_of_windows_saves_it(
    tmp_path: Path, first: str, encoding: str, line_end: str
) -> None:
    file = tmp_path / "settings.toml"
    lines = [first, *([] if first == "[server]" else ["[server]"]), "port = 8123", ""]
    file.write_bytes(line_end.join(lines).encode(encoding))
    assert load(file, None, {}).server.port == 8123


KEYS = [{"key": "sk-a", "user": "a", "train": False}, {"key": "sk-b", "user": "b", "train": False}]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"server.api_keys": KEYS}, r"server\.api_keys: train is false for every key"),
        ({"training.max_waiting": 8}, r"training\.max_waiting 8 holds no training\.batch_size 16"),
        ({"training.max_waiting": 99, "training.batch_size": 100}, r"max_waiting 99 holds no training\.batch_size 100"),
        ({"trainer.target_modules": []}, r"trainer\.target_modules is empty"),
        (
            {
                "method.name": "combine",
                "method.binary_weight": 0,
                "method.opd_weight": 0,
                "method.demonstration_weight": 0,
            },
            r"are all 0: no term is left",
        ),
    ],
)
def test_settings_under_which_nothing_can_ever_be_trained_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        load(None, wrong, {})
    assert not load(None, wrong | {"training.enabled": False}, {}).training.enabled  # then it is no contradiction


@pytest.mark.parametrize(
    "fine",
    [
        {"server.api_keys": [KEYS[0], {"key": "sk-c", "user": "c"}]},
        {"training.max_waiting": 16},
        {"trainer.target_modules": [], "trainer.kind": "external"},
        {"method.name": "combine", "method.binary_weight": 0, "method.opd_weight": 0},
        {"method.name": "combine", "method.binary_weight": 0},
    ],
)
def test_settings_that_leave_something_to_train_on_are_accepted(fine: dict[str, Any]) -> None:
    assert load(None, fine, {}).training.enabled
