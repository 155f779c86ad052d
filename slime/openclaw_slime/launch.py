"""The node's command: starts the processes of a run from the launch scripts' variables; `--dry-run` prints them.

    python -m openclaw_slime.launch --method combine --hf-checkpoint DIR [--dry-run]

Three processes, joined by HTTP alone, each with its own GPUs:

- the *PRM*: a plain SGLang, unless it runs elsewhere;
- our *server*: proxy, ledger, judge, publisher, with the policy's SGLang as its child;
- the *driver*: Ray and Megatron. If it dies it is started again, and chats go on.

Needs the standard library only. Leaves to others: slime's arguments (`arguments`), the GPUs of each part (`layout`),
running processes (`processes`).
"""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from openclaw_rl.errors import SettingsError
from openclaw_rl.processes.command import HIGHEST_PORT, free_port
from openclaw_rl.settings import installed_methods
from openclaw_slime.arguments import PUSHES, QWEN3_4B, NodeOptions, read_config, slime_arguments
from openclaw_slime.doctor import check_start
from openclaw_slime.layout import Layout
from openclaw_slime.node_settings import (
    DATA_DIR,
    DRIFT_KL,
    ServerOptions,
    kept_checkpoints,
    moves_with_policy,
    server_values,
    under_settings,
)
from openclaw_slime.processes import Command, is_free, run

PRM_PORT = 30001
PRM_FLAGS = ("--host", "--port", "--model-path")
"""Flags of the PRM that PRM_ARGS may not set: other processes know them, and it listens on loopback, without a key."""
LOCAL_RAY = {
    "SLIME_HOST_IP": "127.0.0.1",
    "MASTER_ADDR": "127.0.0.1",
}
DRIVER = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "RAY_USE_UVLOOP": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",  # a head that is gone is noticed
    "PYTHONUNBUFFERED": "1",
    "no_proxy": "127.0.0.1,localhost",
}


@dataclass(frozen=True, slots=True)
class Pythons:
    """Interpreters of the three environments; any two may be one."""

    slime: str
    server: str
    engine: str


@dataclass(frozen=True, slots=True)
class Training:
    """The driver's checkpoint interval and its Ray cluster."""

    checkpoint_every: int = 20
    checkpoint_minutes: float = 30.0
    keep_checkpoints: int | None = None
    ray_address: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The processes of a launch, in the order of their start."""

    layout: Layout
    data_dir: str
    prm: Command | None
    server: Command
    driver: Command
    notes: tuple[str, ...] = ()
    """Facts that the user should know before the start."""

    def text(self) -> str:
        parts = ["layout", self.layout.table()]
        for command in (self.prm, self.server, self.driver):
            if command is not None:
                parts += ["", command.name, _lines(command)]
        parts += ["", *(f"note: {note}" for note in self.notes)] if self.notes else []
        return "\n".join(parts)


def make_plan(
    options: NodeOptions,
    server: ServerOptions,
    pythons: Pythons,
    training: Training,
    *,
    prm_checkpoint: str | None,
) -> Plan:
    """Return the plan of a launch. Raises SettingsError if it cannot work. Reads only the checkpoint's config."""
    checkpoint, layout = Path(options.hf_checkpoint), options.layout
    config = read_config(checkpoint) if checkpoint.is_dir() else QWEN3_4B
    needs_judge = server.judge == "llm"
    if needs_judge and not layout.prm_gpus and server.judge_url is None:
        raise SettingsError("PRM_GPUS is 0 and PRM_URL is not set: full weights leave no base to judge with")
    if layout.actor_nodes and training.ray_address is None:
        raise SettingsError(f"ACTOR_NODES {layout.actor_nodes} needs RAY_ADDRESS: the cluster those nodes belong to")
    if server.top_k and layout.context_parallel > 1:
        raise SettingsError("TOP_K needs CONTEXT_PARALLEL=1: a top-k is not cut over ranks")
    prm = _prm(layout, server, pythons, prm_checkpoint or options.hf_checkpoint) if layout.prm_gpus else None
    values = server_values(options, server, pythons.engine if pythons.engine != pythons.server else None)
    training = replace(training, keep_checkpoints=kept_checkpoints(values))
    return Plan(
        layout,
        server.data_dir,
        prm,
        _server(server, pythons, values, layout),
        _driver(under_settings(options, values), server, pythons, training, config),
        _notes(options, server),
    )


def _notes(options: NodeOptions, server: ServerOptions) -> tuple[str, ...]:
    if not moves_with_policy(options.method, server):
        return ()
    return (
        "the teacher is the policy itself: the judge here is not the policy's own checkpoint, which could be the fixed "
        f"teacher. Replies may drift; KL_COEF is {options.kl_coef:g}",
    )


def _driver(
    options: NodeOptions, server: ServerOptions, pythons: Pythons, training: Training, config: Mapping[str, Any]
) -> Command:
    ours = ["--data-dir", server.data_dir, "--checkpoint-every", str(training.checkpoint_every)]
    ours += ["--checkpoint-minutes", f"{training.checkpoint_minutes:g}"]
    if training.keep_checkpoints is not None:
        ours += ["--keep-checkpoints", str(training.keep_checkpoints)]
    ours += ["--push", options.push]
    if training.ray_address is not None:
        ours += ["--ray-address", training.ray_address]
    # With actor nodes elsewhere the driver uses no card, but Megatron queries one when it reads its arguments.
    cards = options.layout.gpus("actor") or options.layout.gpus("rollout")
    environ = {"CUDA_VISIBLE_DEVICES": cards, **DRIVER}
    if training.ray_address is None:
        environ |= LOCAL_RAY
    arguments = [*ours, "--", *slime_arguments(options, config)]
    return Command("driver", pythons.slime, "openclaw_slime.driver", tuple(arguments), environ)


def _prm(layout: Layout, server: ServerOptions, pythons: Pythons, checkpoint: str) -> Command:
    arguments = ["--model-path", checkpoint, "--host", "127.0.0.1", "--port", str(server.prm_port)]
    arguments += ["--tp", str(layout.prm_tp), "--dp", str(layout.prm_gpus // layout.prm_tp), "--dtype", "bfloat16"]
    arguments += ["--mem-fraction-static", f"{server.mem_fraction_static:g}", *server.prm_args]
    environ = {"CUDA_VISIBLE_DEVICES": layout.gpus("prm"), "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
    return Command(
        "prm", pythons.engine, "sglang.launch_server", tuple(arguments), environ, port=server.prm_port, model=checkpoint
    )


def _server(server: ServerOptions, pythons: Pythons, values: Mapping[str, object], layout: Layout) -> Command:
    arguments = ["serve", "--host", server.host, "--port", str(server.port)]
    for key, value in values.items():
        arguments += ["--set", f"{key}={value}"]
    environ = {"CUDA_VISIBLE_DEVICES": layout.gpus("rollout")}
    return Command("server", pythons.server, "openclaw_rl", tuple(arguments), environ, port=server.port)


def _lines(command: Command) -> str:
    """Return the command line: one variable a line, then one flag with its values a line."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in command.environ.items()]
    lines: list[list[str]] = [[command.python, "-m", command.module]]
    for word in command.arguments:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(shlex.quote(word))
    words = [" ".join(line) for line in lines]
    return " \\\n".join(variables + [words[0]] + ["    " + line for line in words[1:]])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m openclaw_slime.launch",
        description="Train on a node of GPUs: Megatron through slime, SGLang engines, our server in front.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--method", required=True, choices=sorted(installed_methods()), help="what is learned from")
    add("--hf-checkpoint", required=True, help="folder of the policy in Hugging Face format (HF_CKPT)")
    add("--ref-load", help="reference weights; the checkpoint when unset (REF_LOAD)")
    add("--data-dir", default=DATA_DIR, help="ledger, versions and checkpoints; resumed from here (SAVE_CKPT)")
    add("--checkpoint-every", type=int, default=20, help="updates between two checkpoints")
    add("--checkpoint-minutes", type=float, default=30.0, help="of an update that is on no disk, at most")
    add("--prm-checkpoint", help="the judge's model; the policy's checkpoint when unset (PRM_MODEL_PATH)")
    for name, default, what in (
        ("num", 8, "GPUs of the node"),
        ("actor", 4, "GPUs that train, of each node that does"),
        ("rollout", 2, "GPUs that serve the policy"),
        ("prm", 2, "GPUs of the judge; 0: one elsewhere, --prm-url"),
    ):
        add(f"--{name}-gpus", type=int, default=default, help=what)
    add("--actor-nodes", type=int, default=0, help="other nodes that train, while all of this one serves")
    add("--actor-tp", type=int, default=4, help="tensor-parallel size of Megatron (TP)")
    add("--engine-tp", type=int, default=2, help="GPUs of one policy engine")
    add("--prm-tp", type=int, default=2, help="GPUs of one PRM engine")
    add("--batch-size", type=int, default=16, help="samples of one update")
    add("--learning-rate", type=float, default=1e-5)
    drift = f"weight of the KL to the reference; unset: 0, or {DRIFT_KL} where the policy is its own teacher (KL_COEF)"
    add("--kl-coef", type=float, help=drift)
    add("--temperature", type=float, default=0.6, help="of chats that name none (TEMPERATURE)")
    add("--max-new-tokens", type=int, default=8192, help="of a chat that names no limit (MAX_NEW_TOKENS)")
    add("--max-tokens-per-gpu", type=int, default=32768, help="token budget of one micro-batch")
    add("--mem-fraction-static", type=float, default=0.85, help="share of a serving GPU for weights and KV cache")
    add("--context-length", type=int, default=32768)
    add("--host", default="127.0.0.1", help="anything but loopback needs a chat key (SGLANG_API_KEY)")
    add("--port", type=int, default=30000)
    add("--served-model-name")
    add("--tool-call-parser", default="qwen25")
    add("--reasoning-parser", default="qwen3")
    add("--judge", choices=("llm", "rules"), default="llm", help="rules: no model judges; hints are users' own words")
    add("--prm-url", help="base URL of an OpenAI-compatible judge elsewhere (PRM_URL)")
    add("--prm-port", type=int, help=f"of the PRM that is started here; unset: {PRM_PORT}, or a free one (PRM_PORT)")
    add("--prm-args", default="", help="more words for the PRM's SGLang, quoted as for a shell (PRM_ARGS)")
    add("--prm-votes", type=int, default=3, help="judge samples per turn (PRM_M)")
    add("--prm-temperature", type=float, default=0.6)
    add("--prm-max-new-tokens", type=int, default=4096)
    add("--top-k", type=int, default=0, help="distil over the teacher's top k; 0: over the sampled tokens")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="one more setting of the server")
    add("--push", choices=PUSHES, default="nccl", help="how weights reach the engine; disk: both sides see --data-dir")
    add("--share-gpus", action="store_true", help="every part begins at GPU 0, for a check on one card")
    add("--optimizer-on-gpu", action="store_true", help="keep the optimizer's state on the GPUs")
    add(
        "--no-transformer-engine",
        action="store_true",
        help="for hosts without it: our own layer spec, and the optimizer on the GPU",
    )
    add("--ray-address", help="a running Ray cluster; a local Ray when unset")
    add("--server-python", help="interpreter of the server's environment; this one when unset")
    add("--engine-python", help="interpreter of SGLang's environment; this one when unset")
    add("--dry-run", action="store_true", help="print the layout and every argv, start nothing")
    return parser


def _plan_of(given: argparse.Namespace) -> Plan:
    layout = Layout(
        given.num_gpus,
        given.actor_gpus,
        given.rollout_gpus,
        given.prm_gpus,
        actor_tp=given.actor_tp,
        engine_tp=given.engine_tp,
        prm_tp=given.prm_tp,
        actor_nodes=given.actor_nodes,
        is_shared=given.share_gpus,
    )
    server = ServerOptions(
        host=given.host,
        port=given.port,
        data_dir=given.data_dir,
        served_model_name=given.served_model_name,
        tool_call_parser=given.tool_call_parser,
        reasoning_parser=given.reasoning_parser,
        max_new_tokens=given.max_new_tokens,
        judge=given.judge,
        judge_votes=given.prm_votes,
        judge_temperature=given.prm_temperature,
        judge_max_new_tokens=given.prm_max_new_tokens,
        judge_url=given.prm_url,
        prm_port=_prm_port(given),
        prm_args=_prm_args(given.prm_args),
        prm_holds_base=given.prm_gpus > 0 and _is_one(given.prm_checkpoint, given.hf_checkpoint),
        mem_fraction_static=given.mem_fraction_static,
        top_k=given.top_k,
        extra=tuple(given.set),
    )
    kl_coef = given.kl_coef
    if kl_coef is None:
        kl_coef = DRIFT_KL if moves_with_policy(given.method, server) else 0.0
    node = NodeOptions(
        hf_checkpoint=given.hf_checkpoint,
        method=given.method,
        ref_load=given.ref_load,
        layout=layout,
        batch_size=given.batch_size,
        learning_rate=given.learning_rate,
        kl_coef=kl_coef,
        temperature=given.temperature,
        max_tokens_per_gpu=given.max_tokens_per_gpu,
        context_length=given.context_length,
        push=given.push,
        # Megatron's offload asks for Transformer Engine's version, and fails where there is none.
        optimizer_on_cpu=not (given.optimizer_on_gpu or given.no_transformer_engine),
        has_transformer_engine=not given.no_transformer_engine,
    )
    python = "python3" if given.dry_run else sys.executable
    pythons = Pythons(python, given.server_python or python, given.engine_python or python)
    training = Training(given.checkpoint_every, given.checkpoint_minutes, ray_address=given.ray_address)
    return make_plan(node, server, pythons, training, prm_checkpoint=given.prm_checkpoint)


def _is_one(judge: str | None, policy: str) -> bool:
    """Return True if the judge's checkpoint is the policy's own."""
    return judge is None or judge == policy or Path(judge).expanduser().resolve() == Path(policy).expanduser().resolve()


def _prm_port(given: argparse.Namespace) -> int:
    """Return the PRM's port: the given one, else the usual one or, before a real start, a free one if it is taken."""
    if given.prm_port is not None:
        if not 0 < given.prm_port <= HIGHEST_PORT:
            raise SettingsError(f"PRM_PORT {given.prm_port}: SGLang takes ports up to {HIGHEST_PORT}")
        return int(given.prm_port)
    if given.dry_run or not given.prm_gpus or is_free(PRM_PORT):
        return PRM_PORT
    return free_port()


def _prm_args(text: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise SettingsError(f"PRM_ARGS {text!r}: {error}") from error
    if taken := [word for word in words if word.partition("=")[0] in PRM_FLAGS]:
        raise SettingsError(f"PRM_ARGS {taken[0]}: it is set here (PRM_PORT, PRM_MODEL_PATH; loopback alone)")
    return words


def _check_folders(given: argparse.Namespace) -> None:
    """Check that Megatron's models are folders: it does not download, and a missing one has no shape."""
    for name, place in (("HF_CKPT", given.hf_checkpoint), ("REF_LOAD", given.ref_load)):
        if place is not None and not Path(place).is_dir():
            raise SettingsError(f"{name} {place}: it is no folder here; slime needs the model's files on this disk")


def _warn(difference: str) -> None:
    sys.stderr.write(f"warning: {difference}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or Ctrl-C, then stop the started processes only. Return 2 if the plan cannot work."""
    given = _parser().parse_args(argv)
    try:
        plan = _plan_of(given)
        if not given.dry_run:
            for note in plan.notes:
                _warn(note)
            _check_folders(given)
            check_start(os.environ, _warn)  # the driver checks too, but only after minutes of loading models
            return run(plan.prm, plan.server, plan.driver, data_dir=Path(plan.data_dir).expanduser())
    except SettingsError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(plan.text() + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
