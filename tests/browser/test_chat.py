"""Chat in the browser: it streams, stops, branches, is rated, and tells what became of each reply."""

import re

import pytest
from browsing import visiting
from playwright.sync_api import Page, expect

REPLY = "the red river and the blue path"


def say(page: Page, text: str) -> None:
    page.get_by_role("textbox", name="Message").fill(text)
    page.keyboard.press("Enter")


def replies(page: Page):
    return page.get_by_role("article", name="Reply")


def test_a_reply_streams(visitor, site, shot):
    page = visitor.open()
    shot(page, "chat-empty")
    site.says(REPLY, hold_after=3)
    say(page, "what is this?")
    expect(replies(page)).to_contain_text("the")  # while the engine still holds the rest
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    site.release()
    expect(replies(page)).to_contain_text(REPLY)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(replies(page).get_by_role("link", name="v0")).to_be_visible()


def test_an_empty_reply_is_shown_as_one(visitor, site):
    page = visitor.open()
    site.says("")
    say(page, "say nothing")
    expect(replies(page).locator(".text")).to_have_text("(empty reply)")
    expect(replies(page).locator(".way")).to_contain_text("waits for the next message or a rating")
    page.reload()
    expect(replies(page).locator(".text")).to_have_text("(empty reply)")


@pytest.fixture(scope="module")
def holding(open_site):
    """A site whose engine holds a reply for ever."""
    return open_site()


@pytest.mark.parametrize("how", ["button", "key"])
def test_a_reply_is_stopped_on_the_engine_too(browser, holding, how):
    with visiting(browser, holding) as visitor:
        page = visitor.open()
        holding.says(REPLY, hold_after=2)
        say(page, "go on and on")
        expect(replies(page).locator(".text")).to_contain_text("the")
        assert holding.engine.running == 1
        if how == "button":
            page.get_by_role("button", name="Stop").click()
        else:
            page.get_by_role("textbox", name="Message").press("Escape")
        expect(replies(page)).to_contain_text("stopped")
        expect(replies(page)).to_contain_text("not trained on: it was stopped before its end")
        while holding.engine.running:  # it hears of it over HTTP
            page.wait_for_timeout(20)
        assert len(holding.engine.aborted) > 0


def test_a_reload_while_a_reply_streams_keeps_the_message(browser, holding):
    with visiting(browser, holding) as visitor:
        page = visitor.open()
        holding.says(REPLY, hold_after=2)
        say(page, "do not lose me")
        expect(replies(page).locator(".text")).to_contain_text("the")
        beside = visitor.open(page.evaluate("location.hash"))  # what is kept while the reply still streams
        expect(beside.get_by_role("article", name="You")).to_contain_text("do not lose me")
        holding.says("here it is", "and again")
        beside.get_by_role("button", name="Ask again").click()
        expect(replies(beside)).to_contain_text("here it is")
        expect(beside.get_by_role("button", name="Ask again")).to_have_count(0)
        beside.close()
        page.reload()  # the browser may end the reply before it leaves the page, or not
        expect(page.get_by_role("article", name="You")).to_contain_text("do not lose me")
        page.get_by_role("button", name=re.compile("(Ask|Try) again")).click()
        expect(replies(page)).to_contain_text("and again")


def test_branches_stay_where_they_are_while_a_reply_streams(browser, holding):
    with visiting(browser, holding) as visitor:
        page = visitor.open()
        holding.says("the first answer")
        say(page, "red or blue?")
        expect(replies(page)).to_contain_text("the first answer")
        own = page.get_by_role("article", name="You")
        own.get_by_role("button", name="Edit").click()
        page.get_by_role("textbox", name="Edit the message").fill("cheese or chess?")
        holding.says(REPLY, hold_after=2)
        page.get_by_role("button", name="Send as a new branch").click()
        expect(replies(page).locator(".text")).to_contain_text("the")
        own.get_by_role("button", name="Earlier branch").click()
        expect(own).to_contain_text("cheese or chess?")
        page.get_by_role("button", name="Stop").click()
        expect(replies(page)).to_contain_text("stopped")
        own.get_by_role("button", name="Earlier branch").click()
        expect(own).to_contain_text("red or blue?")


def test_an_edit_and_another_try_are_branches(visitor, site):
    page = visitor.open()
    site.says("the first answer")
    say(page, "red or blue?")
    expect(replies(page)).to_contain_text("the first answer")
    site.says("the second answer")
    page.get_by_role("button", name="Try again").click()
    expect(replies(page)).to_contain_text("the second answer")
    expect(replies(page)).to_contain_text("2/2")
    page.get_by_role("button", name="Earlier branch").click()
    expect(replies(page)).to_contain_text("the first answer")
    own = page.get_by_role("article", name="You")
    own.get_by_role("button", name="Edit").click()
    site.says("a third answer")
    page.get_by_role("textbox", name="Edit the message").fill("cheese or chess?")
    page.get_by_role("button", name="Send as a new branch").click()
    expect(replies(page)).to_contain_text("a third answer")
    expect(own).to_contain_text("2/2")
    prompt = site.vocabulary.text(site.engine.calls[-1].input_ids)
    assert "cheese or chess?" in prompt
    assert "red or blue?" not in prompt
    page.reload()  # the tree is kept
    expect(own).to_contain_text("cheese or chess?")
    own.get_by_role("button", name="Earlier branch").click()
    expect(replies(page)).to_contain_text("the second answer")  # the newest end of that branch
    expect(replies(page)).to_contain_text("2/2")


def test_a_chat_goes_on_and_its_next_message_judges_the_reply(visitor, site):
    page = visitor.open()
    site.says("a long answer", "short")
    say(page, "what is tea?")
    expect(replies(page)).to_contain_text("a long answer")
    say(page, "No, that is too long. Please answer in one sentence.")
    expect(replies(page)).to_have_count(2)
    expect(replies(page).first.locator(".way")).to_contain_text("judged bad by the rules")


def test_thoughts_are_folded(visitor, site):
    page = visitor.open()
    site.says("<think>the blue path</think>the answer")
    say(page, "think about it")
    expect(replies(page).locator(".text")).to_have_text("the answer")
    thought = replies(page).locator("details.thought")
    expect(thought.get_by_text("the blue path")).not_to_be_visible()
    thought.get_by_text("Thoughts").click()
    expect(thought.get_by_text("the blue path")).to_be_visible()


def test_feedback_lands_and_the_way_of_the_reply_is_shown(browser, open_site, shot):
    site = open_site(practice__idle_s=3600.0)  # no other sample waits there
    with visiting(browser, site) as visitor:
        feedback_lands(visitor.open(), site, shot)


def feedback_lands(page, site, shot):
    site.says("the answer is tea")
    say(page, "tell me about hot tea")
    reply = replies(page)
    expect(reply.locator(".way")).to_contain_text("waits for the next message or a rating")
    reply.get_by_role("button", name=re.compile("Bad reply")).click()
    expect(reply.locator(".way")).to_contain_text("judged bad by you")
    reply.get_by_role("button", name="That is too long. Please answer more briefly.").click()
    shot(page, "chat-rating")
    reply.get_by_role("button", name="Send the comment").click()
    expect(reply).to_contain_text("You said: That is too long. Please answer more briefly.")
    expect(reply.locator(".way")).to_contain_text("waits for a full batch")
    expect(reply.get_by_role("link", name=re.compile(r"wish \d"))).to_be_visible()
    turn = site.ask("GET", f"/v1/turns/{reply.get_attribute('data-turn')}")
    assert [said["value"] for said in turn["feedback"]] == [-1.0, None]
    assert turn["request"]["scope"]["session_id"].startswith("page-")
    reply.get_by_role("button", name="It should have said").click()
    page.get_by_role("textbox", name="The reply that it should have been").fill("Tea.")
    reply.get_by_role("button", name="Teach this reply").click()
    # The demonstration and the corrected reply are a batch of two.
    expect(reply.locator(".way").first).to_contain_text(re.compile(r"trained in version \d"))
    expect(reply.locator(".way").last).to_contain_text(re.compile(r"your own reply.*trained in version \d", re.DOTALL))
    shot(page, "chat-learned")


def test_a_rating_revives_a_reply_that_nobody_answered(visitor, site):
    page = visitor.open()
    site.says("the answer", "bye")
    say(page, "rate me later")
    way = replies(page).locator(".way")
    expect(way).to_contain_text("waits for the next message or a rating")
    turn = site.ask("GET", f"/v1/turns/{replies(page).get_attribute('data-turn')}")
    site.chat("bye", session=turn["request"]["scope"]["session_id"], session_done=True)
    expect(way).to_contain_text("nobody answered it")
    replies(page).get_by_role("button", name=re.compile("Bad reply")).click()
    expect(way).to_contain_text("judged bad by you")
    expect(way).not_to_contain_text("nobody answered it")


def test_a_reply_is_learned_only_when_its_version_has_passed_and_a_rollback_is_seen(visitor, site):
    page, version = visitor.open(), {"state": "candidate", "serving": 6}

    def outcomes(route):
        answer = route.fetch()
        found = answer.json()
        for row in found["outcomes"]:
            row |= {"state": "trained", "verdict": 1, "source": "rules", "trained_in": 7}
            row["version_state"] = version["state"]
            row["is_held_back"] = version["state"] == "rolled_back"
        route.fulfill(response=answer, json=found)

    page.route("**/v1/outcomes*", outcomes)
    page.route("**/healthz", lambda route: route.fulfill(json={"status": "ok", "weight_version": version["serving"]}))
    site.says("the answer")
    say(page, "learn from me")
    steps = replies(page).locator(".way li")
    expect(steps.last).to_have_text("version 7: waits for the gate")
    expect(replies(page).locator(".way li.good")).to_have_count(0)
    version |= {"state": "serving", "serving": 7}
    expect(replies(page).locator(".way li.good")).to_have_text("trained in version 7")
    expect(page.locator("#line")).to_contain_text("v7")
    version |= {"state": "rolled_back", "serving": 6}
    expect(steps.nth(-2)).to_have_text("version 7: rolled back")
    expect(steps.last).to_have_text("held back: what is learned of the wish is measured on it")


def test_a_rating_is_taken_back(visitor, site):
    page = visitor.open()
    site.says("the answer")
    say(page, "rate me")
    good = replies(page).get_by_role("button", name=re.compile("Good reply"))
    good.click()
    expect(good).to_have_attribute("aria-pressed", "true")
    good.click()
    expect(good).to_have_attribute("aria-pressed", "false")
    turn = site.ask("GET", f"/v1/turns/{replies(page).get_attribute('data-turn')}")
    assert [said["value"] for said in turn["feedback"]] == [1.0, 0.0]


def test_what_a_reply_holds_stays_text(visitor, site, shot):
    """A model may write anything: tags, handlers, addresses. The page shows it, and runs nothing."""
    page = visitor.open()
    hostile = (
        '<img src=x onerror="window.hit=1"> <script>window.hit=1</script>\n\n```js\nwindow.hit = 1;\n```\n\n'
        "- [here](javascript:window.hit=1)\n- **bold** and `code`\n\n1. one\n2. two"
    )
    site.says(hostile)
    say(page, '<b onmouseover="window.hit=1">hello</b>')
    text = replies(page).locator(".text")
    expect(text).to_contain_text('<img src=x onerror="window.hit=1"> <script>window.hit=1</script>')
    expect(text).to_contain_text("[here](javascript:window.hit=1)")
    expect(text.locator("ol li").last).to_have_text("two")  # its end: the parts are counted below
    shot(page, "chat-text")
    assert page.locator("main img, main script, main b[onmouseover], .text a").count() == 0
    assert [text.locator(form).count() for form in ("pre", "ul li", "ol li", "strong", "li code")] == [1, 2, 2, 1, 1]
    assert page.evaluate("window.hit") is None
    assert "window.hit" in page.get_by_role("article", name="You").inner_text()
    page.goto(f"{site.server.url}/#/turns", wait_until="load")  # the same words in a list, without a key
    assert page.evaluate("window.hit") is None


def test_html_cannot_be_written_by_any_script(visitor, site):
    """Trusted Types: the browser itself refuses, whatever a later change of the page tries."""
    page = visitor.open()
    refused = page.evaluate(
        "() => { try { document.body.innerHTML = '<p>x</p>'; return false; } catch (error) { return error.name; } }"
    )
    assert refused == "TypeError"
    assert [found.partition(":")[0] for found in page.evaluate("window.violations")] == ["require-trusted-types-for"]
    page.evaluate("window.violations.length = 0")
    assert all("TrustedHTML" in error for error in visitor.errors)
    visitor.errors.clear()


def test_a_server_that_goes_away_is_told_and_the_words_are_kept(visitor, site):
    page = visitor.open()
    page.route("**/v1/chat/completions", lambda route: route.abort())
    say(page, "is anybody there?")
    expect(replies(page)).to_contain_text("The server does not answer.")
    page.unroute("**/v1/chat/completions")
    site.says("yes")
    page.get_by_role("button", name="Try again").click()
    expect(replies(page)).to_contain_text("yes")
