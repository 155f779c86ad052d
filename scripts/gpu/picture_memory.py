"""Memory that chats with pictures cost a server: its peak beside its memory before, for noisy JPEGs of 3840 x 2160.

    python -m gpu.picture_memory [--pictures 8] [--chats 1] [--memory-mb 512] [--out FILE.json]

No card is needed. A real server runs over the stub engine, in processes of their own. `--chats` are sent at once, each
with pictures of its own. The pictures of a chat fill the largest body that the server takes (`server.max_body_mb`). The
peak is that of the kernel (`VmHWM`), set back before the chats.
"""

import argparse
import base64
import io
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy
from PIL import Image

from gpu.vision_model import vision_model
from openclaw_rl.testing.running_server import RunningServer, engine_flags, running_stub

SIDES = (3840, 2160)
BODY_BYTES = 15 * 2**20
"""Base64 of a chat's pictures: the body may have 16 MB."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=8, help="pictures of a chat")
    parser.add_argument("--chats", type=int, default=1, help="chats at once")
    parser.add_argument("--memory-mb", type=int, help="pictures.memory_mb; default: the setting's own")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    bodies = [chat(number, options.pictures) for number in range(options.chats)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = {"model.path": str(vision_model(folder / "model")), "pictures.enabled": "true"}
        settings |= {"judge.kind": "rules", "practice.enabled": "false", "model.context_length": "8192"}
        if options.memory_mb:
            settings["pictures.memory_mb"] = str(options.memory_mb)
        with running_stub(folder, "--mean-tokens", "4") as engine:
            with RunningServer(folder / "data", engine_flags(engine, settings)) as server:
                found = measured(server, bodies)
    text = json.dumps(found, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


def measured(server: RunningServer, bodies: list[bytes]) -> dict[str, object]:
    """Send the chats at once; return the server's memory before and at its peak."""
    assert server.process is not None
    process = Path("/proc") / str(server.process.pid)
    send(server, b'{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}')
    before = _kb(process, "VmRSS")
    (process / "clear_refs").write_text("5")
    began = time.monotonic()
    with ThreadPoolExecutor(len(bodies)) as threads:
        statuses = list(threads.map(lambda body: send(server, body), bodies))
    seconds = time.monotonic() - began
    time.sleep(1)
    return {
        "bodies, MB": [round(len(body) / 2**20, 1) for body in bodies],
        "statuses": {str(status): statuses.count(status) for status in sorted(set(statuses))},
        "seconds": round(seconds, 1),
        "memory before, MB": before // 1024,
        "peak, MB": _kb(process, "VmHWM") // 1024,
        "the chats took, MB": (_kb(process, "VmHWM") - before) // 1024,
        "memory after, MB": _kb(process, "VmRSS") // 1024,
    }


def send(server: RunningServer, body: bytes) -> int:
    headers = {"content-type": "application/json"}
    reply = httpx.post(f"{server.url}/v1/chat/completions", content=body, headers=headers, timeout=600, trust_env=False)
    if reply.status_code != 200:
        print(reply.status_code, reply.text[:300])
    return reply.status_code


def chat(number: int, pictures: int) -> bytes:
    """Return the body of a chat about so many noisy pictures."""
    most = BODY_BYTES // pictures * 3 // 4
    urls = [
        f"data:image/jpeg;base64,{base64.b64encode(noisy(number * 100 + n, most)).decode()}" for n in range(pictures)
    ]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return json.dumps({"messages": [{"role": "user", "content": parts}], "max_tokens": 4}).encode()


def noisy(seed: int, most: int) -> bytes:
    """Return a JPEG of noise, of at most so many bytes."""
    image = Image.fromarray(numpy.random.default_rng(seed).integers(0, 256, (*reversed(SIDES), 3), numpy.uint8))
    for quality in (90, 60, 40, 30, 20, 15, 10, 7, 5, 3, 1):
        out = io.BytesIO()
        image.save(out, "JPEG", quality=quality)
        if out.tell() <= most:
            return out.getvalue()
    raise ValueError(f"no quality makes the picture smaller than {most} bytes")


def _kb(process: Path, name: str) -> int:
    line = next(line for line in (process / "status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])


if __name__ == "__main__":
    main()
