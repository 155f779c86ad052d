"""One episode of BrowserGym. Runs in a process of `child`.

BrowserGym runs an action as code. Here an action is one call of a name below with literals, which BrowserGym's own
parser reads and writes again; `goto` and `upload_file` are not among the names.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

_SHOWN_CHARS, _LONGEST_ACTION = 12_000, 2000
_PAGES = "file:///pages/miniwob/"
_NAMES = ("click", "dblclick", "hover", "focus", "fill", "clear", "select_option", "press", "drag_and_drop", "scroll")


class _World:
    def __init__(self, page: str, seed: int, launcher: str) -> None:
        # BrowserGym starts its chat's browser where Playwright looks for its own, and takes no other path.
        os.environ["PLAYWRIGHT_BROWSERS_PATH"] = tempfile.mkdtemp(prefix="browsers-", dir=Path(launcher).parent)
        import browsergym.core
        from browsergym.core.action import functions
        from browsergym.core.action.highlevel import HighLevelActionSet
        from browsergym.core.env import BrowserEnv
        from browsergym.miniwob import ALL_MINIWOB_TASKS

        place = Path(browsergym.core._get_global_playwright().chromium.executable_path)
        place.parent.mkdir(parents=True)
        place.symlink_to(launcher)
        (task,) = (one for one in ALL_MINIWOB_TASKS if one.subdomain == page)
        known = [getattr(functions, name) for name in (*_NAMES, "noop")]
        self.actions = HighLevelActionSet("custom", custom_actions=known, multiaction=False, strict=True)
        mapping = self.actions.to_python_code
        self._env = BrowserEnv(
            task, {"base_url": _PAGES}, action_mapping=lambda text: mapping(text.strip()[:_LONGEST_ACTION])
        )
        self._seen, _ = self._env.reset(seed=seed)

    def act(self, action: str) -> dict[str, Any]:
        self._seen, reward, done, _, _ = self._env.step(action)
        return {"shown": self.shown(), "reward": float(reward), "done": bool(done)}

    def shown(self) -> str:
        from browsergym.utils.obs import flatten_axtree_to_str

        seen = self._seen
        text = flatten_axtree_to_str(seen["axtree_object"], extra_properties=seen["extra_element_properties"])
        if len(text) > _SHOWN_CHARS:
            text = f"{text[:_SHOWN_CHARS]}\n… (the page goes on)"
        wrong = seen["last_action_error"].strip().partition("\n")[0][:300]
        return (f"Error: {wrong}\n" if wrong else "") + f"Task: {seen['goal']}\n{text}"


_worlds: list[_World] = []


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """`{page, seed, launcher}` starts the episode, `{action}` acts in it. A `fault` is not the policy's."""
    try:
        if _worlds:
            return _worlds[0].act(str(asked["action"]))
        world = _World(str(asked["page"]), int(asked["seed"]), str(asked["launcher"]))
    except Exception as error:  # BrowserGym's own; a wrong action is told in its view
        return {"fault": f"{type(error).__name__}: {error}"[:500]}
    _worlds.append(world)
    about = world.actions.describe(with_long_description=False, with_examples=True)
    return {"shown": world.shown(), "reward": 0.0, "done": False, "actions": about}
