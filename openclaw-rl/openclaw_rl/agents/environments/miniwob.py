"""MiniWoB: small web pages with tasks in plain words, in real Chromium; the page says whether the task is done.

The policy reads the page as text, each element with a name such as `e7`, and answers with one action, which stands in
the last line of its reply. Needs miniwob and playwright (`scripts/agents/env.sh`) and Chromium; pages are files of the
package. ±1.
"""

import ast
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from playwright.async_api import Error, Page
from playwright.async_api import TimeoutError as TooLate

from openclaw_rl.agents.environment import Outcome, Split, Task
from openclaw_rl.agents.environments.browser import Browser
from openclaw_rl.agents.episode import Episode
from openclaw_rl.errors import EnvironmentFault

PAGES = (
    "ascending-numbers", "book-flight-nodelay", "buy-ticket", "choose-date-easy", "choose-date-nodelay", "choose-list",
    "click-button", "click-button-sequence", "click-checkboxes", "click-checkboxes-large", "click-checkboxes-soft",
    "click-checkboxes-transfer", "click-collapsible-2-nodelay", "click-collapsible-nodelay", "click-dialog",
    "click-dialog-2", "click-link", "click-option", "click-scroll-list", "click-tab", "click-tab-2",
    "click-tab-2-medium", "click-test", "click-test-2", "click-widget", "email-inbox", "email-inbox-delete",
    "email-inbox-forward", "email-inbox-forward-nl", "email-inbox-important", "email-inbox-nl-turk",
    "email-inbox-noscroll", "email-inbox-reply", "email-inbox-star-reply", "enter-date", "enter-password",
    "enter-text", "enter-text-2", "enter-text-dynamic", "enter-time", "find-word", "focus-text", "focus-text-2",
    "form-sequence-3", "guess-number", "login-user", "login-user-popup", "multi-layouts", "multi-orderings",
    "navigate-tree", "odd-or-even", "order-food", "phone-book", "read-table", "read-table-2", "search-engine",
    "sign-agreement", "simple-algebra", "simple-arithmetic", "social-media", "social-media-all", "social-media-some",
    "text-transform", "unicode-test", "use-autocomplete-nodelay", "use-spinner",
)  # fmt: skip
"""Pages that text alone can play: without drags, drawings and colours."""
_SYSTEM = (
    "You use a web page to do a task. Each message shows the page; elements have names such as e7. The last line of "
    "your answer is one action: click('e7'), type('e7', 'text'), select('e7', 'option'), press('e7', 'Enter') or "
    "wait()."
)
_START = """seed => {
  Math.seedrandom(seed);
  core.EPISODE_MAX_TIME = 2147483647;  // the runner's limits hold
  core.startEpisodeReal();
  for (const id of ["reward-display", "click-canvas", "sync-task-cover"]) {
    const element = document.getElementById(id);
    if (element) element.style.display = "none";
  }
}"""
_NOTE_LISTENERS = """(() => {
  const heard = new WeakSet(), add = EventTarget.prototype.addEventListener;
  EventTarget.prototype.addEventListener = function (type, ...rest) {
    if (["click", "mousedown", "mouseup"].includes(type)) heard.add(this);
    return add.call(this, type, ...rest);
  };
  // Links and tabs of some pages are spans, which the snapshot would show as text that cannot be clicked.
  window.nameClickable = () => {
    for (const element of document.querySelectorAll("span, div, td, li, p, a:not([href])")) {
      const hears = heard.has(element) || element.onclick || element.classList.contains("alink");
      if (hears && !element.firstElementChild && !element.role) {
        element.role = "button";
        if (!element.textContent.trim() && !element.ariaLabel) element.ariaLabel = element.className;  // an icon
      }
    }
  };
})()"""
_IS_DONE, _REWARD = "WOB_DONE_GLOBAL", "WOB_DONE_GLOBAL ? WOB_RAW_REWARD_GLOBAL : 0"
_ARGUMENTS = {"click": 1, "type": 2, "select": 2, "press": 2, "wait": 0}
_ELEMENT = re.compile(r"(f\d+)?e\d+")
"""A name in the snapshot. Anything longer is a selector of Playwright's, which reaches what the page does not show."""
_WAIT_MS, _SETTLE_MS = 1000, 150
_SHOWN_CHARS, _LONGEST_ACTION = 6000, 2000
FIRST_EVAL_SEED = 1_000_000


@dataclass(frozen=True, slots=True)
class Action:
    """One action of the policy."""

    name: str
    arguments: tuple[str, ...]


def page_tasks(prefix: str, pages: Sequence[str], split: Split, count: int, seed: int) -> list[Task]:
    """Return `count` tasks, over all pages evenly and in a random order; their ids are prefix, page and seed.

    The seeds of eval tasks are none of train tasks.
    """
    first = seed if split == "train" else FIRST_EVAL_SEED + seed
    drawn = [(pages[n % len(pages)], first + n // len(pages)) for n in range(count)]
    random.Random(f"{seed}:{split}:{prefix.partition('/')[0]}").shuffle(drawn)
    return [Task(f"{prefix}{page}/{own}", page, {"page": page, "seed": own}) for page, own in drawn]


class MiniWob:
    """Tasks of many pages; a seed makes a task of a page."""

    needs_sandbox = True

    def __init__(
        self,
        pages: Sequence[str] = PAGES,
        train_tasks: int = 2048,
        eval_tasks: int = 200,
        seed: int = 0,
        folder: str = "",
        program: str = "",
        action_s: float = 5.0,
    ) -> None:
        """pages: names of MiniWoB's pages. folder: with `miniwob/PAGE.html`; the package's by default. program: a
        Chromium; the machine's by default. action_s: time of an action, such as a click on a hidden element."""
        where = pages_folder(pages, folder)
        self._page_names, self._seed, self._action_ms = list(pages), seed, 1000 * action_s
        self._counts: dict[str, int] = {"train": train_tasks, "eval": eval_tasks}
        self._browser = Browser(where, width=500, height=320, program=program)

    def tasks(self, split: Split) -> Sequence[Task]:
        return page_tasks("miniwob/", self._page_names, split, self._counts[split], self._seed)

    async def run(self, task: Task, episode: Episode) -> Outcome:
        messages: list[dict[str, object]] = [{"role": "system", "content": _SYSTEM}]
        reward = 0.0
        async with self._browser.page(await episode.open_sandboxes()) as page:
            await page.add_init_script(_NOTE_LISTENERS)
            await page.goto(f"file:///pages/miniwob/{task.data['page']}.html")
            await page.evaluate(_START, task.data["seed"])
            said = ""
            async with episode.acting():
                while not await page.evaluate(_IS_DONE):
                    messages.append({"role": "user", "content": said + await _shown(page)})
                    reply = await episode.ask(messages)
                    messages.append({"role": "assistant", "content": reply.text})
                    said = await _act(page, reply.text, self._action_ms)
            reward = float(await page.evaluate(_REWARD))
        return Outcome(1.0 if reward >= 1 else -1.0, {"steps": float(episode.steps), "raw_reward": reward})

    async def close(self) -> None:
        await self._browser.close()


def pages_folder(pages: Sequence[str], folder: str) -> Path:
    """Return the folder that holds `miniwob/PAGE.html` of each page: this one, or the package's. Raises ValueError."""
    where = Path(folder).expanduser() if folder else _package() / "html"
    for page in pages:
        if not (where / "miniwob" / f"{page}.html").is_file():
            raise ValueError(f"pages: there is no {where / 'miniwob' / f'{page}.html'}")
    return where


def _package() -> Path:
    # Found and not imported: its import needs selenium and gymnasium.
    spec = find_spec("miniwob")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("the package miniwob is not installed: scripts/agents/env.sh tools makes its interpreter")
    return Path(spec.submodule_search_locations[0])


def action_of(reply: str) -> Action | None:
    """Return the action of a reply's last line, or None. The line is parsed and never evaluated."""
    lines = [line.strip().strip("`").strip() for line in reply.splitlines()]
    last = next((line for line in reversed(lines) if line), "")
    try:
        node = ast.parse(last[:_LONGEST_ACTION], mode="eval").body
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.keywords:
            return None
        arguments = tuple(str(ast.literal_eval(one)) for one in node.args)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return Action(node.func.id, arguments) if _ARGUMENTS.get(node.func.id) == len(arguments) else None


async def _shown(page: Page) -> str:
    await page.evaluate("nameClickable()")
    task = str(await page.evaluate("document.getElementById('query').innerText")).strip()
    snapshot = await page.locator("body").aria_snapshot(mode="ai")
    lines = [line for line in snapshot.splitlines() if not line.lstrip().startswith("- /url:")]
    text = "\n".join(lines)
    if len(text) > _SHOWN_CHARS:
        text = f"{text[:_SHOWN_CHARS]}\n… (the page goes on)"
    return f"Task: {task}\n{text}"


async def _act(page: Page, reply: str, most_ms: float) -> str:
    """Play the action of a reply; return what was wrong with it, for the next message."""
    action = action_of(reply)
    if action is None:
        return "Error: the last line is no action.\n"
    try:
        if action.name == "wait":
            await page.wait_for_timeout(_WAIT_MS)
            return ""
        if _ELEMENT.fullmatch(action.arguments[0]) is None:
            return "Error: the first argument is no element of the page.\n"
        element = page.locator(f"aria-ref={action.arguments[0]}")
        match action.name:
            case "click":
                await element.click(timeout=most_ms)
            case "type":
                await element.fill(action.arguments[1], timeout=most_ms)
                # Some pages listen for keys and not for a changed value.
                await element.press("End", timeout=most_ms)
            case "select":
                await element.select_option(label=action.arguments[1], timeout=most_ms)
            case _:
                await element.press(action.arguments[1], timeout=most_ms)
        await page.wait_for_timeout(_SETTLE_MS)
    except TooLate:
        return f"Error: {action.arguments[0]} cannot be used so.\n"
    except Error as error:
        if page.is_closed():
            raise EnvironmentFault(f"the browser failed: {error}") from error
        return f"Error: {str(error).strip().partition(chr(10))[0][:200]}\n"
    return ""
