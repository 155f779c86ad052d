"""Wishes, turns, versions, curves and state in the browser, and what the operator does there."""

import os
import re
import signal
from contextlib import ExitStack

import httpx
import pytest
from breaking import words_of
from browsing import listening, visiting
from harness.model import Vocabulary
from playwright.sync_api import expect

from openclaw_rl.testing import FakeEngine, stub_app


@pytest.fixture(scope="module")
def learned(site):
    """Two versions, two wishes, and a chat beside them."""
    site.trained()
    site.trained()
    site.rate(site.chat("a question of its own", session="other"), value=False, comment="Please write without a list.")
    return site


def told(message):
    return {"error": {"message": message}}


def test_a_wish_appears_is_made_general_and_removed(learned, visitor, shot):
    page = visitor.open("#/wishes")
    card = page.locator(".card", has_text="Please answer more briefly.")
    expect(card).to_contain_text("Asked in")
    shot(page, "wishes")
    page.route(
        "**/v1/wishes/*", lambda route: route.fulfill(status=503, json={"error": {"message": "the disk is full"}})
    )
    card.get_by_label("For every prompt").click()
    expect(page.locator("#told")).to_have_text("the disk is full")
    expect(card.get_by_label("For every prompt")).not_to_be_checked()
    page.unroute("**/v1/wishes/*")
    card.get_by_label("For every prompt").check()
    expect(page.locator("#told")).to_contain_text("It holds for every prompt now.")
    card.get_by_role("button", name="Remove").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("What was learned of it stays in the weights.")
    dialog.get_by_role("button", name="Remove").click()
    expect(card).to_contain_text("removed")
    card.get_by_role("button", name="Practise again").click()
    expect(card.get_by_role("button", name="Remove")).to_be_visible()
    card.get_by_text("Asked in").click()
    (wish, *_) = learned.ask("GET", "/v1/wishes")["wishes"]
    assert (wish["is_general"], wish["state"]) == (True, "active")


def test_a_prompt_that_is_held_back_is_named(browser, open_site):
    site = open_site(practice__idle_s=3600.0, training__batch_size=16)
    for number in range(4):
        turn = site.chat(f"question {number}", session=f"held {number}")
        site.rate(turn, value=False, comment="Please answer in rhyme.")
    with visiting(browser, site) as visitor:
        page = visitor.open("#/wishes")
        page.locator(".card summary", has_text="Asked in 4 turns").click()
        sources = page.locator(".card details li")
        expect(sources.last).to_contain_text("held back: what is learned is measured on it")
        expect(sources.first).to_contain_text("0 practice replies")
        (wish,) = site.ask("GET", "/v1/wishes")["wishes"]
        said = site.ask("GET", f"/v1/outcomes?turn_id={wish['sources'][-1]['turn_id']}")["outcomes"]
        assert [outcome["is_held_back"] for outcome in said] == [True]


def test_turns_are_searched_filtered_and_read_in_full(learned, visitor, shot):
    page = visitor.open("#/turns", as_admin=True)
    rows = page.locator(".item")
    expect(rows.filter(has_text="a question of its own")).to_be_visible()
    shot(page, "turns")
    page.get_by_role("searchbox").fill("of its own")
    page.keyboard.press("Enter")
    expect(rows).to_have_count(1)
    expect(page).to_have_url(re.compile("q=of"))
    rows.first.click()
    expect(page.get_by_role("heading", name="Credit per token")).to_be_visible()
    expect(page.locator("main")).to_contain_text("“Please write without a list.”")
    assert page.locator(".token.up, .token.down").count() > 0
    shot(page, "turn")
    page.get_by_role("button", name="Good", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Override").click()
    expect(page.locator("main")).to_contain_text("good by feedback")
    page.get_by_role("button", name="Leave out").click()
    page.get_by_role("dialog").get_by_role("button", name="Leave it out").click()
    expect(page.locator("dl")).to_contain_text("it was left out of training")
    page.get_by_role("button", name="Bad", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Override").click()
    expect(page.locator("#told")).to_have_text("Recorded. It changes nothing for this turn.")


def test_a_long_search_tells_how_far_it_came_and_goes_on(learned, visitor):
    page, answers = visitor.open(), [{"turns": [], "next": 5, "looked_at": 4000}]
    page.route("**/v1/turns?*", lambda route: route.fulfill(json=answers[-1]))
    page.evaluate("key => sessionStorage.setItem('openclaw-rl.admin', key)", learned.admin_key)
    page.evaluate("location.hash = '#/turns?q=nowhere'")
    foot = page.locator(".foot")
    expect(foot).to_contain_text("0 so far, searched the newest 100,000 turns")
    answers.append({"turns": [], "next": None, "looked_at": 7})
    foot.get_by_role("button", name="Search on").click()
    expect(foot).to_have_text("Nothing was found.")


def test_a_list_that_failed_is_tried_again(learned, visitor):
    page = visitor.open()
    page.route(
        "**/v1/turns?*", lambda route: route.fulfill(status=503, json={"error": {"message": "the disk is slow"}})
    )
    page.evaluate("key => sessionStorage.setItem('openclaw-rl.admin', key)", learned.admin_key)
    page.evaluate("location.hash = '#/turns'")
    expect(page.locator(".foot")).to_contain_text("the disk is slow")
    page.unroute("**/v1/turns?*")
    page.locator(".foot").get_by_role("button", name="Try again").click()
    expect(page.locator(".item").first).to_be_visible()


def test_a_filter_keeps_the_focus(learned, visitor):
    page = visitor.open("#/turns", as_admin=True)
    expect(page.locator(".item").first).to_be_visible()
    page.locator("select[name=state]").focus()
    page.locator("select[name=state]").select_option("trained")
    expect(page).to_have_url(re.compile("state=trained"))
    expect(page.locator(".item").first).to_be_visible()
    expect(page.locator("select[name=state]")).to_be_focused()


def test_what_did_not_change_is_not_drawn_again(learned, visitor):
    page = visitor.open("#/state", as_admin=True)
    for part in (".panel", "#line .dot"):
        expect(page.locator(part).first).to_be_visible()
    page.locator(".queue a").first.focus()
    page.evaluate(
        "window.kept = [document.activeElement, document.querySelector('.panel'), document.querySelector('#line .dot')]"
    )
    for _ in range(3):
        with page.expect_response("**/v1/admin/status"):
            pass
    assert page.evaluate("window.kept.map((one) => one.isConnected)") == [True, True, True]
    assert page.evaluate("document.activeElement === window.kept[0]")


def test_a_reply_that_the_user_wrote_has_no_verdict_to_override(browser, open_site):
    site = open_site(practice__idle_s=3600.0)  # its sample waits there, and is in no other test's batch
    turn = site.chat("write it yourself", session="written")
    site.rate(turn, demonstration="as I wrote it")
    with visiting(browser, site) as visitor:
        page = visitor.open(f"#/turns/{turn}-demo", as_admin=True)
        expect(page.locator("dl")).to_contain_text("its user, in place of this reply")
        expect(page.locator("main")).to_contain_text("The user's own reply: every trained token is a target")
        expect(page.get_by_role("button", name="Forget this session")).to_be_visible()
        expect(page.get_by_role("button", name="Good", exact=True)).to_have_count(0)


def test_the_content_of_a_turn_is_asked_for_only_when_it_changed(site, visitor):
    turn = site.chat("look at me", session="looked at")
    page = visitor.open(f"#/turns/{turn}", as_admin=True)
    asked: list[str] = []
    expect(page.locator("dl")).to_contain_text("looked at")
    page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
    for _ in range(2):
        with page.expect_response("**/state"):
            pass
    assert [name for name in asked if name.startswith((turn, "tokens"))] == []
    site.rate(turn, value=True)
    expect(page.locator("main")).to_contain_text("good by feedback")
    assert f"{turn}?tokens=false" in asked


def test_a_session_is_forgotten(site, visitor):
    turn = site.chat("forget this please", session="to forget")
    page = visitor.open(f"#/turns/{turn}", as_admin=True)
    page.get_by_role("button", name="Forget this session").click()
    expect(page.get_by_role("dialog")).to_contain_text("It cannot be undone.")
    page.get_by_role("dialog").get_by_role("button", name="Forget it").click()
    expect(page.locator("#told")).to_contain_text("1 turn forgotten.")
    assert site.ask("GET", "/v1/turns?session_id=to+forget")["turns"] == []


def test_an_act_that_is_cancelled_does_nothing(learned, visitor):
    page = visitor.open("#/versions", as_admin=True)
    before = learned.ask("GET", "/v1/admin/status")
    for name in ("Roll back", "Pin version", "Pause learning"):
        page.get_by_role("button", name=name).click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
        expect(page.get_by_role("dialog")).to_have_count(0)
    now = learned.ask("GET", "/v1/admin/status")
    assert [now[name] for name in ("serving", "pinned", "learning")] == [
        before[name] for name in ("serving", "pinned", "learning")
    ]


def test_versions_are_compared_rolled_back_pinned_and_learning_paused(learned, visitor, shot):
    page = visitor.open("#/versions", as_admin=True)
    serving = learned.ask("GET", "/v1/admin/status")["serving"]
    expect(page.locator("table")).to_contain_text(f"v{serving}")
    learned.says("the older answer", "the newer answer")
    page.get_by_role("textbox", name="Prompt").fill("what is tea?")
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".side section").first).to_contain_text("the older answer")
    expect(page.locator(".side section").last).to_contain_text("the newer answer")
    expect(page.locator(".side")).not_to_contain_text("cut after")
    shot(page, "versions")
    page.get_by_role("button", name=f"Pin version {serving}").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("no newer version serves until you unpin")
    shot(page, "versions-asked")
    dialog.get_by_role("button", name="Pin").click()
    expect(page.get_by_role("button", name="Unpin")).to_be_visible()
    assert learned.ask("GET", "/v1/admin/status")["pinned"] == serving
    page.get_by_role("button", name="Unpin").click()
    dialog.get_by_role("button", name="Unpin").click()
    expect(page.get_by_role("button", name="Pin version")).to_be_visible()
    page.get_by_role("button", name="Roll back").click()
    expect(dialog).to_contain_text("abandoned for good")
    expect(dialog).to_contain_text("Wishes that they practised stop")
    dialog.get_by_role("button", name="Roll back").click()
    expect(page.locator(".panel")).to_contain_text(f"version {serving - 1} serves")
    assert learned.ask("GET", "/v1/admin/status")["serving"] == serving - 1
    page.get_by_role("button", name="Pause learning").click()
    dialog.get_by_role("button", name="Pause").click()
    expect(page.locator(".panel")).to_contain_text("learning is paused")
    page.get_by_role("button", name="Resume learning").click()
    dialog.get_by_role("button", name="Resume").click()
    expect(page.locator(".panel")).to_contain_text("learning,")


def test_a_look_from_before_an_act_draws_nothing_after_it(learned, visitor):
    page, held = visitor.open("#/versions", as_admin=True), []
    expect(page.get_by_role("button", name="Pin version")).to_be_visible()
    page.route("**/v1/admin/history*", lambda route: route.continue_() if held else held.append(route))
    with page.expect_request("**/v1/admin/history*"), page.expect_response("**/v1/admin/status*"):
        pass
    page.get_by_role("button", name="Pin version").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Pin").click()
    expect(page.get_by_role("button", name="Unpin")).to_be_visible()
    page.evaluate(
        "window.flips = 0; new MutationObserver(() => { window.flips += 1; })"
        ".observe(document.querySelector('.panel').parentElement, { childList: true })"
    )
    with page.expect_response("**/v1/admin/history*"):
        held[0].continue_()
    with page.expect_response("**/v1/admin/history*"):
        pass
    assert page.evaluate("window.flips") == 0
    page.get_by_role("button", name="Unpin").click()
    dialog.get_by_role("button", name="Unpin").click()
    expect(page.get_by_role("button", name="Pin version")).to_be_visible()


def test_a_comparison_names_a_reply_that_was_cut(learned, visitor):
    page = visitor.open("#/versions", as_admin=True)
    learned.says("the hot tea " * 100, "tea")
    page.get_by_role("textbox", name="Prompt").fill("what is tea?")
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".side h3").first).to_contain_text("cut after 200 tokens")
    expect(page.locator(".side h3").last).not_to_contain_text("cut")


def test_a_small_batch_is_trained_on_at_once(site, visitor):
    before = site.trained()
    site.rate(site.chat("train on me alone", session="alone"), value=False, comment="Please be kinder.")
    page = visitor.open("#/versions", as_admin=True)
    page.get_by_role("button", name="Train now").click()
    expect(page.get_by_role("dialog")).to_contain_text("one batch at once")
    page.get_by_role("dialog").get_by_role("button", name="Train now").click()
    expect(page.locator(".panel")).to_contain_text(f"version {before + 1} serves")


def test_one_version_has_its_gate_and_its_batch(learned, visitor, shot):
    page = visitor.open("#/versions/1", as_admin=True)
    expect(page.locator(".tiles")).to_contain_text("KL to the base")
    expect(page.locator(".batch li")).to_have_count(2)
    shot(page, "version")
    page.locator(".batch a").first.click()
    expect(page.get_by_role("heading", name="One turn")).to_be_visible()


def test_curves_lead_to_the_batch(learned, visitor, shot):
    page = visitor.open("#/curves", as_admin=True)
    expect(page.locator(".charts .chart")).to_have_count(6)
    expect(page.locator(".charts")).to_contain_text("Time to the first token")
    page.wait_for_function("document.querySelectorAll('.charts svg').length >= 4")
    shot(page, "curves")
    page.locator(".charts .chart", has_text="KL").locator("svg a").first.press("Enter")
    expect(page).to_have_url(re.compile("trained_in=1"))
    expect(page.locator(".item")).to_have_count(2)


def test_episodes_have_curves_by_split_and_tasks_and_lead_to_their_steps(learned, visitor, shot):
    for number, reward in enumerate((1.0, -1.0, 0.5)):
        name = f"held-out-{number}"
        body = {"episode_id": name, "task": f"shell/eval/{number}", "split": "eval"}
        assert httpx.post(f"{learned.server.url}/v1/episodes", json=body, timeout=60).status_code == 201
        learned.chat(f"task {number}", session="ignored", episode=name)
        learned.ask("POST", f"/v1/episodes/{name}/outcome", {"reward": reward, "truncated": number == 2})
    page = visitor.open("#/curves", as_admin=True)
    charts = page.locator(".charts .chart")
    expect(charts).to_have_count(8)
    expect(charts.filter(has_text="shell: pass@1").locator("svg title")).to_contain_text("1 of 3 episodes passed")
    expect(charts.filter(has_text="shell: reward")).to_have_count(1)
    rows = page.get_by_role("table", name="Newest episodes").locator("tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.first).to_contain_text(re.compile("shell/eval/2.*eval.*ended.*cut.*0.5"))
    shot(page, "curves-episodes")
    rows.first.get_by_role("button", name="shell/eval/2").click()
    page.get_by_role("link", name="step 1").click()
    expect(page.get_by_role("heading", name="One turn")).to_be_visible()
    expect(page.locator("main")).to_contain_text("task 2")


def test_an_estimate_below_zero_is_explained(learned, visitor):
    page = visitor.open()

    def history(route):
        answer = route.fetch()
        found = answer.json()
        found["versions"][-1]["metrics"]["gate_kl_parent"] = -0.04
        route.fulfill(response=answer, json=found)

    page.route("**/v1/admin/history*", history)
    page.evaluate("key => sessionStorage.setItem('openclaw-rl.admin', key)", learned.admin_key)
    page.evaluate("location.hash = '#/curves'")
    expect(page.locator(".charts .chart", has_text="KL")).to_contain_text("a small KL may come out below 0")


def test_the_state_shows_parts_queues_and_a_killed_trainer(learned, visitor, shot):
    page = visitor.open("#/state", as_admin=True)
    tile = page.locator(".tile", has_text="Trainer")
    expect(tile).to_contain_text("learns")
    expect(page.locator(".queue")).to_contain_text("trained")
    shot(page, "state")
    pid = next(c["pid"] for c in learned.ask("GET", "/v1/admin/status")["children"] if c["name"] == "trainer")
    os.kill(pid, signal.SIGKILL)
    expect(page.locator("main")).to_contain_text(re.compile(r"trainer ended \(exit -9\)"))
    expect(tile).to_contain_text("last exit -9")
    shot(page, "state-killed")


def test_an_admins_act_asks_for_the_key_once(site, visitor):
    page = visitor.open("#/state")
    dialog = page.get_by_role("dialog", name="Admin key")
    dialog.get_by_label("Admin key").fill("wrong")
    dialog.get_by_role("button", name="Use it").click()
    expect(dialog).to_contain_text("That key was refused.")
    dialog.get_by_label("Admin key").fill(site.admin_key)
    page.keyboard.press("Enter")
    expect(page.locator(".tile").first).to_be_visible()
    for view in ("Versions", "Curves", "Turns"):
        page.get_by_role("link", name=view, exact=True).click()
        expect(page.get_by_role("heading", name=view)).to_be_visible()
        expect(page.get_by_role("dialog")).to_have_count(0)
    assert page.evaluate("Object.keys(localStorage).filter((name) => name.includes('admin'))") == []


def test_a_server_that_hangs_is_told_as_away(visitor):
    page = visitor.open()
    expect(page.locator("#line")).to_contain_text("all is well")
    page.route("**/healthz", lambda route: None)  # no answer, and no error
    expect(page.locator("#line")).to_contain_text("the server does not answer")
    page.unroute("**/healthz")
    expect(page.locator("#line")).to_contain_text("all is well")


def test_each_engine_of_a_pool_is_shown_with_what_the_operator_did(browser, open_site, model_folder, shot):
    with ExitStack() as stack:
        policy = words_of(Vocabulary.of(model_folder))
        apps = [stub_app(FakeEngine(policy=policy, context_length=4096)) for _ in range(2)]
        urls = [stack.enter_context(listening(app))[0] for app in apps]
        site = open_site(engine__url=None, engine__urls=urls)
        with visiting(browser, site) as visitor:
            page = visitor.open("#/state", as_admin=True)
            tiles = [page.locator(".tile", has_text=f"Engine {number}") for number in (1, 2)]
            expect(tiles[0]).to_contain_text("serves")
            expect(tiles[0]).to_contain_text(f"{urls[0]} · 0 running · 0 sessions")
            site.ask("POST", "/v1/admin/engines/2", {"drained": True})
            expect(tiles[1]).to_contain_text("drained")
            shot(page, "state-pool")
            expect(page.locator(".panel.good")).to_have_text("All is well.")
