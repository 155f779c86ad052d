"""A stand-in with the names of the package browsergym, for machines without it, and one page of MiniWoB's form.

Its browsers are real: one for the task and one for the chat, started where Playwright looks for its own, as the
package does. The package itself is played by `scripts/e2e/real_tools.py`.
"""

import textwrap
from pathlib import Path

from openclaw_rl.agents.environments import browser_gym

PACKAGE = {
    "core/__init__.py": """
        from playwright.sync_api import sync_playwright
        _playwright = None
        def _get_global_playwright():
            global _playwright
            _playwright = _playwright or sync_playwright().start()
            return _playwright
    """,
    "core/env.py": """
        from browsergym.core import _get_global_playwright
        class BrowserEnv:
            def __init__(self, task_entrypoint, task_kwargs, action_mapping):
                self._entry, self._given, self._mapping = task_entrypoint, task_kwargs, action_mapping
                self._error = ""
            def reset(self, seed):
                chromium = _get_global_playwright().chromium
                self._task_browser, self._chat_browser = (
                    chromium.launch(executable_path=chromium.executable_path) for _ in range(2)
                )
                self.page = self._task_browser.new_page()
                self._task = self._entry(seed=seed, **self._given)
                self._goal = self._task.setup(self.page)
                return self._seen(), {}
            def step(self, action):
                self._error = ""
                try:
                    exec(self._mapping(action), {"page": self.page})
                except Exception as error:
                    self._error = f"{type(error).__name__}: {error}"
                return self._seen(), *self._task.validate(self.page), False, {}
            def _seen(self):
                tree = self.page.locator("body").aria_snapshot()
                return {"axtree_object": tree, "extra_element_properties": {}, "goal": self._goal,
                        "last_action_error": self._error}
    """,
    "core/action/__init__.py": "",
    "core/action/functions.py": """
        def _named(name):
            def made(): pass
            made.__name__ = name
            return made
        for name in ("click", "dblclick", "hover", "focus", "fill", "clear", "select_option", "press",
                     "drag_and_drop", "scroll", "noop", "goto", "upload_file"):
            globals()[name] = _named(name)
    """,
    "core/action/highlevel.py": """
        import ast
        CODE = {"click": "page.locator('#{}').click()", "noop": "page.wait_for_timeout(1)"}
        class HighLevelActionSet:
            def __init__(self, subsets, custom_actions, multiaction, strict):
                assert (subsets, multiaction, strict) == ("custom", False, True)
                self.names = [one.__name__ for one in custom_actions]
            def describe(self, with_long_description, with_examples):
                return ", ".join(self.names)
            def to_python_code(self, action):
                call = ast.parse(action, mode="eval").body
                if call.func.id not in self.names:
                    raise NameError(f"Invalid action type '{call.func.id}'.")
                return CODE[call.func.id].format(*map(ast.literal_eval, call.args))
    """,
    "miniwob.py": """
        class Form:
            subdomain = "form"
            def __init__(self, seed, base_url):
                self._seed, self._url = seed, f"{base_url}form.html"
            def setup(self, page):
                page.goto(self._url)
                return page.evaluate("seed => start(seed)", self._seed)
            def validate(self, page):
                return tuple(page.evaluate("[window.reward ?? 0, window.reward !== undefined]"))
        class Broken(Form):
            subdomain = "broken"
            def setup(self, page):
                raise RuntimeError("no such task")
        ALL_MINIWOB_TASKS = [Form, Broken]
    """,
    "utils/__init__.py": "",
    "utils/obs.py": "def flatten_axtree_to_str(tree, extra_properties):\n    return tree\n",
}
FORM = """<!doctype html>
<button id="yes" onclick="reward = 1">Yes</button><button id="no" onclick="reward = 0">No</button>
<script>function start(seed) { return `Press Yes, number ${seed}.`; }</script>"""


def pages(folder: Path) -> Path:
    """Write the pages; return their folder."""
    for name in ("form", "broken"):
        (folder / "miniwob").mkdir(parents=True, exist_ok=True)
        (folder / "miniwob" / f"{name}.html").write_text(FORM)
    return folder


def world(folder: Path) -> Path:
    """Write the package; return a program that is `browser_gym_world` over it."""
    for name, text in {"__init__.py": "", **PACKAGE}.items():
        file = folder / "site" / "browsergym" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    program = folder / "world.py"
    program.write_text(
        f"import runpy, sys\nsys.path.insert(0, {str(folder / 'site')!r})\n"
        f"answer = runpy.run_path({str(browser_gym._WORLD)!r})['answer']\n"
    )
    return program
