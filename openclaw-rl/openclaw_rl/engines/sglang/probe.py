"""Probe of SGLang's environment: print its contents as one line of JSON. Its interpreter runs this file by path:

    PYTHON -I probe.py

Standard library only. It does not import SGLang: that takes 20 s and a GPU.
"""

import importlib.metadata
import importlib.util
import json
import re
from pathlib import Path


def _folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def main() -> None:
    sglang, kernels = _folder("sglang"), _folder("sgl_kernel")
    options: list[str] = []
    if sglang is not None:
        source = (sglang / "srt" / "server_args.py").read_text()
        options = sorted(set(re.findall(r"^    ([a-z]\w*)\s*:", source, re.MULTILINE)))
    print(  # noqa: T201
        json.dumps(
            {
                "version": importlib.metadata.version("sglang") if sglang is not None else None,
                "options": options,
                "has_flash_attention": kernels is not None and any(kernels.glob("**/flash_ops*.so")),
                "has_flashinfer": _folder("flashinfer") is not None,
            }
        )
    )


if __name__ == "__main__":
    main()
