"""Comparison of the weights that the engine holds after a push with Megatron's export, bit for bit.

While versions serve, `ServedWeights` takes the engine's own checksum of each of its tensors. Afterwards, with the
engine idle, `compare` loads the export of each of those versions into it from disk: the checksums must be equal. Both
sides use the engine's names, its fused matrices and its hash, so that the check needs to know none of them. A tensor
that did not arrive, arrived half or arrived in another place has another checksum.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from gpu.host import NodeHost
from gpu.node_processes import Engine
from gpu.stages import Figures

LOOK_EVERY_S, AGAIN_S = 1.0, 0.2
MOST_VERSIONS = 4
"""Versions of one method that are compared, beside the first."""


class NoChecksums(Exception):
    """The engine has no checksums (the embedded engine)."""


class CheckedEngine:
    """SGLang's API as the comparison uses it."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def held(self) -> int:
        """Return the version that the engine reports; 0, the base, if no push has named one."""
        version = self._client.get("/model_info").raise_for_status().json().get("weight_version")
        return int(version) if version not in (None, "default") else 0

    def checksums(self) -> dict[str, str]:
        """Return the checksum of every tensor on every rank. Raises NoChecksums."""
        reply = self._client.post("/weights_checker", json={"action": "checksum"})
        if reply.status_code in (404, 405):
            raise NoChecksums(f"/weights_checker: {reply.status_code}")
        ranks = reply.raise_for_status().json()["ranks"]
        return {f"{n}: {name}": value for n, rank in enumerate(ranks) for name, value in rank["checksums"].items()}

    def load(self, folder: Path, version: int) -> None:
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        reply = self._client.post("/update_weights_from_disk", json=body).raise_for_status().json()
        if not reply.get("success", True):
            raise RuntimeError(f"{folder.name}: {reply.get('message')}")


@dataclass(slots=True)
class ServedWeights:
    """Checksums of each version that served, taken from a thread of its own.

    A version's checksums are taken once, since the hash delays the replies for a moment. They count if the server
    reports that the version serves, and if a second look gives the same.

    serving: returns the version that the server reports as serving.
    """

    engine: CheckedEngine
    serving: Callable[[], int]
    taken: dict[int, dict[str, str]] = field(default_factory=dict)
    problem: str = "no look succeeded"
    """Error of the last look."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(30)

    def _look(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            try:
                self.take()
            except NoChecksums as error:
                self.problem = str(error)
                return
            except (httpx.HTTPError, OSError, ValueError, KeyError) as error:
                self.problem = repr(error)[:300]

    def take(self) -> None:
        version = self.engine.held()
        if version in self.taken or self.serving() != version:  # a push may be running
            return
        found = self.engine.checksums()
        time.sleep(AGAIN_S)
        if self.engine.checksums() != found or self.engine.held() != version or self.serving() != version:
            return
        self.taken[version] = found

    def keep(self, file: Path, versions: Sequence[Mapping[str, Any]]) -> None:
        """Write the checksums, and the folders of the durable versions.

        versions: as `/v1/admin/status` lists them.
        """
        folders = {row["weight_version"]: row["folder"] for row in versions if row["durable"]}
        file.write_text(json.dumps({"folders": folders, "checksums": self.taken, "problem": self.problem}))


def differences(served: Mapping[str, str], loaded: Mapping[str, str]) -> list[str]:
    """Return the names of the tensors that differ, or that only one side has."""
    return sorted(name for name in served.keys() | loaded.keys() if served.get(name) != loaded.get(name))


def compare(engine: CheckedEngine, kept: Mapping[str, Any], base: Path, data_dir: Path) -> dict[str, Any]:
    """Compare the first and the newest versions of one method.

    `moved` counts the tensors that differ from the first compared version. If none moved, equality proves little.
    """
    figures: dict[str, Any] = {}
    findings: list[str] = []
    served = {int(version): found for version, found in kept["checksums"].items()}
    folders = {int(version): folder for version, folder in kept["folders"].items()}
    here = {
        version: data_dir / folders[version] if folders.get(version) else base
        for version in served
        if version in folders
    }
    wanted = sorted(version for version, folder in here.items() if any(folder.glob("*.safetensors")))
    wanted = sorted({*wanted[:1], *wanted[-MOST_VERSIONS:]})
    for version in wanted:
        engine.load(here[version], version)
        loaded = engine.checksums()
        apart = differences(served[version], loaded)
        figures[f"version {version}"] = {
            "tensors": len(loaded),
            "differ": len(apart),
            "moved": len(differences(served[wanted[0]], served[version])),
            **({"which": apart[:8]} if apart else {}),
        }
        if apart:
            findings.append(f"version {version}: {len(apart)} of {len(loaded)} tensors are not the export's")
    if not wanted:
        findings.append(f"no version was both looked at and exported ({kept['problem']})")
    return figures | {"findings": findings}


def run(host: NodeHost) -> Figures:
    """Compare the served versions of every part with Megatron's exports."""
    figures: Figures = {}
    findings: list[str] = []
    with httpx.Client(base_url=Engine.of(host).url, timeout=60) as client:
        for file in sorted(host.work.glob("weights-*.json")):
            method = file.stem.removeprefix("weights-")
            figures[method] = compare(
                CheckedEngine(client), json.loads(file.read_text()), host.checkpoint, host.data_dir
            )
            findings += [f"{method}: {finding}" for finding in figures[method].pop("findings")]
    if not figures:
        findings.append("no part kept checksums of its engine")
    return figures | {"findings": findings}
