"""Layout of a node's GPUs: Megatron trains on the first, SGLang serves the policy on the next, the PRM on the last.

    8 GPUs:  actor 0–3 (TP 4)   rollout 4–5 (one engine, TP 2)   prm 6–7 (one engine, TP 2)

The GPUs that serve may be divided among several engines of one size, which the server uses as a pool.

With `actor_nodes`, other nodes of a Ray cluster train, and all GPUs of this one serve.

A layout that cannot work is refused before the first process starts; the reason names the script's variables.
"""

from dataclasses import dataclass

from openclaw_rl.errors import SettingsError

VARIABLES = {"actor_tp": "TP", "context_parallel": "CP", "pipeline_parallel": "PP"}
"""Fields whose variable in the launch scripts has another name."""
SLIMES_LENGTH = 4096
"""Sequence length that slime gives Megatron. No batch has it, but Megatron wants it to split over CP."""


@dataclass(frozen=True, slots=True)
class Layout:
    """GPUs and parallel sizes of each part."""

    num_gpus: int = 8
    actor_gpus: int = 4
    rollout_gpus: int = 2
    prm_gpus: int = 2
    actor_tp: int = 4
    """Tensor-parallel size of Megatron; the rest of the actor's GPUs is data parallel."""
    context_parallel: int = 1
    """GPUs that share one sequence."""
    pipeline_parallel: int = 1
    """Stages of layers."""
    rollout_engines: int = 1
    """Policy engines, which share `rollout_gpus`."""
    engine_tp: int = 2
    """GPUs of one policy engine."""
    prm_tp: int = 2
    """GPUs of one PRM engine."""
    actor_nodes: int = 0
    """Other nodes that train, each with `actor_gpus`; 0: this node trains."""
    is_shared: bool = False
    """Every part begins at GPU 0: for a check on one card, where NCCL cannot send weights."""
    is_prm_beside: bool = False
    """The PRM begins at the policy engine's first GPU: for a check on two cards, where NCCL sends the weights."""

    def __post_init__(self) -> None:
        needed = ["num_gpus", "actor_gpus", "rollout_gpus", "rollout_engines", *VARIABLES, "engine_tp"]
        for name in needed + ["prm_tp"] * (self.prm_gpus > 0):
            if getattr(self, name) < 1:
                variable = VARIABLES.get(name, name.upper())
                raise SettingsError(f"{variable} is {getattr(self, name)}; at least 1 is needed")
        if self.actor_nodes < 0 or (self.actor_nodes and self.is_shared):
            raise SettingsError(f"ACTOR_NODES is {self.actor_nodes}; other nodes train, or this one does (0)")
        if self.prm_gpus < 0:
            raise SettingsError(f"PRM_GPUS is {self.prm_gpus}; with 0, PRM_URL names a judge elsewhere")
        parts = {"ACTOR_GPUS": self._actor_gpus_here, "ROLLOUT_GPUS": self.rollout_gpus, "PRM_GPUS": self.prm_gpus}
        used = max(parts.values()) if self.is_shared else sum(parts.values())
        if self.is_prm_beside and not self.is_shared:
            used -= min(self.rollout_gpus, self.prm_gpus)
        if used > self.num_gpus:
            named = " + ".join(f"{name} {count}" for name, count in parts.items() if count)
            raise SettingsError(f"{named} = {used}, but NUM_GPUS is {self.num_gpus}")
        self._check_parallel()
        if self.rollout_gpus != self.rollout_engines * self.engine_tp:
            raise SettingsError(
                f"ROLLOUT_GPUS {self.rollout_gpus} must be ROLLOUT_ENGINES {self.rollout_engines} × ENGINE_TP "
                f"{self.engine_tp}: each engine has GPUs of its own"
            )
        if self.prm_gpus and self.prm_gpus % self.prm_tp:
            raise SettingsError(f"PRM_GPUS {self.prm_gpus} is no multiple of PRM_TP {self.prm_tp}")

    def _check_parallel(self) -> None:
        """Check Megatron's part. A replica may lie on several nodes, but a tensor-parallel group lies on one."""
        if self.actor_gpus % self.actor_tp:
            raise SettingsError(f"ACTOR_GPUS {self.actor_gpus} is no multiple of TP {self.actor_tp}")
        sizes = f"{self.actor_tp} × {self.context_parallel} × {self.pipeline_parallel}"
        if self.training_gpus % self._replica:
            nodes = f" of {self.actor_nodes} nodes" if self.actor_nodes else ""
            raise SettingsError(f"ACTOR_GPUS {self.actor_gpus}{nodes} is no multiple of TP × CP × PP = {sizes}")
        if SLIMES_LENGTH % (2 * self.context_parallel):
            raise SettingsError(f"CP {self.context_parallel} is no power of two: Megatron halves each rank's part")

    @property
    def training_gpus(self) -> int:
        """All GPUs that train, over the nodes."""
        return max(1, self.actor_nodes) * self.actor_gpus

    @property
    def _replica(self) -> int:
        return self.actor_tp * self.context_parallel * self.pipeline_parallel

    @property
    def data_parallel(self) -> int:
        return self.training_gpus // self._replica

    @property
    def _actor_gpus_here(self) -> int:
        return 0 if self.actor_nodes else self.actor_gpus

    def gpus(self, part: str) -> str:
        """Return the numbers of a part's GPUs on this node, in the form of CUDA_VISIBLE_DEVICES."""
        count = {"actor": self._actor_gpus_here, "rollout": self.rollout_gpus, "prm": self.prm_gpus}[part]
        return ",".join(str(self._first(part) + n) for n in range(count))

    def _first(self, part: str) -> int:
        if self.is_shared:
            return 0
        here = self._actor_gpus_here
        return {"actor": 0, "rollout": here, "prm": here + (0 if self.is_prm_beside else self.rollout_gpus)}[part]

    def table(self) -> str:
        """Return a table for people: one line a part."""
        sizes = {"TP": self.actor_tp, "CP": self.context_parallel, "PP": self.pipeline_parallel}
        megatron = ", ".join(["Megatron", *(f"{name} {size}" for name, size in sizes.items())])
        megatron += f", DP {self.data_parallel}"
        engines = "one engine" if self.rollout_engines == 1 else f"{self.rollout_engines} engines"
        rows = [self._row("rollout", self.rollout_gpus, f"SGLang, {engines} of TP {self.engine_tp}")]
        if self.prm_gpus:
            rows.append(self._row("prm", self.prm_gpus, f"SGLang, {self.prm_gpus // self.prm_tp} × TP {self.prm_tp}"))
        if self.actor_nodes:
            return "\n".join([*rows, f"  {self.actor_nodes} other × {self.actor_gpus} GPUs   actor    {megatron}"])
        return "\n".join([self._row("actor", self.actor_gpus, megatron), *rows])

    def _row(self, part: str, count: int, what: str) -> str:
        first = self._first(part)
        numbers = f"{first}–{first + count - 1}" if count > 1 else str(first)
        return f"  GPU {numbers:<5} {part:<8} {what}"
