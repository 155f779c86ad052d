"""A new user's first hour, in a browser: chat, four corrections in words, and the wish that is learned of them.

    scripts/e2e.sh first_hour FOLDER                    in this environment
    scripts/e2e.sh first_hour FOLDER --clone            from a clean clone, as the quick start says
    … --corrections 1 --minutes 2                       a rehearsal

The script starts the server with its defaults and OPD, and does the rest by clicks and keys in headless Chromium: it
asks, corrects, goes away, and looks at every view. It writes the times, the learned share, the words of replies by
version 0 and the last one, and what the browser complained about, and screenshots in both colour schemes. It needs
Playwright, Chromium and quiet cores: practice waits for nothing, but shares them with everything else.
"""

import argparse
import io
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Locator, Page, expect

from benchmarks.browser import PATIENCE_MS, chromium, go, opened
from openclaw_rl.testing.running_server import RunningServer
from openclaw_rl.types.wishes import HOLD_BACK_FROM

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = (
    "How do I boil an egg?",
    "How do I keep bread fresh?",
    "How do I remove a coffee stain from a shirt?",
    "How do I fall asleep on a hot night?",
)
CORRECTION = "No, that is far too long. Please answer in one or two short sentences."
"""The same words each time: other words would be another wish."""
NEW = (
    "How do I make pancakes?",
    "How do I clean a muddy pair of boots?",
    "How do I keep cut flowers fresh?",
    "How do I sew on a button?",
)
LOOK_S, COLOURS = 5.0, 256
REPLY_MS = 4 * PATIENCE_MS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--clone", action="store_true", help="clone this repository, and install as its scripts do")
    parser.add_argument("--corrections", type=int, default=len(QUESTIONS))
    parser.add_argument("--minutes", type=float, default=12.0, help="longest time to practise")
    options = parser.parse_args()
    folder = options.folder.absolute() / f"hour-{int(time.time())}"
    shots = folder / "shots"
    shots.mkdir(parents=True)
    hour = Hour(shots)
    launch = [sys.executable, "-m", "openclaw_rl", "serve"]
    if options.clone:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / "clone")], check=True)
        hour.note("the repository is cloned")
        launch = [str(folder / "clone" / "scripts" / "serve.sh")]
    with (
        RunningServer(folder / "data", ["--method", "opd"], start_s=3600, launch=launch) as server,
        chromium() as browser,
    ):
        hour.note("the server is ready")
        is_learned = live(hour, server, browser, options.corrections, 60 * options.minutes)
    for complaint in hour.complaints:
        print(f"the browser: {complaint}")
    print(f"{'ok  ' if is_learned else 'FAIL'} the wish is learned as far as it goes, and the page says so")
    print(f"{'FAIL' if hour.complaints else 'ok  '} the browser complained about nothing")
    return 0 if is_learned and not hour.complaints else 1


@dataclass
class Hour:
    """Times since the start, and what the browser complained about."""

    shots: Path
    complaints: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def note(self, what: str) -> None:
        passed = time.monotonic() - self.started
        print(f"{int(passed // 60):3d}:{int(passed % 60):02d}  {what}", flush=True)

    def shoot(self, page: Page, name: str) -> None:
        """Keep a screenshot with a palette: the page has few colours."""
        image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        few = image.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)  # small dots keep theirs
        few.save(self.shots / f"{name}.png", optimize=True)

    @contextmanager
    def watched(self, page: Page) -> Iterator[Page]:
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda told: self.complaints.append(told.text) if told.type == "error" else None)
        yield page
        page.context.close()


def live(hour: Hour, server: RunningServer, browser: Browser, corrections: int, longest_s: float) -> bool:
    """Spend the hour; return True if the page shows a wish that is learned as far as it goes."""
    with hour.watched(opened(browser, server)) as page:
        hour.note("the page is open")
        chats: list[tuple[int, str]] = []
        before = [words(hour, page, question) for question in NEW]  # nobody answers these: they are not learned from
        for question in QUESTIONS[:corrections]:
            said = ask(page, question, is_new=True)
            hour.note(f"{question} → {len(said.split())} words")
            ask(page, CORRECTION)
            chats.append((len(said.split()), page.evaluate("location.hash")))
            expect(replies(page).first.locator(".way")).to_contain_text("judged bad", timeout=REPLY_MS)
            hour.note(f"corrected: {CORRECTION}")
        # The shortest of those that are practised: the picture has the reply, its way and the correction.
        _, chat = min(chats[: HOLD_BACK_FROM - 1])
        seen(page, chat, "wish")
        hour.shoot(page, "chat-light")
        is_learned = practised(hour, page, longest_s)
        hour.shoot(page, "wishes-light")
        after = [words(hour, page, question) for question in NEW]
        hour.note(
            f"words of a new reply, median: {statistics.median(before):g} before, {statistics.median(after):g} after"
        )
        seen(page, chat, "practised in version")
        hour.shoot(page, "chat-learned-light")
        compared(page)
        hour.shoot(page, "compare-light")
        everywhere(hour, page, "light")
        kept = page.evaluate("({...localStorage})")
    with hour.watched(opened(browser, server, is_dark=True)) as page:
        page.evaluate(
            "kept => Object.entries(kept).forEach(([name, value]) => localStorage.setItem(name, value))", kept
        )
        seen(page, chat, "practised in version")
        hour.shoot(page, "chat-dark")
        everywhere(hour, page, "dark")
    hour.note("every view was looked at, in both colour schemes")
    return is_learned


def seen(page: Page, chat: str, way: str) -> None:
    """Open a corrected chat once the way of its first reply has these words, with the correction in view."""
    go(page, chat)
    expect(replies(page).first.locator(".way")).to_contain_text(way, timeout=REPLY_MS)
    page.locator(".thread").evaluate("thread => { thread.scrollTop = 0; }")
    page.get_by_role("article", name="You").nth(1).evaluate("said => said.scrollIntoView({ block: 'nearest' })")


def words(hour: Hour, page: Page, question: str) -> int:
    """Return the length of the reply to a question in a chat of its own."""
    said = ask(page, question, is_new=True)
    hour.note(f"{question} → {' '.join(said.split())[:160]!r} ({len(said.split())} words)")
    return len(said.split())


def ask(page: Page, text: str, *, is_new: bool = False) -> str:
    """Send a message as a person does; return the whole reply."""
    if is_new:
        go(page, "#/chat/new")
    had = 0 if is_new else replies(page).count()
    page.get_by_role("textbox", name="Message").fill(text)
    page.keyboard.press("Enter")
    expect(replies(page)).to_have_count(had + 1, timeout=REPLY_MS)
    last = replies(page).last
    expect(last.get_by_role("button", name=re.compile("Good reply"))).to_be_visible(timeout=REPLY_MS)
    return last.locator(".text").inner_text()


def replies(page: Page) -> Locator:
    return page.get_by_role("article", name="Reply")


def practised(hour: Hour, page: Page, longest_s: float) -> bool:
    """Watch the wishes until each rests or the time is over; return True if each was practised and learned in part."""
    go(page, "#/wishes")
    started, shown = time.monotonic(), ""
    while True:
        page.locator(".card").first.wait_for()
        cards = [
            " · ".join(line.strip() for line in text.splitlines() if re.search("learned|practised|waits", line))
            for text in page.locator(".card").all_inner_texts()
        ]
        told = " | ".join(cards)
        if told != shown:
            hour.note(told)
            shown = told
        if all("rests" in card for card in cards) or time.monotonic() - started > longest_s:
            return all(re.search(r"learned [1-9]", card) and "practised" in card for card in cards)
        time.sleep(LOOK_S)


def compared(page: Page) -> None:
    """Put one prompt to the base and to the version that serves."""
    go(page, "#/versions")
    page.get_by_label("Left version").select_option("0")
    page.get_by_role("textbox", name="Prompt").fill(NEW[0])
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".side .text")).to_have_count(2, timeout=REPLY_MS)
    page.locator(".compare").scroll_into_view_if_needed()


def everywhere(hour: Hour, page: Page, scheme: str) -> None:
    """Look at the other views."""
    for view, ready in (
        ("versions", "table tr >> nth=1"),
        ("curves", ".charts svg >> nth=0"),
        ("state", "main h2 >> nth=0"),
    ):
        go(page, f"#/{view}")
        page.wait_for_selector(ready)
        page.locator("main").evaluate("main => { main.scrollTop = 0; }")
        time.sleep(1)
        hour.shoot(page, f"{view}-{scheme}")
    go(page, "#/turns?verdict=-1")
    page.locator(".item").first.wait_for()
    hour.shoot(page, f"turns-{scheme}")
    page.locator(".item").last.click()
    page.get_by_role("heading", name="Its way").wait_for()
    page.get_by_role("heading", name="Credit per token").wait_for()
    page.get_by_role("heading", name="Credit per token").scroll_into_view_if_needed()
    hour.shoot(page, f"turn-{scheme}")


if __name__ == "__main__":
    sys.exit(main())
