"""The page with a policy for each user: the operator chooses one, and a user steers the own one."""

import time
from collections.abc import Callable

import httpx
import pytest
from browsing import Site, visiting
from playwright.sync_api import Browser, expect

KEYS = {"ann": "sk-ann", "bob": "sk-bob"}


@pytest.fixture(scope="module")
def house(open_site: Callable[..., Site]) -> Site:
    """A site on which Ann's policy has learned one version, and Bob has chatted."""
    keys = [{"key": key, "user": user} for user, key in KEYS.items()]
    site = open_site(policies__mode="per_user", practice__enabled=False, server__api_keys=keys)
    site.chat("hello", key=KEYS["bob"])
    first = site.chat("hello", key=KEYS["ann"])
    before = serving(site, "ann")
    for turn, value in ((first, True), (site.chat("again", key=KEYS["ann"]), False)):
        said = {"turn_id": turn, "value": value, "comment": "Please answer more briefly."}
        headers = {"Authorization": f"Bearer {KEYS['ann']}"}
        assert httpx.post(f"{site.server.url}/v1/feedback", json=said, headers=headers, timeout=60).is_success
    while serving(site, "ann") == before:
        time.sleep(0.05)
    return site


def serving(site: Site, user: str) -> int:
    return int(site.ask("GET", "/v1/policy", key=KEYS[user])["serving"])


def test_the_operator_chooses_whose_versions_the_page_shows(browser: Browser, house: Site) -> None:
    anns = serving(house, "ann")
    with visiting(browser, house) as visitor:
        page = visitor.open("#/versions", as_admin=True)
        expect(page.get_by_text("version 0 serves")).to_be_visible()
        page.get_by_label("Policy").select_option("user:ann")
        expect(page.get_by_text(f"version {anns} serves")).to_be_visible()
        page.get_by_role("link", name="State").click()
        expect(page.locator(".tile", has_text="Version")).to_contain_text(f"v{anns}")
        expect(page.locator(".tile", has_text="Version")).to_contain_text("ann")
        page.goto(f"{house.server.url}/#/versions/{serving(house, 'bob')}")
        expect(page.get_by_text(f"version {serving(house, 'bob')} serves")).to_be_visible()


def test_a_user_sees_and_rolls_back_the_own_policy_with_the_chat_key(browser: Browser, house: Site) -> None:
    anns, bobs = serving(house, "ann"), serving(house, "bob")
    with visiting(browser, house) as visitor:
        page = visitor.open("#/versions")
        dialog = page.get_by_role("dialog", name="Admin key or chat key")
        dialog.locator("input").fill(KEYS["ann"])
        page.keyboard.press("Enter")
        expect(page.get_by_text(f"version {anns} serves")).to_be_visible()
        assert f"v{bobs}" not in page.locator("table").inner_text().split()
        page.get_by_role("button", name="Roll back…").click()
        page.get_by_role("dialog").get_by_role("button", name="Roll back").click()
        expect(page.get_by_text(f"version {anns} serves")).to_have_count(0)
        page.get_by_role("link", name="State").click()
        expect(page.locator(".tile", has_text="Version")).to_contain_text("it learns from ann alone")
    assert serving(house, "ann") < anns
    assert serving(house, "bob") == bobs
