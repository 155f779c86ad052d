"""A trainer without a model, over the trainer API: its weights are a few bytes, its log-probs the stub policy's."""

from collections.abc import Callable
from pathlib import Path

from openclaw_rl.testing import ToyPolicy
from openclaw_rl.testing.toy_policy import BASE_SEED, adapter_seed
from openclaw_rl.trainer_protocol import Commit, LeaseBody, Manifest, Probe, Report
from openclaw_rl.trainers import checkpoint
from openclaw_rl.trainers.client import TrainerClient
from openclaw_rl.types import WeightKind

WEIGHTS_FILE = "adapter_model.safetensors"


class ToyTrainer:
    def __init__(
        self,
        url: str,
        data_dir: Path,
        policy: ToyPolicy,
        *,
        kind: WeightKind = WeightKind.LORA,
        token: str | None = None,
    ) -> None:
        """token: None means the one in the server's data directory."""
        self.client = TrainerClient(url, token or (data_dir / "keys" / "trainer.token").read_text().strip())
        self._data_dir, self._policy, self._kind = data_dir, policy, kind

    def lease(self, *, wait_s: float = 120.0) -> LeaseBody | None:
        return self.client.lease("toy", wait_s=wait_s)

    def checkpoint(
        self,
        lease: LeaseBody,
        change: Callable[[Report], Report] = lambda report: report,
        *,
        weights: bytes | None = None,
    ) -> Commit:
        """Run one step on this batch and write it to disk, without the commit. change: edits its report."""

        def fill(folder: Path) -> None:
            (folder / WEIGHTS_FILE).write_bytes(weights or lease.lease_id.encode() * 64)

        folder = checkpoint.write(self._data_dir / "versions", lease.lease_id, fill)
        is_full = self._kind is WeightKind.FULL
        seed = BASE_SEED ^ (lease.parent + 1) if is_full else adapter_seed(folder)
        probes = []
        for sample in lease.samples[:2]:
            ids, start = (*sample.prompt_ids, *sample.response_ids), len(sample.prompt_ids)
            log_probs = self._policy.log_probs(ids, start, seed)
            probes.append(
                Probe(
                    prompt_ids=sample.prompt_ids,
                    response_ids=sample.response_ids,
                    log_probs=list(log_probs),
                    parent_log_probs=list(log_probs),
                )
            )
        return Commit(
            lease_id=lease.lease_id,
            fence=lease.fence,
            parent=lease.parent,
            manifest=Manifest(
                folder=f"versions/{folder.name}",
                kind=self._kind,
                base_hash="stub",
                sha256=checkpoint.sha256(folder / WEIGHTS_FILE),
                weights_file=WEIGHTS_FILE,
            ),
            report=change(Report(metrics={"loss": 0.1}, probes=probes)),
        )
