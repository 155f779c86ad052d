"""Whether the weights that the engine holds after a push are Megatron's export, bit for bit.

While versions serve, the engine's own checksum of each of its tensors is taken (`ServedWeights`). Afterwards, with the
engine idle, the export of each of those versions is loaded into it from disk, and the checksums must be the same
(`compare`). The engine's names, its fused matrices and its hash stand on both sides: nothing of them is known here, and
a tensor that did not arrive, arrived half or in another place, is one that differs.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from node_check import Host

LOOK_EVERY_S, AGAIN_S = 1.0, 0.2
MOST_VERSIONS = 4
"""Of one method."""


class NoChecksums(Exception):
    """An engine that has none to give (the embedded one)."""


class CheckedEngine:
    """The calls of SGLang that this needs."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def held(self) -> int:
        """The version it says it holds; the base when it was told none."""
        said = self._client.get("/model_info").raise_for_status().json().get("weight_version")
        return int(said) if said not in (None, "default") else 0

    def checksums(self) -> dict[str, str]:
        """Of every tensor on every rank. Raises NoChecksums."""
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
    """Looks at an engine that serves, from a thread of its own: checksums of each version, taken once, when the server
    says that it serves, and twice the same: the hash stands in the way of the replies for a moment.

    serving: the version that the server says serves.
    """

    engine: CheckedEngine
    serving: Callable[[], int]
    taken: dict[int, dict[str, str]] = field(default_factory=dict)
    problem: str = "nothing was seen"
    """Why the last look took nothing."""
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
        if version in self.taken or self.serving() != version:  # or a push is on its way
            return
        found = self.engine.checksums()
        time.sleep(AGAIN_S)
        if self.engine.checksums() != found or self.engine.held() != version or self.serving() != version:
            return
        self.taken[version] = found

    def keep(self, file: Path, versions: Sequence[Mapping[str, Any]]) -> None:
        """With the folders of those that are on disk. `versions`: as `/v1/admin/status` lists them."""
        folders = {row["weight_version"]: row["folder"] for row in versions if row["durable"]}
        file.write_text(json.dumps({"folders": folders, "checksums": self.taken, "problem": self.problem}))


def differences(served: Mapping[str, str], loaded: Mapping[str, str]) -> list[str]:
    """Tensors that are not the same in both, or in one only."""
    return sorted(name for name in served.keys() | loaded.keys() if served.get(name) != loaded.get(name))


def compare(engine: CheckedEngine, kept: Mapping[str, Any], base: Path, data_dir: Path) -> dict[str, Any]:
    """One method's versions, the newest ones and the base. `moved`: tensors that are not those of the first version
    compared; where none moved, equality says little."""
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


def run(host: "Host", url: str) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    findings: list[str] = []
    with httpx.Client(base_url=url, timeout=60) as client:
        for file in sorted(host.work.glob("weights-*.json")):
            method = file.stem.removeprefix("weights-")
            figures[method] = compare(
                CheckedEngine(client), json.loads(file.read_text()), host.checkpoint, host.data_dir
            )
            findings += [f"{method}: {finding}" for finding in figures[method].pop("findings")]
    if not figures:
        findings.append("no part kept what its engine held")
    return figures | {"findings": findings}
