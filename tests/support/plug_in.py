"""A method that another package brings: one file and its metadata in a folder, as pip would leave them."""

from pathlib import Path


def install(folder: Path, name: str, source: str) -> None:
    """Write the package `name`, whose module holds `METHOD`, with the entry point that makes it `method.name`."""
    info = folder / f"{name}-0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{name}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[openclaw_rl.methods]\n{name} = {name}:METHOD\n")
