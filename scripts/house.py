"""Prints the figures of the house: its shape, its prose. Exits with 1 when a figure is past its limit.

    scripts/house.py                 every figure of the tree, beside its limit
    scripts/house.py --prose PATH …  prose figures of some files or folders, and the places to mend

Shape comes from the syntax trees of the packages, folder arrows from their imports. Prose is counted in docstrings of
Python files and in the paragraphs, list items and table cells of Markdown files.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "openclaw-rl" / "openclaw_rl"
PRODUCT = (CORE, ROOT / "openclaw-opd", ROOT / "openclaw-combine", ROOT / "slime")
CODE = (*PRODUCT, ROOT / "scripts")
PAGES = ROOT / "instructions"
BROWSER = CORE / "server" / "page"
"""Files that the browser runs."""

QUESTION_WORDS = frozenset(["what", "which", "who", "whose", "whom", "whether", "when", "where", "why", "how"])
PRONOUNS = frozenset(
    f"{first}{last}" for first in ("some", "any", "no", "every") for last in ("body", "one", "thing")
) | {"none", "whoever", "whatever", "whichever", "whomever"} - {"noone"}
LONG_SENTENCE = 30
MAX_LINES, MAX_PARAMETERS = 400, 8


@dataclass(frozen=True, slots=True)
class Prose:
    """One text and its place: a docstring, a paragraph, a list item."""

    path: Path
    line: int
    text: str

    @property
    def place(self) -> str:
        path = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{path}:{self.line}"


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value, its limit, and the places that count against it."""

    name: str
    value: float
    limit: float | None
    places: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return self.limit is None or self.value <= self.limit


def python_files(roots: Iterable[Path]) -> list[Path]:
    """Return the Python files below the roots; a root may be a file."""
    found = [path for root in roots for path in ([root] if root.is_file() else sorted(root.rglob("*.py")))]
    return [path for path in found if path.suffix == ".py" and "stand_ins" not in path.parts]


def docstrings(path: Path) -> Iterator[Prose]:
    """Yield each docstring: of modules, classes and functions, and the strings below attributes."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda | ast.IfExp):
            continue
        for statement in getattr(node, "body", []):
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield Prose(path, statement.lineno, text)


def paragraphs(path: Path) -> Iterator[Prose]:
    """Yield the prose of a Markdown page: paragraphs, list items and table cells, without code and headings."""
    in_code, kept, first = False, [], 0
    for number, line in enumerate([*path.read_text(encoding="utf-8").splitlines(), ""], 1):
        stripped = line.strip()
        if stripped.startswith("```"):
            in_code, stripped = not in_code, ""
        is_item = bool(re.match(r"([-*+]|\d+\.)\s", stripped))
        if kept and (in_code or not stripped or is_item or stripped[0] in "|#"):
            yield Prose(path, first, " ".join(kept))
            kept = []
        if in_code or not stripped or stripped.startswith(("#", "<!--")):
            continue
        if stripped.startswith("|"):
            for cell in stripped.strip("|").split("|"):
                if cell.strip(" -:"):
                    yield Prose(path, number, cell.strip())
        else:
            first = first if kept else number
            kept.append(stripped)


def plain(text: str) -> str:
    """Return the text without literal blocks; a code span counts as one word."""
    text = re.sub(r"``?[^`]+``?", "X", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    blocks = re.split(r"\n\s*\n", text)
    return "\n\n".join(block for block in blocks if not all(line.startswith("    ") for line in block.splitlines()))


def sentences(text: str) -> list[str]:
    """Split prose into sentences; a blank line ends one too."""
    found = []
    for block in re.split(r"\n\s*\n", plain(text)):
        joined = " ".join(block.split())
        found += [s for s in re.split(r"(?<=[.!?])\s+(?=[\"'(`*A-Z0-9X])", joined) if re.search(r"[A-Za-z]", s)]
    return found


def words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z][A-Za-z'’-]*", text)


def opens_with_question(prose: Prose) -> bool:
    """Return True if the first word is a question word."""
    found = words(plain(prose.text))
    return bool(found) and found[0].lower() in QUESTION_WORDS


def prose_figures(doc: list[Prose], pages: list[Prose]) -> list[Figure]:
    """Return the figures of docstrings and pages, each with the places that count against it."""
    questions = tuple(p.place for p in doc if opens_with_question(p))
    total = sum(len(words(plain(p.text))) for p in doc)
    pronouns = tuple(f"{p.place} {w}" for p in doc for w in words(plain(p.text)) if is_indefinite(w))
    long_doc = tuple(f"{p.place} {len(words(s))} words" for p in doc for s in sentences(p.text) if is_long(s))
    all_doc = sum(len(sentences(p.text)) for p in doc)
    long_page = tuple(f"{p.place} {len(words(s))} words" for p in pages for s in sentences(p.text) if is_long(s))
    all_page = sum(len(sentences(p.text)) for p in pages)
    return [
        Figure("docstrings that open with a question word", len(questions), 0, questions),
        Figure("indefinite pronouns per 1,000 words of docstrings", per(pronouns, total, 1000), 3, pronouns),
        Figure(f"docstring sentences over {LONG_SENTENCE} words, %", per(long_doc, all_doc, 100), 5, long_doc),
        Figure(f"sentences of pages over {LONG_SENTENCE} words, %", per(long_page, all_page, 100), 5, long_page),
    ]


def is_indefinite(word: str) -> bool:
    """Return True for an indefinite pronoun; `None` is Python's."""
    return word.lower() in PRONOUNS and word != "None"


def is_long(sentence: str) -> bool:
    return len(words(sentence)) > LONG_SENTENCE


def per(places: tuple[str, ...], total: int, scale: int) -> float:
    return scale * len(places) / total if total else 0.0


def shape_figures() -> list[Figure]:
    """Return the figures of the code's shape: entries, modules, file sizes, long parameter lists, folder circles."""
    top = [p for p in CORE.iterdir() if p.name != "__pycache__" and (p.suffix == ".py" or p.is_dir())]
    core = [
        p for p in python_files([CORE]) if p.name != "__init__.py" or p.read_text(encoding="utf-8").count("\n") > 10
    ]
    code = python_files(CODE)
    page = [p for ending in ("js", "css", "html") for p in sorted(BROWSER.glob(f"*.{ending}"))]
    long_files = tuple(
        f"{p.relative_to(ROOT)} {n}"
        for p in (*code, *page)
        if (n := len(p.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    )
    wide = tuple(place for p in code for place in wide_functions(p))
    circles = tuple(" ⇄ ".join(pair) for pair in folder_circles())
    return [
        Figure("entries at the top of the core", len(top), 30),
        # 180 before practice, wishes and experiments came. A new part of the product adds what it brings.
        # 239 before episodes and their credit (11), the runner of agents and its sandbox (25), prompt skeletons (1),
        # the answers of scoring passes (1), the keys of users, their command, quotas and figures (5), tool-call and GUI
        # agents (12), harnesses inside the sandbox (1), policies with their settings, the choice of a
        # batch, adapters on demand (5), variants of corrected prompts (1), the routes that steer one policy (1),
        # BrowserGym and its side in a process (2), a pool of engines (4), its drains, the processes of engines (2),
        # pictures of prompts (6), headers of their files (1), a judge that sees (1), several policy engines on the node
        # (2).
        Figure("modules of the core", len(core), 321),
        Figure(f"files past {MAX_LINES} lines", len(long_files), 0, long_files),
        Figure(f"functions with more than {MAX_PARAMETERS} parameters, but typer's", len(wide), 0, wide),
        Figure("folder circles in the core", len(circles), 0, circles),
    ]


def wide_functions(path: Path) -> Iterator[str]:
    """Yield the functions with too many parameters; `self`, `cls` and typer commands do not count."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len([name for name in names if name not in ("self", "cls")])
        is_command = any(".command" in ast.unparse(decorator) for decorator in node.decorator_list)
        if count > MAX_PARAMETERS and not is_command:
            yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name} {count}"


def folder_circles() -> list[tuple[str, str]]:
    """Return the pairs of top-level entries of the core that import each other, directly or through others."""
    arrows: dict[str, set[str]] = {}
    for path in python_files([CORE]):
        here = path.relative_to(CORE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                if name.startswith("openclaw_rl.") and (there := name.split(".")[1]) not in (here, "__version__"):
                    arrows.setdefault(here, set()).add(there)
    reach = {start: reachable(start, arrows) for start in arrows}
    return sorted((a, b) for a in reach for b in reach[a] if a < b and a in reach.get(b, ()))


def reachable(start: str, arrows: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    todo = [start]
    while todo:
        new = arrows.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return found


def show(figures: list[Figure], *, with_places: bool) -> None:
    for figure in figures:
        mark = "ok  " if figure.holds else "OVER"
        limit = "" if figure.limit is None else f" (limit {figure.limit:g})"
        print(f"{mark} {figure.name}: {figure.value:.3g}{limit}")
        if with_places or not figure.holds:
            for place in figure.places[: None if with_places else 20]:
                print(f"       {place}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prose", nargs="+", type=Path, metavar="PATH", help="prose figures of these alone")
    asked = parser.parse_args()
    if asked.prose:
        paths = [path.resolve() for path in asked.prose]
        md = [m for p in paths for m in ([p] if p.suffix == ".md" else sorted(p.rglob("*.md")) if p.is_dir() else [])]
        doc = [prose for path in python_files(paths) for prose in docstrings(path)]
        figures = prose_figures(doc, [prose for path in md for prose in paragraphs(path)])
    else:
        doc = [prose for path in python_files(CODE) for prose in docstrings(path)]
        pages = [prose for path in sorted(PAGES.rglob("*.md")) for prose in paragraphs(path)]
        figures = [*shape_figures(), *prose_figures(doc, pages)]
    show(figures, with_places=bool(asked.prose))
    return 0 if all(figure.holds for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
