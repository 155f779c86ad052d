"""Every view holds to the same rules: the keyboard alone, both colour schemes, a phone's width, the chats of a key."""

import re
from pathlib import Path

import pytest
from browsing import visiting
from playwright.sync_api import Page, expect

VIEWS = {
    "chat": "Talk to it",
    "wishes": "Wishes",
    "turns": "Turns",
    "versions": "Side by side",
    "curves": "Time to the first token",
    "state": "Queues",
}
ANN, BOB = "sk-ann-5up3r", "sk-bob-5up3r"

CONTRASTS = (Path(__file__).parent / "contrasts.js").read_text()


@pytest.fixture(scope="module")
def lived_in(site):
    """A site with a version, a wish and a chat."""
    site.trained()
    site.chat("what is tea?", session="tea")
    return site


def shown(page: Page, view: str) -> None:
    expect(page.locator("main")).to_contain_text(VIEWS[view])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_every_text_can_be_read_in_both_schemes(browser, lived_in, scheme, view, shot):
    with visiting(browser, lived_in, color_scheme=scheme) as visitor:
        page = visitor.open(f"#/{view}", as_admin=True)
        shown(page, view)
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (max(map(int, re.findall(r"\d+", background)[:3])) < 80) == (scheme == "dark")
        assert page.evaluate(CONTRASTS) == []
        shot(page, f"{view}-{scheme}")


@pytest.mark.parametrize("view", VIEWS)
def test_a_phone_shows_every_view_without_scrolling_sideways(browser, lived_in, view, shot):
    phone = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}
    with visiting(browser, lived_in, **phone) as visitor:
        page = visitor.open(f"#/{view}", as_admin=True)
        shown(page, view)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert page.evaluate("document.querySelector('main').scrollWidth") <= 360
        if view == "chat":
            lived_in.says("the red river " * 12)
            page.get_by_role("textbox", name="Message").fill("on a phone")
            page.get_by_role("button", name="Send").tap()
            expect(page.get_by_role("article", name="Reply").locator(".way")).to_contain_text("waits")
            assert page.evaluate("document.documentElement.scrollWidth") <= 360
        shot(page, f"{view}-phone")


def test_a_small_phone_shows_the_name_of_the_view_that_is_open(browser, lived_in):
    with visiting(browser, lived_in, viewport={"width": 280, "height": 600}) as visitor:
        page = visitor.open("#/state", as_admin=True)
        last = page.locator("nav a[aria-current]")
        expect(last).to_have_text("State")
        expect(last).to_be_in_viewport(ratio=0.9)


@pytest.mark.parametrize("width", [1500, 1200, 1040])
def test_the_line_at_the_top_keeps_its_height_whatever_it_says(lived_in, browser, width):
    """A line that grows would move the chat while one reads it."""
    with visiting(browser, lived_in, viewport={"width": width, "height": 700}) as visitor:
        page = visitor.open("#/state", as_admin=True)
        expect(page.locator("#line .practice")).not_to_be_empty()
        high = "document.querySelector('header').offsetHeight"
        before = page.evaluate(high)
        page.evaluate("document.querySelector('#line .practice').textContent = 'practising 7 wishes, '.repeat(20)")
        assert page.evaluate(high) == before
        top = page.evaluate("document.querySelector('#help').getBoundingClientRect().top")
        assert 0 <= top < before
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def focused(page: Page, selector: str) -> None:
    """Press Shift+Tab until an element of this selector has the focus."""
    for _ in range(60):
        page.keyboard.press("Shift+Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"the keyboard reaches no {selector}")


def test_the_keyboard_is_enough(lived_in, visitor, shot):
    page = visitor.open()
    lived_in.says("a long answer", "another")
    page.keyboard.type("what is hot?")  # the message has the focus
    page.keyboard.press("Enter")
    expect(page.get_by_role("article", name="Reply").locator(".way")).to_contain_text("waits")
    focused(page, "article.reply")
    page.keyboard.press("b")
    expect(page.locator(".way")).to_contain_text("judged bad by you")
    focused(page, "article.reply")
    shot(page, "keyboard")
    page.keyboard.press("r")
    expect(page.get_by_role("article", name="Reply")).to_contain_text("2/2")
    focused(page, "article.own")
    page.keyboard.press("e")
    page.keyboard.type(" Please say.")
    lived_in.says("said")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_role("article", name="Reply")).to_contain_text("said")
    focused(page, "article.own")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("another reply")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("4")
    page.get_by_role("dialog", name="Admin key").wait_for()
    page.keyboard.type(lived_in.admin_key)
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Pin version")).to_be_visible()
    page.keyboard.press("3")
    expect(page.locator(".item").first).to_be_visible()
    page.keyboard.press("j")
    expect(page.locator(".item[aria-selected=true]")).to_have_id("row-1")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="One turn")).to_be_visible()
    page.keyboard.press("4")
    expect(page.get_by_role("button", name="Pin version")).to_be_visible()
    focused(page, "[data-act=pin]")
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Enter")  # the act has the focus
    expect(page.get_by_role("button", name="Unpin")).to_be_visible()
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Pin version")).to_be_visible()
    page.keyboard.press("n")
    shown(page, "chat")


def test_a_fresh_tab_takes_either_key_for_the_turns(browser, open_site):
    site = open_site(server__api_keys=[{"key": ANN, "user": "ann"}, {"key": BOB, "user": "bob"}])
    site.chat("a secret of bob", key=BOB)
    site.chat("a question of ann", key=ANN)
    for key, count in ((ANN, 1), (site.admin_key, 2)):
        with visiting(browser, site) as visitor:
            page = visitor.open("#/turns")
            dialog = page.get_by_role("dialog", name="Admin key or chat key")
            expect(dialog).not_to_contain_text("refused")
            dialog.locator("input").fill("wrong")
            page.keyboard.press("Enter")
            expect(dialog).to_contain_text("That key was refused.")
            dialog.locator("input").fill(key)
            page.keyboard.press("Enter")
            expect(page.locator(".item")).to_have_count(count)
            expect(page.locator(".item", has_text="a question of ann")).to_be_visible()
            expect(dialog).to_have_count(0)


def test_a_chat_key_is_asked_for_once_and_shows_its_own_chats_alone(browser, open_site):
    site = open_site(server__api_keys=[{"key": ANN, "user": "ann"}, {"key": BOB, "user": "bob"}])
    site.chat("a secret of bob", key=BOB)
    site.chat("a question of ann", key=ANN)
    with visiting(browser, site) as visitor:
        page = visitor.open()
        site.says("the answer")
        page.get_by_role("textbox", name="Message").fill("hello")
        page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog", name="Chat key")
        expect(dialog).to_contain_text("It stays in this tab.")
        expect(dialog).not_to_contain_text("refused")  # no key was given yet
        dialog.get_by_label("Chat key").fill("wrong")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("That key was refused.")
        dialog.get_by_label("Chat key").fill(ANN)
        page.keyboard.press("Enter")
        expect(page.get_by_role("article", name="Reply")).to_contain_text("the answer")
        page.get_by_role("link", name="Turns").click()
        expect(page.locator(".item", has_text="a question of ann")).to_be_visible()
        assert "bob" not in page.locator("main").inner_text()
        page.locator(".item", has_text="a question of ann").click()
        expect(page.get_by_role("button", name="Leave out")).to_be_visible()
        page.get_by_role("button", name="Leave out").click()
        page.get_by_role("dialog").get_by_role("button", name="Leave it out").click()
        expect(page.locator("dl")).to_contain_text("it was left out of training")
        page.get_by_role("link", name="State").click()
        expect(page.get_by_role("dialog", name="Admin key")).to_be_visible()
        page.get_by_role("button", name="Cancel").click()
        page.get_by_role("link", name="Wishes").click()
        expect(page.locator("main")).to_contain_text("No wish yet.")
