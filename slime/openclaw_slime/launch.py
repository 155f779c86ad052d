"""The node's command: from the launch scripts' variables to the processes of a run, shown by `--dry-run`.

    python -m openclaw_slime.launch --method combine --hf-checkpoint DIR --dry-run

Two processes, joined by HTTP alone: our *server* (proxy, ledger, judge, publisher; it outlives a crash of the other),
and slime's *driver* (Ray, Megatron, the SGLang engines). It runs under slime's Python, so it needs nothing but the
standard library. Leaves to others: what slime's arguments are (`arguments`),
which GPU does what (`layout`).
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from openclaw_rl.errors import SettingsError
from openclaw_slime.arguments import METHODS, NodeOptions, engine_yaml, slime_arguments
from openclaw_slime.layout import Layout
from openclaw_slime.model_shape import QWEN3_4B, read_config

ENGINE_CONFIG = "engines.yaml"


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What the launch script tells our server beside what follows from the node."""

    host: str = "127.0.0.1"
    port: int = 30000
    served_model_name: str | None = None
    tool_call_parser: str = "qwen25"
    reasoning_parser: str = "qwen3"
    judge_votes: int = 3
    judge_temperature: float = 0.6
    judge_max_new_tokens: int = 4096
    judge_url: str | None = None
    """OpenAI-compatible base URL of a judge elsewhere; the PRM engines of this node when unset."""
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a launch would start."""

    layout: Layout
    driver: tuple[str, ...]
    server: tuple[str, ...]
    engine_config: str | None
    """Text of `engines.yaml`, when there is a PRM."""

    def text(self) -> str:
        parts = ["layout", self.layout.table(), "", "driver", _lines(self.driver), "", "server", _lines(self.server)]
        if self.engine_config is not None:
            parts += ["", ENGINE_CONFIG, self.engine_config.rstrip()]
        return "\n".join(parts)


def make_plan(options: NodeOptions, server: ServerOptions, *, prm_checkpoint: str | None, python: str) -> Plan:
    """Pure but for reading the checkpoint's config. Raises SettingsError for what cannot work."""
    checkpoint = Path(options.hf_checkpoint)
    config = read_config(checkpoint) if checkpoint.is_dir() else QWEN3_4B
    has_prm = options.layout.prm_gpus > 0
    if not has_prm and server.judge_url is None:
        raise SettingsError("PRM_GPUS is 0 and PRM_URL is not set: full weights leave no base to judge with")
    if server.top_k:
        raise SettingsError("top-k distillation needs a transport that slime lacks; use the LoRA trainer for it")
    engines = engine_yaml(options, prm_checkpoint or options.hf_checkpoint) if has_prm else None
    arguments = slime_arguments(options, config, engine_config=ENGINE_CONFIG if has_prm else None)
    driver = (python, "-m", "openclaw_slime.driver", *arguments)
    return Plan(options.layout, driver, _server(options, server), engines)


def _server(options: NodeOptions, server: ServerOptions) -> tuple[str, ...]:
    argv = ["openclaw-rl", "serve", "--host", server.host, "--port", str(server.port)]
    values: dict[str, object] = {
        "model.path": options.hf_checkpoint,
        "model.tool_call_parser": server.tool_call_parser,
        "model.reasoning_parser": server.reasoning_parser,
        "model.context_length": options.context_length,
        "method.name": options.method,
        "method.hint_source": "judge",  # there is one of some size
        "method.teacher": "policy",  # full weights leave no base in its engine
        "training.batch_size": options.batch_size,
        "training.weights": "full",
        "trainer.kind": "external",
        "judge.kind": "llm",
        "judge.votes": server.judge_votes,
        "judge.quorum": min(2, server.judge_votes),
        "judge.temperature": server.judge_temperature,
        "judge.max_new_tokens": server.judge_max_new_tokens,
        "engine.kind": "url",
        "engine.url": "POLICY_ENGINE",
        "judge.url": server.judge_url or "PRM_ENGINE/v1",
    }
    if server.served_model_name is not None:
        values["server.served_model_name"] = server.served_model_name
    for key, value in values.items():
        argv += ["--set", f"{key}={value}"]
    return tuple(argv)


def _lines(argv: tuple[str, ...]) -> str:
    """One flag with its values a line."""
    lines: list[list[str]] = [[]]
    for word in argv:
        if word.startswith("--") and lines[-1]:
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return " \\\n".join("    " * (n > 0) + " ".join(words) for n, words in enumerate(lines))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m openclaw_slime.launch",
        description="Train on a node of GPUs: Megatron through slime, SGLang engines, our server in front.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--method", required=True, choices=METHODS, help="what is learned from")
    add("--hf-checkpoint", required=True, help="folder of the policy in Hugging Face format (HF_CKPT)")
    add("--ref-load", help="reference weights; the checkpoint when unset (REF_LOAD)")
    add("--save", help="where checkpoints go and are resumed from (SAVE_CKPT)")
    add("--prm-checkpoint", help="the judge's model; the policy's checkpoint when unset (PRM_MODEL_PATH)")
    for name, default, what in (
        ("num", 8, "GPUs of the node"),
        ("actor", 4, "GPUs that train"),
        ("rollout", 2, "GPUs that serve the policy"),
        ("prm", 2, "GPUs of the judge; 0: one elsewhere, --prm-url"),
    ):
        add(f"--{name}-gpus", type=int, default=default, help=what)
    add("--actor-tp", type=int, default=4, help="tensor-parallel size of Megatron (TP)")
    add("--engine-tp", type=int, default=2, help="GPUs of one policy engine")
    add("--prm-tp", type=int, default=2, help="GPUs of one PRM engine")
    add("--batch-size", type=int, default=16, help="samples of one update")
    add("--learning-rate", type=float, default=1e-5)
    add("--kl-coef", type=float, default=0.0, help="weight of the KL to the reference")
    add("--max-tokens-per-gpu", type=int, default=32768, help="token budget of one micro-batch")
    add("--mem-fraction-static", type=float, default=0.85, help="share of a serving GPU for weights and KV cache")
    add("--context-length", type=int, default=32768)
    add("--host", default="127.0.0.1", help="anything but loopback needs a chat key (SGLANG_API_KEY)")
    add("--port", type=int, default=30000)
    add("--served-model-name")
    add("--tool-call-parser", default="qwen25")
    add("--prm-url", help="base URL of an OpenAI-compatible judge elsewhere (PRM_URL)")
    add("--prm-votes", type=int, default=3, help="judge samples per turn (PRM_M)")
    add("--prm-temperature", type=float, default=0.6)
    add("--prm-max-new-tokens", type=int, default=4096)
    add("--top-k", type=int, default=0, help="distillation over the teacher's top k; not on the node yet")
    add("--no-transformer-engine", action="store_true", help="use our own layer spec, for hosts without it")
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
    )
    node = NodeOptions(
        hf_checkpoint=given.hf_checkpoint,
        method=given.method,
        ref_load=given.ref_load,
        save=given.save,
        layout=layout,
        batch_size=given.batch_size,
        learning_rate=given.learning_rate,
        kl_coef=given.kl_coef,
        max_tokens_per_gpu=given.max_tokens_per_gpu,
        context_length=given.context_length,
        mem_fraction_static=given.mem_fraction_static,
        has_transformer_engine=not given.no_transformer_engine,
    )
    server = ServerOptions(
        host=given.host,
        port=given.port,
        served_model_name=given.served_model_name,
        tool_call_parser=given.tool_call_parser,
        judge_votes=given.prm_votes,
        judge_temperature=given.prm_temperature,
        judge_max_new_tokens=given.prm_max_new_tokens,
        judge_url=given.prm_url,
        top_k=given.top_k,
    )
    python = "python3" if given.dry_run else sys.executable
    return make_plan(node, server, prm_checkpoint=given.prm_checkpoint, python=python)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan; 2 and one line on stderr when it cannot work."""
    given = _parser().parse_args(argv)
    try:
        plan = _plan_of(given)
        if not given.dry_run:
            raise SettingsError("the driver is not built yet: --dry-run shows what it will be given")
    except SettingsError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(plan.text() + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
