"""`scripts/house.py` on small texts and trees whose figures are known: what it counts, and that it can fail."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "house.py"


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script, looking at an empty tree in place of ours."""
    spec = importlib.util.spec_from_file_location("house_under_test", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # a dataclass looks for its module
    spec.loader.exec_module(module)
    core = tmp_path / "core"
    core.mkdir()
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "CORE", core)
    monkeypatch.setattr(module, "CODE", (core,))
    monkeypatch.setattr(module, "PAGES", tmp_path / "instructions")
    return module


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def figure(house: ModuleType, figures: list, name: str):
    (found,) = (one for one in figures if one.name.startswith(name))
    return found


def prose(house: ModuleType, *texts: str) -> list:
    return [house.Prose(Path("a.py"), number, text) for number, text in enumerate(texts, 1)]


def run(house: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["house.py", *arguments])
    return int(house.main())


def test_a_docstring_may_not_open_with_a_question_word(house: ModuleType) -> None:
    texts = prose(house, "Whether it is so.", "Return what it is.", "`what` opens a code span.", "How to do it.", "")
    found = figure(house, house.prose_figures(texts, []), "docstrings that open")
    assert (found.value, found.holds) == (2, False)
    assert found.places == ("a.py:1", "a.py:4")


def test_pronouns_are_counted_by_a_thousand_words_without_code_and_pythons_none(house: ModuleType) -> None:
    texts = prose(
        house, "Somebody tells nobody. " + "word " * 97, "Return None.", "Call `anyone`, or\n\n    nothing at all\n"
    )
    found = figure(house, house.prose_figures(texts, []), "indefinite")
    assert [place.split()[1] for place in found.places] == ["Somebody", "nobody"]
    assert found.value == pytest.approx(1000 * 2 / (100 + 2 + 3))
    assert not found.holds
    assert figure(house, house.prose_figures(prose(house, "Return None."), []), "indefinite").holds


def test_long_sentences_of_docstrings_and_of_pages_are_shares(house: ModuleType) -> None:
    long, short = "One " + "word " * 30 + "here.", "A short one. Another, with 3 words."
    figures = house.prose_figures(prose(house, f"{short} {long}"), prose(house, short))
    assert figure(house, figures, "docstring sentences").value == pytest.approx(100 / 3)
    assert figure(house, figures, "sentences of pages").value == 0
    assert house.sentences(f"First line\n\n{long}") == ["First line", " ".join(long.split())]


def test_a_pages_paragraphs_items_and_cells_are_prose_and_its_code_is_not(house: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading\n\nOne paragraph\nof two lines.\n- an item\n- another\n\n```sh\nwhat is code\n```\n"
        "| a | b |\n| --- | --- |\n"
    )
    found = [(one.line, one.text) for one in house.paragraphs(page)]
    assert found == [(3, "One paragraph of two lines."), (5, "- an item"), (6, "- another"), (11, "a"), (11, "b")]


def test_docstrings_are_those_of_modules_classes_functions_and_attributes(house: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        '"""Module."""\nX = 1\n"""Attribute."""\n\nclass A:\n    """Class."""\n    def f(self):\n        """F."""\n'
    )
    assert sorted(one.text for one in house.docstrings(file)) == ["Attribute.", "Class.", "F.", "Module."]


def test_folders_that_import_each_other_are_a_circle_also_through_a_third(house: ModuleType, tmp_path: Path) -> None:
    write(
        house.CORE,
        {
            "one/a.py": "from openclaw_rl.two import b\n",
            "two/b.py": "import openclaw_rl.three.c\n",
            "three/c.py": "from openclaw_rl import one\n",
            "four/d.py": "from openclaw_rl.one import a\nfrom openclaw_rl.four import d\n",
        },
    )
    assert house.folder_circles() == [("one", "three"), ("one", "two"), ("three", "two")]
    write(house.CORE, {"three/c.py": "import os\n"})
    assert house.folder_circles() == []


def test_parameters_files_and_entries_have_their_limits(house: ModuleType) -> None:
    names = ", ".join(f"a{n}" for n in range(8))
    write(
        house.CORE,
        {
            "a.py": f"class A:\n    def f(self, {names}): ...\n    def g(self, {names}, *, b): ...\n",
            "b.py": f"@app.command()\ndef command({names}, b): ...\n",
            "long.py": "\n" * 401,
            **{f"folder{n}/__init__.py": "" for n in range(28)},
        },
    )
    figures = house.shape_figures()
    assert figure(house, figures, "functions").places == ("core/a.py:3 g 9",)
    assert figure(house, figures, "files past").places == ("core/long.py 401",)
    entries = figure(house, figures, "entries")
    assert (entries.value, entries.holds) == (31, False)
    assert figure(house, figures, "modules").value == 3  # a package's short __init__ is none


@pytest.mark.parametrize("text", ["Whether it holds.", "Return it."])
def test_its_exit_code_says_whether_every_figure_holds(
    house: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    write(house.CORE, {"a.py": f'"""{text}"""\n'})
    fails = text.startswith("Whether")
    assert run(house, monkeypatch) == fails
    assert run(house, monkeypatch, "--prose", str(house.CORE)) == fails
    assert ("OVER docstrings that open" in capsys.readouterr().out) == fails
