"""The architecture page and the packages' READMEs name files that exist; the page names every entry of the core."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "instructions" / "architecture.md"
PACKAGES = {
    "openclaw_rl": ROOT / "openclaw-rl" / "openclaw_rl",
    "openclaw_opd": ROOT / "openclaw-opd" / "openclaw_opd",
    "openclaw_combine": ROOT / "openclaw-combine" / "openclaw_combine",
    "openclaw_slime": ROOT / "slime" / "openclaw_slime",
}
PATH = re.compile(r"[\w.-]+/[\w./-]*|\w+\.(?:py|toml)")


def spans(line: str) -> list[str]:
    return re.findall(r"`([^`]+)`", line)


def exists(path: str, line: str) -> bool:
    """A path begins at the repository, with a package, or inside a package that its line names (else the core)."""
    package, _, rest = path.partition("/")
    if package in PACKAGES:
        return (PACKAGES[package] / rest).exists()
    inside = [PACKAGES[name] for name in spans(line) if name in PACKAGES] or [PACKAGES["openclaw_rl"]]
    return any((place / path).exists() for place in (ROOT, *inside))


@pytest.mark.parametrize("line", PAGE.read_text().splitlines())
def test_the_paths_of_the_page_exist(line: str) -> None:
    for path in filter(PATH.fullmatch, spans(line)):
        assert exists(path, line), path


@pytest.mark.parametrize("folder", ["openclaw-rl", "openclaw-opd", "openclaw-combine", "slime"])
def test_the_files_that_a_package_names_exist(folder: str) -> None:
    """A README names files of its package without their folder, too."""
    text = re.sub(r"```.*?```", "", (ROOT / folder / "README.md").read_text(), flags=re.DOTALL)
    names = {path.name for package in PACKAGES.values() for path in package.rglob("*.py")}
    found = {span for span in spans(text) if re.fullmatch(r"\w+\.py", span)}
    assert found <= names, found - names


def test_the_page_names_every_entry_of_the_core() -> None:
    named = {span for line in PAGE.read_text().splitlines() for span in spans(line)}
    core = PACKAGES["openclaw_rl"]
    folders = {f"{entry.name}/" for entry in core.iterdir() if (entry / "__init__.py").is_file()}
    files = {entry.name for entry in core.glob("*.py")} - {"__init__.py"}
    assert folders | files <= named, folders | files - named


def test_the_page_fits_on_one_page() -> None:
    assert len(PAGE.read_text().splitlines()) <= 120
