"""Practice, seen from the page: the wish is practised, and the corrected reply names the version."""

import re

from browsing import visiting
from playwright.sync_api import expect


def test_a_corrected_reply_names_the_version_that_practised_it(browser, open_site, shot):
    site = open_site(
        practice__idle_s=0.0, practice__replies=4, practice__least_relevance=0.0, sampling__max_new_tokens=24
    )
    with visiting(browser, site) as visitor:
        page = visitor.open()
        page.get_by_role("textbox", name="Message").fill("what is the path to the river?")
        page.keyboard.press("Enter")
        reply = page.get_by_role("article", name="Reply")
        reply.get_by_role("button", name=re.compile("Bad reply")).click()
        reply.get_by_role("textbox", name="Comment").fill("Please answer in one short sentence.")
        page.keyboard.press("Control+Enter")
        expect(reply.locator(".way")).to_contain_text(re.compile(r"practised in version \d+ \(\d+ repl"))
        shot(page, "practised")
        reply.get_by_role("link", name=re.compile("wish 1")).click()
        expect(page.locator(".card")).to_contain_text(re.compile(r"practised \d+ repl\w+ in \d+ update"))
        shot(page, "practised-wish")
