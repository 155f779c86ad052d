"""The node's command: starts the processes of a run from the launch scripts' variables; `--dry-run` prints them.

    python -m openclaw_slime.launch --method combine --hf-checkpoint DIR [--dry-run]

Three processes, joined by HTTP alone, each with its own GPUs:

- the *PRM*: a plain SGLang, unless it runs elsewhere;
- our *server*: proxy, ledger, judge, publisher, with the policy's SGLang as its child;
- the *driver*: Ray and Megatron. If it dies it is started again, and chats go on.

Needs pydantic beside the standard library. Leaves to others: slime's arguments (`arguments`), the server's settings
(`node_settings`), the GPUs of each part (`layout`), running processes (`processes`).
"""

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from openclaw_rl.engines.sglang.launch import ENVIRON, TAKES_IDS
from openclaw_rl.errors import SettingsError
from openclaw_rl.processes.command import HIGHEST_PORT, free_port
from openclaw_rl.settings import Settings, settings_class
from openclaw_slime.arguments import QWEN3_4B, NodeOptions, read_config, slime_arguments
from openclaw_slime.command_line import PRM_PORT, launch_parser
from openclaw_slime.doctor import check_start
from openclaw_slime.layout import Layout
from openclaw_slime.memory import SHARE, ActorMemory, actor_memory
from openclaw_slime.node_settings import (
    ServerOptions,
    asks_prm,
    final_settings,
    kept_checkpoints,
    moves_with_policy,
    under_settings,
)
from openclaw_slime.processes import Command, DoesNotStart, is_free, run
from openclaw_slime.start_check import check_folders, check_interpreters

PRM_STARTS = 3
"""First starts of the PRM, each on another port: a port can be taken, or refused by SGLang, after it was chosen."""
WHY_NO_QUANTISED_ENGINE = (
    "the engine serves bfloat16. slime quantises the weights that it sends only if HF_CKPT itself is quantised. Its "
    "loader can then read neither HF_CKPT nor a version's export; int4 also needs a call of slime's patched SGLang"
)
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
    memory: str = ""
    """Estimate of an actor GPU's memory, for people."""
    notes: tuple[str, ...] = ()
    """Facts that the user should know before the start."""

    def text(self) -> str:
        parts = ["layout", self.layout.table(), *([self.memory] if self.memory else [])]
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
    layout, config = options.layout, _config_of(options)
    memory = actor_memory(config, layout, options.max_tokens_per_gpu)
    if layout.actor_nodes and training.ray_address is None:
        raise SettingsError(f"ACTOR_NODES {layout.actor_nodes} needs RAY_ADDRESS: the cluster those nodes belong to")
    if server.top_k and "top_k" not in settings_class(options.method).model_fields:
        raise SettingsError(f"TOP_K is for methods that distil: {options.method} has no top-k")
    engine_python = pythons.engine if pythons.engine != pythons.server else None
    values, settings = final_settings(options, server, engine_python, os.environ)
    if getattr(settings.method, "top_k", 0) and layout.context_parallel > 1:
        raise SettingsError("TOP_K (method.top_k) needs CP=1: a top-k is not cut over ranks")
    needs_prm = asks_prm(settings, server.prm_port)
    if needs_prm and not layout.prm_gpus and server.judge_url is None:
        raise SettingsError("PRM_GPUS is 0 and PRM_URL is not set: full weights leave no base to judge with")
    notes = [*_drift_notes(settings, server), *_memory_notes(options, memory), *_untried_notes(options)]
    if layout.prm_gpus and not needs_prm:
        notes.append(f"no part asks the PRM, so it is not started: PRM_GPUS {layout.prm_gpus} have no work")
        layout = replace(layout, prm_gpus=0)
    return Plan(
        layout,
        server.data_dir,
        _prm(layout, server, pythons, prm_checkpoint or options.hf_checkpoint, settings) if layout.prm_gpus else None,
        _server(server, pythons, values, layout),
        _driver(
            under_settings(options, settings),
            server,
            pythons,
            replace(training, keep_checkpoints=kept_checkpoints(settings)),
            config,
        ),
        memory.line(options.card_gb, optimizer_on_cpu=options.optimizer_on_cpu),
        tuple(notes),
    )


def _config_of(options: NodeOptions) -> Mapping[str, Any]:
    checkpoint = Path(options.hf_checkpoint)
    return read_config(checkpoint) if checkpoint.is_dir() else QWEN3_4B


def _place_optimizer(options: NodeOptions, place: str) -> NodeOptions:
    """Return the options with the optimizer's state on the GPUs or on the CPU. Raises SettingsError."""
    # Parts that share a card are a check of small models; the estimate knows one part.
    memory = actor_memory(_config_of(options), options.layout, options.max_tokens_per_gpu)
    fits = options.layout.is_shared or memory.fits(options.card_gb, optimizer_on_cpu=False)
    if place == "auto" and not fits:
        estimate = memory.line(options.card_gb, optimizer_on_cpu=False).strip()
        raise SettingsError(
            f"the optimizer's state does not fit on the GPUs ({estimate}; at most {SHARE:.0%} of it). Set more "
            "ACTOR_GPUS, a lower MAX_TOKENS_PER_GPU or a true GPU_GB. OPTIMIZER=gpu tries it all the same. "
            "OPTIMIZER=cpu is untried: it needs Transformer Engine, and has never run on a card here"
        )
    return replace(options, optimizer_on_cpu=place == "cpu")


def _memory_notes(options: NodeOptions, memory: ActorMemory) -> tuple[str, ...]:
    is_large = not memory.fits(options.card_gb, optimizer_on_cpu=options.optimizer_on_cpu)
    if options.layout.is_shared or not is_large:
        return ()
    return (f"an actor GPU may run out of memory: the estimate is past {SHARE:.0%} of GPU_GB",)


def _untried_notes(options: NodeOptions) -> Iterator[str]:
    """Yield a note for each part of the options that never ran on a card."""
    if options.optimizer_on_cpu:
        yield "the optimizer's state on the CPU has never run on a card here; OPTIMIZER=gpu is what our runs used"
    if (engines := options.layout.rollout_engines) > 1:
        yield f"{engines} policy engines under slime's driver have never run on cards here"
    if options.precision == "fp8":
        yield "training in fp8 has never run on a card here; watch `fresh_abs_log_ratio` and the alert log_probs_differ"


def _drift_notes(settings: Settings, server: ServerOptions) -> tuple[str, ...]:
    if not moves_with_policy(settings.method):
        return ()
    not_fixed = "the judge here is not the policy's own checkpoint, which could be the fixed teacher"
    reason = 'method.teacher is "policy"' if server.prm_holds_base else not_fixed
    kl = f"KL_COEF is {settings.trainer.kl_coef:g}"
    return (f"the teacher is the policy itself: {reason}. Replies may drift; {kl}",)


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


def _prm(layout: Layout, server: ServerOptions, pythons: Pythons, checkpoint: str, settings: Settings) -> Command:
    arguments = ["--model-path", checkpoint, "--host", "127.0.0.1", "--port", str(server.prm_port)]
    arguments += ["--tp", str(layout.prm_tp), "--dp", str(layout.prm_gpus // layout.prm_tp), "--dtype", "bfloat16"]
    arguments += ["--mem-fraction-static", f"{server.mem_fraction_static:g}", *server.prm_args]
    if settings.method.scores_given_ids:
        arguments += TAKES_IDS
    environ = {"CUDA_VISIBLE_DEVICES": layout.gpus("prm"), **ENVIRON}
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


def _plan_of(given: argparse.Namespace, *, redraw_port: bool = False) -> Plan:
    """Return the plan of a command line. redraw_port: the PRM gets a free port that no plan had."""
    if given.engine_precision != "bf16":
        raise SettingsError(f"ENGINE_PRECISION {given.engine_precision}: {WHY_NO_QUANTISED_ENGINE}")
    if given.train_precision == "fp8" and not given.try_fp8:
        raise SettingsError("TRAIN_PRECISION fp8 has never run on a card here: TRY_FP8=1 starts it all the same")
    layout = Layout(
        given.num_gpus,
        given.actor_gpus,
        given.rollout_gpus,
        given.prm_gpus,
        actor_tp=_actor_tp(given),
        context_parallel=given.actor_cp,
        pipeline_parallel=given.actor_pp,
        rollout_engines=given.rollout_engines,
        engine_tp=_engine_tp(given),
        prm_tp=given.prm_tp,
        actor_nodes=given.actor_nodes,
        is_shared=given.share_gpus,
        is_prm_beside=given.prm_beside_engine,
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
        prm_port=free_port() if redraw_port else _prm_port(given),
        prm_args=_prm_args(given.prm_args),
        prm_holds_base=given.prm_gpus > 0 and _is_one(given.prm_checkpoint, given.hf_checkpoint),
        mem_fraction_static=given.mem_fraction_static,
        top_k=given.top_k,
        extra=tuple(given.set),
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
        push=given.push or ("nccl" if given.rollout_engines == 1 else "disk"),
        precision=given.train_precision,
        card_gb=given.gpu_gb,
        has_transformer_engine=not given.no_transformer_engine,
    )
    python = "python3" if given.dry_run else sys.executable
    pythons = Pythons(python, given.server_python or python, given.engine_python or python)
    training = Training(given.checkpoint_every, given.checkpoint_minutes, ray_address=given.ray_address)
    node = _place_optimizer(node, given.optimizer)
    return make_plan(node, server, pythons, training, prm_checkpoint=given.prm_checkpoint)


def _actor_tp(given: argparse.Namespace) -> int:
    """Return Megatron's tensor-parallel size: the given one, else the GPUs of a node that CP and PP leave."""
    if given.actor_tp is not None:
        return int(given.actor_tp)
    others = given.actor_cp * given.actor_pp
    return max(1, given.actor_gpus // others) if others > 0 else 1  # the layout refuses the others


def _engine_tp(given: argparse.Namespace) -> int:
    """Return the GPUs of one policy engine: the given number, else its part of the GPUs that serve."""
    if given.engine_tp is not None:
        return int(given.engine_tp)
    return int(given.rollout_gpus // given.rollout_engines) if given.rollout_engines > 0 else 1  # the layout refuses


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


def _run(plan: Plan, given: argparse.Namespace) -> int:
    """Run the plan. A PRM that does not start gets another port, unless the user chose it. Raises SettingsError."""
    for _ in range(PRM_STARTS - 1):
        try:
            return run(plan.prm, plan.server, plan.driver, data_dir=Path(plan.data_dir).expanduser())
        except DoesNotStart as error:
            if error.command is not plan.prm or given.prm_port is not None:
                raise
            plan = _plan_of(given, redraw_port=True)
            _warn(f"{error}; again on another port")
    return run(plan.prm, plan.server, plan.driver, data_dir=Path(plan.data_dir).expanduser())


def _warn(difference: str) -> None:
    sys.stderr.write(f"warning: {difference}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or Ctrl-C, then stop the started processes only. Return 2 if the plan cannot work."""
    given = launch_parser().parse_args(argv)
    try:
        plan = _plan_of(given)
        if not given.dry_run:
            for note in plan.notes:
                _warn(note)
            check_folders({"HF_CKPT": given.hf_checkpoint, "REF_LOAD": given.ref_load})
            check_start(os.environ, _warn)
            check_interpreters(plan.server.python, plan.prm.python if plan.prm is not None else None)
            return _run(plan, given)
    except SettingsError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(plan.text() + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
