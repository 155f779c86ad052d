"""Ten thousand turns in the list of the page. Times are printed, for people; no test depends on them."""

import sqlite3

from playwright.sync_api import expect

COUNT = 10_000
SCROLL = """
async () => {
  const place = document.querySelector(".long"), foot = document.querySelector(".foot");
  const frame = () => new Promise(requestAnimationFrame);
  let frames = 0, most = 0;
  for (;;) {
    const before = place.scrollTop;
    place.scrollTop += 3600;  // several screens a frame, a part of the list in four
    await frame();
    frames += 1;
    most = Math.max(most, place.querySelectorAll(".item").length);
    if (place.scrollTop === before && foot.textContent.endsWith("in all")) break;
  }
  return { frames, most, ...place.longList };
}
"""


def fill(file, turn_id: str) -> None:
    """Copy a recorded turn, with its texts, until there are enough. The server reads the file meanwhile."""
    numbers = f"WITH RECURSIVE n(k) AS (SELECT 2 UNION ALL SELECT k + 1 FROM n WHERE k < {COUNT})"
    with sqlite3.connect(file, timeout=60) as db:
        (of,) = db.execute("SELECT id FROM turn WHERE turn_id = ?", (turn_id,)).fetchone()
        columns = (
            "policy, user, session_id, received_at, outcome, reason, detail, sampling, prompt_tokens, prompt, messages"
        )
        db.execute(
            f"INSERT INTO request (request_id, {columns}) {numbers} SELECT 'many-' || k, {columns} FROM request, n"
            " WHERE request.id = ? ORDER BY k",
            (of,),
        )
        db.execute(
            "INSERT INTO turn (id, turn_id, state, reason, oldest_version, response_tokens)"
            " SELECT id, request_id, 'dropped', 'no_next_state', 0, 12 FROM request WHERE request_id LIKE 'many-%'"
        )
        db.execute(
            "INSERT INTO reply SELECT other.id, reply.finished_at, finish_reason, cached_tokens, message, ids,"
            " log_probs, mask, versions FROM request AS other, reply"
            " WHERE other.request_id LIKE 'many-%' AND reply.id = ?",
            (of,),
        )


def test_ten_thousand_turns_scroll_to_the_end(site, visitor, capsys):
    fill(site.server.data_dir / "ledger.sqlite3", site.chat("one of very many questions"))
    page = visitor.open("#/turns", as_admin=True)
    expect(page.locator(".item").first).to_be_visible()
    devtools = visitor.context.new_cdp_session(page)
    devtools.send("Performance.enable")

    def metrics() -> dict[str, float]:
        return {one["name"]: one["value"] for one in devtools.send("Performance.getMetrics")["metrics"]}

    before = metrics()
    found = page.evaluate(SCROLL)
    spent = {name: 1000 * (metrics()[name] - before[name]) / found["frames"] for name in before if "Duration" in name}
    told = ", ".join(f"{name} {spent[f'{name}Duration']:.2f}" for name in ("Script", "RecalcStyle", "Layout", "Task"))
    with capsys.disabled():
        print(f"\n{COUNT:,} turns in {found['frames']:,} frames, milliseconds of each: {told}")
        print(f"longest draw {found['longest']:.1f} ms, {found['most']} rows at once")
    expect(page.locator(".foot")).to_have_text(f"{COUNT:,} in all")
    assert found["most"] < 60  # the document holds what can be seen, and little more
    page.locator(".long").press("Home")
    expect(page.locator(".item[aria-selected=true]")).to_have_id("row-0")
    page.locator(".long").press("End")
    expect(page.locator(".item[aria-selected=true]")).to_have_id(f"row-{COUNT - 1}")
