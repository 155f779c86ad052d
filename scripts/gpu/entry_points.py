"""Write package metadata for a checkout that is only on the path: `python entry_points.py CHECKOUT SITE_FOLDER`.

Methods are found by entry point, and a GPU host without internet has no build backend for an editable install.
"""

import sys
import tomllib
from pathlib import Path


def main() -> None:
    checkout, site = map(Path, sys.argv[1:3])
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
