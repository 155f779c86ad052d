/* Episodes of agents: pass@1 and reward by version, for each set of tasks, and the newest ones. */

import { chart } from "./chart.js";
import { asAdmin } from "./api.js";
import { busy, button, h, many, nothing, number, put, signed, when } from "./dom.js";
import { STATES, reason } from "./words.js";

const MOST_SETS = 6;
const SPLITS = [["eval", "held out"], ["train", "training"]];

/** Two charts for each of the sets of tasks that were played last. */
export function charts({ episodes }) {
  const sets = [...new Set(episodes.toReversed().map((tally) => tally.tasks))].slice(0, MOST_SETS);
  return sets.flatMap((tasks) => [
    byVersion(`${tasks}: pass@1`, "share of episodes that passed", (tally) => tally.passed / tally.ended, { low: 0, high: 1 }),
    byVersion(`${tasks}: reward`, "mean outcome", (tally) => tally.reward, { low: -1, high: 1 }),
  ].map((draw) => draw(episodes.filter((tally) => tally.tasks === tasks))));
}

function byVersion(title, unit, value, bounds) {
  return (tallies) => chart({ title, unit, ...bounds,
    series: SPLITS.map(([split, name]) => ({ name, points: tallies.filter((tally) => tally.split === split).map((tally) => ({
      x: tally.weight_version,
      y: value(tally),
      label: `version ${tally.weight_version}: ${tally.passed} of ${many(tally.ended, "episode")} passed, reward ${signed(tally.reward)}`,
      href: null,
    })) })).filter((one) => one.points.length),
    marks: [...new Set(tallies.map((tally) => tally.weight_version))].map((version) => ({ x: version, text: `v${version}` })) });
}

/** The newest episodes, as `GET /v1/episodes` returns them; a task's button shows the episode's steps below. */
export function newest(episodes, signal) {
  const steps = h("div", { class: "steps", role: "status" });
  const show = async (one) => {
    const { turns } = await asAdmin(`v1/episodes/${encodeURIComponent(one.episode_id)}`, { signal });
    put(steps, h("h3", {}, one.task), h("ol", {}, turns.map((turn) => h("li", {},
      h("a", { href: `#/turns/${encodeURIComponent(turn.id)}` }, `step ${turn.step ?? "–"}`), " ",
      h("span", { class: "soft" }, turn.reason ? reason(turn.reason) : STATES[turn.state] ?? turn.state,
        turn.reward !== null && `, reward ${signed(turn.reward)}`, turn.advantage !== null && `, advantage ${signed(turn.advantage)}`)))));
  };
  const opener = (one) => {
    const element = button(one.task);
    element.addEventListener("click", busy(element, () => show(one), (text) => put(steps, nothing(text))));
    return element;
  };
  return [h("h2", {}, "Newest episodes"), h("div", { class: "scroll" }, h("table", { "aria-label": "Newest episodes" },
    h("thead", {}, h("tr", {}, ["task", "split", "state", "opened"].map((name) => h("th", {}, name)), h("th", { class: "n" }, "reward"), h("th", {}, "why"))),
    h("tbody", {}, episodes.map((one) => h("tr", {},
      h("td", {}, opener(one)),
      h("td", {}, one.split),
      h("td", { class: one.state === "aborted" || one.state === "expired" ? "bad" : null }, one.state, one.outcome?.truncated && h("span", { class: "badge" }, "cut")),
      h("td", {}, when(one.opened_at)),
      h("td", { class: "n" }, number(one.outcome?.reward ?? null)),
      h("td", { class: "soft" }, one.reason ?? "")))))), steps];
}
