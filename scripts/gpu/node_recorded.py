"""What the node recorded, kept for a comparison, and that comparison: the engine's log-probs of recorded turns against
plain passes under what Megatron exported as their version.
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx

from openclaw_rl.testing.running_server import RunningServer

if TYPE_CHECKING:
    from node_check import Host


def _turns(host: "Host", server: RunningServer, limit: int) -> Iterator[dict[str, Any]]:
    key = (host.data_dir / "keys" / "admin.key").read_text().strip()
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {key}"}, timeout=30) as client:
        for row in client.get(f"/v1/turns?limit={limit}").json()["turns"]:
            yield client.get(f"/v1/turns/{row['turn_id']}").json()


def keep_turns(host: "Host", server: RunningServer, method: str) -> None:
    """What was recorded, and where the versions lie that it was sampled from, for a later comparison."""
    folders = {row["weight_version"]: row["folder"] for row in server.status()["versions"]}
    rows = []
    for turn in _turns(host, server, 120):
        reply, runs = turn["turn"], turn["turn"]["versions"]
        if len(runs) == 1 and reply["response_ids"]:
            rows.append(
                {
                    "version": runs[0]["weight_version"],
                    "prompt_ids": turn["request"]["prompt_ids"],
                    "response_ids": reply["response_ids"],
                    "log_probs": reply["rollout_log_probs"],
                    "temperature": turn["request"]["sampling"]["temperature"],
                }
            )
    text = json.dumps({"folders": folders, "turns": rows})
    (host.work / f"turns-{method}.json").write_text(text)


def recorded(host: "Host") -> dict[str, Any]:
    """The engine's log-probs of recorded turns against plain passes under what Megatron exported as their version."""
    import models

    figures: dict[str, Any] = {}
    for file in sorted(host.work.glob("turns-*.json")):
        kept = json.loads(file.read_text())
        by_version: dict[int, list[models.Forced]] = {}
        for row in kept["turns"]:
            forced = models.Forced(row["prompt_ids"], row["response_ids"], row["log_probs"], row["temperature"])
            by_version.setdefault(row["version"], []).append(forced)
        for version, replies in sorted(by_version.items(), key=lambda pair: -len(pair[1])):
            name = kept["folders"].get(str(version))
            folder = host.data_dir / name if name else host.checkpoint if version == 0 else None
            if folder is None or not any(folder.glob("*.safetensors")) or len(figures) >= 6:
                continue
            label = f"{file.stem.removeprefix('turns-')}, version {version}, {len(replies)} turns"
            figures[label] = models.compare(replies[:24], folder, None, host.device)
    return figures | {"findings": models.too_far(figures) + ["nothing was compared"] * (not figures)}
