"""The node's command: starts the processes of a run from the launch scripts' variables; `--dry-run` prints them.

    python -m openclaw_slime.launch --method combine --hf-checkpoint DIR [--dry-run]

Three processes, joined by HTTP alone, each with its own GPUs:

- the *PRM*: a plain SGLang, unless it runs elsewhere;
- our *server*: proxy, ledger, judge, publisher, with the policy's SGLang as its child;
- the *driver*: Ray and Megatron. If it dies it is started again, and chats go on.

Needs pydantic beside the standard library. Leaves to others: slime's arguments (`arguments`), the GPUs of each part
(`layout`), running processes (`processes`).
"""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openclaw_rl.errors import SettingsError
from openclaw_rl.settings import installed_methods, settings_class
from openclaw_slime.arguments import PUSHES, QWEN3_4B, NodeOptions, read_config, slime_arguments
from openclaw_slime.doctor import check_start
from openclaw_slime.layout import Layout
from openclaw_slime.processes import Command, run

DATA_DIR = "~/.openclaw-rl/node"
HOLD_S = 300
"""Longest wait of a chat while a dead engine comes back, then the driver, which sends its weights.

Measured: 80 s for a 0.6B model.
"""
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
class ServerOptions:
    """Options of our server and its engines that do not follow from the node."""

    host: str = "127.0.0.1"
    port: int = 30000
    data_dir: str = DATA_DIR
    served_model_name: str | None = None
    tool_call_parser: str = "qwen25"
    reasoning_parser: str = "qwen3"
    judge: str = "llm"
    judge_votes: int = 3
    judge_temperature: float = 0.6
    judge_max_new_tokens: int = 4096
    judge_url: str | None = None
    """OpenAI-compatible base URL of a judge elsewhere; the PRM of this node when unset."""
    prm_port: int = 30001
    prm_args: tuple[str, ...] = ()
    """More arguments for the PRM's SGLang, for example other kernels on a host without its fast ones."""
    mem_fraction_static: float = 0.85
    top_k: int = 0
    extra: tuple[str, ...] = ()
    """More settings of the server, as `key=value`."""


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
    ray_address: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The processes of a launch, in the order of their start."""

    layout: Layout
    data_dir: str
    prm: Command | None
    server: Command
    driver: Command

    def text(self) -> str:
        parts = ["layout", self.layout.table()]
        for command in (self.prm, self.server, self.driver):
            if command is not None:
                parts += ["", command.name, _lines(command)]
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
    if server.top_k and "top_k" not in settings_class(options.method).model_fields:
        raise SettingsError(f"TOP_K is for methods that distil: {options.method} has no top-k")
    prm = _prm(layout, server, pythons, prm_checkpoint or options.hf_checkpoint) if layout.prm_gpus else None
    return Plan(
        layout,
        server.data_dir,
        prm,
        _server(options, server, pythons),
        _driver(options, server, pythons, training, config),
    )


def _driver(
    options: NodeOptions, server: ServerOptions, pythons: Pythons, training: Training, config: Mapping[str, Any]
) -> Command:
    ours = ["--data-dir", server.data_dir, "--checkpoint-every", str(training.checkpoint_every)]
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


def _server(options: NodeOptions, server: ServerOptions, pythons: Pythons) -> Command:
    layout = options.layout
    arguments = ["serve", "--host", server.host, "--port", str(server.port)]
    hindsight = {
        "hint_source": "judge" if server.judge == "llm" else "verbatim",
        "teacher": "policy",  # full weights leave no base in its engine
    }
    has = settings_class(options.method).model_fields
    values: dict[str, object] = {
        "data_dir": server.data_dir,
        "model.path": options.hf_checkpoint,
        "model.tool_call_parser": server.tool_call_parser,
        "model.reasoning_parser": server.reasoning_parser,
        "model.context_length": options.context_length,
        "sampling.temperature": options.temperature,
        "method.name": options.method,
        **{f"method.{key}": value for key, value in hindsight.items() if key in has},
        "training.batch_size": options.batch_size,
        "training.min_batch": min(4, options.batch_size),
        "training.weights": "full",
        "trainer.kind": "external",
        "trainer.kl_coef": options.kl_coef,
        "trainer.max_tokens": options.max_tokens_per_gpu * layout.context_parallel,
        "judge.kind": server.judge,
        "engine.kind": "sglang",
        "engine.memory_fraction": server.mem_fraction_static,
        "engine.hold_s": HOLD_S,
    }
    if pythons.engine != pythons.server:
        values["engine.python"] = pythons.engine
    if layout.engine_tp > 1:
        values["engine.args"] = f'["--tp", "{layout.engine_tp}"]'
    if server.judge == "llm":
        values |= {
            "judge.votes": server.judge_votes,
            "judge.quorum": min(2, server.judge_votes),
            "judge.temperature": server.judge_temperature,
            "judge.max_new_tokens": server.judge_max_new_tokens,
            "judge.url": server.judge_url or f"http://127.0.0.1:{server.prm_port}/v1",
        }
    if server.top_k:
        values["method.top_k"] = server.top_k
    if server.served_model_name is not None:
        values["server.served_model_name"] = server.served_model_name
    for key, value in values.items():
        arguments += ["--set", f"{key}={value}"]
    for setting in server.extra:
        arguments += ["--set", setting]
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
    add("--kl-coef", type=float, default=0.0, help="weight of the KL to the reference")
    add("--temperature", type=float, default=0.7, help="of chats that name none")
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
    add("--prm-port", type=int, default=30001, help="of the PRM that is started here")
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
    node = NodeOptions(
        hf_checkpoint=given.hf_checkpoint,
        method=given.method,
        ref_load=given.ref_load,
        layout=layout,
        batch_size=given.batch_size,
        learning_rate=given.learning_rate,
        kl_coef=given.kl_coef,
        temperature=given.temperature,
        max_tokens_per_gpu=given.max_tokens_per_gpu,
        context_length=given.context_length,
        push=given.push,
        # Megatron's offload asks for Transformer Engine's version, and fails where there is none.
        optimizer_on_cpu=not (given.optimizer_on_gpu or given.no_transformer_engine),
        has_transformer_engine=not given.no_transformer_engine,
    )
    server = ServerOptions(
        host=given.host,
        port=given.port,
        data_dir=given.data_dir,
        served_model_name=given.served_model_name,
        tool_call_parser=given.tool_call_parser,
        reasoning_parser=given.reasoning_parser,
        judge=given.judge,
        judge_votes=given.prm_votes,
        judge_temperature=given.prm_temperature,
        judge_max_new_tokens=given.prm_max_new_tokens,
        judge_url=given.prm_url,
        prm_port=given.prm_port,
        prm_args=_prm_args(given.prm_args),
        mem_fraction_static=given.mem_fraction_static,
        top_k=given.top_k,
        extra=tuple(given.set),
    )
    python = "python3" if given.dry_run else sys.executable
    pythons = Pythons(python, given.server_python or python, given.engine_python or python)
    training = Training(given.checkpoint_every, given.ray_address)
    return make_plan(node, server, pythons, training, prm_checkpoint=given.prm_checkpoint)


def _prm_args(text: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise SettingsError(f"PRM_ARGS {text!r}: {error}") from error
    if taken := [word for word in words if word.partition("=")[0] in PRM_FLAGS]:
        raise SettingsError(f"PRM_ARGS {taken[0]}: it is set here (PRM_PORT, PRM_MODEL_PATH; loopback alone)")
    return words


def _warn(difference: str) -> None:
    sys.stderr.write(f"warning: {difference}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or Ctrl-C, then stop the started processes only. Return 2 if the plan cannot work."""
    given = _parser().parse_args(argv)
    try:
        plan = _plan_of(given)
        if not given.dry_run:
            check_start(os.environ, _warn)  # the driver checks too, but only after minutes of loading models
            return run(plan.prm, plan.server, plan.driver, data_dir=Path(plan.data_dir).expanduser())
    except SettingsError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(plan.text() + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
