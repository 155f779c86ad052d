"""Command line of the embedded engine: `python -m openclaw_rl.engines.embedded` serves one model in the dialect."""

import argparse
import asyncio
import os
import sys
from pathlib import Path

from pydantic import ValidationError

from openclaw_rl.engines.embedded.config import EngineConfig
from openclaw_rl.errors import SettingsError
from openclaw_rl.log import configure as configure_log
from openclaw_rl.settings import EngineSettings, ModelSettings

HELP = """\
Serve a causal language model over HTTP in SGLang's native dialect: token ids in, token ids and log-probs out.

The server starts this process by itself. Start it yourself to try the engine alone, or to share one engine between
servers:

  python -m openclaw_rl.engines.embedded --port 30001
  curl -s 127.0.0.1:30001/generate -H 'Content-Type: application/json' \\
       -d '{"input_ids": [1, 4093, 198], "sampling_params": {"max_new_tokens": 8}, "return_logprob": true}'

SIGTERM finishes the running replies, then exits. A second SIGTERM exits at once.
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m openclaw_rl.engines.embedded",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", type=Path, help="JSON file with all values below and more; the other flags are then ignored"
    )
    parser.add_argument(
        "--model", default="bundled", help="`bundled`, a folder, a .gguf file or a Hugging Face name (default: bundled)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one (default)")
    parser.add_argument("--port-file", type=Path, help='file that gets {"url", "pid"} once the engine can serve')
    parser.add_argument("--device", default="cpu", help="`cpu` or `cuda` (default: cpu)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: all cores)")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path("~/.openclaw-rl/cache"),
        help="converted models (default: ~/.openclaw-rl/cache)",
    )
    arguments = parser.parse_args(argv)
    try:
        if arguments.config:
            config = EngineConfig.model_validate_json(arguments.config.read_bytes())
        else:
            config = EngineConfig(
                model=ModelSettings(path=arguments.model),
                engine=EngineSettings(device=arguments.device, threads=arguments.threads),
                host=arguments.host,
                port=arguments.port,
                cache_dir=arguments.cache.expanduser(),
                port_file=arguments.port_file,
            )
        configure_log(config.log_level, process="engine")
        _run(config)
    except (SettingsError, OSError, ValidationError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _run(config: EngineConfig) -> None:
    # A step has hundreds of short parallel sections. By default OpenMP threads spin so long between them that they
    # starve each other, and the other processes, as soon as one of those wants a core; a short spin is as fast on a
    # quiet machine. GNU's runtime reads this when torch loads it.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    # oneDNN keeps a compiled kernel for every number of rows it has met, 1,024 by default: prompts come in all lengths,
    # so memory would grow for days. This many hold what decoding uses; compiling one anew takes about a millisecond.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "128")  # torch's own, in front of it
    from openclaw_rl.engines.embedded.process import serve

    asyncio.run(serve(config))


if __name__ == "__main__":
    sys.exit(main())
