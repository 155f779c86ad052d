/* Curves: reward, KL, gap, practice, staleness, time to the first token, episodes; by version, with a link to each batch. */

import { asAdmin } from "./api.js";
import { h, nothing, put, repeat, when } from "./dom.js";
import { ofChosen } from "./policies.js";
import { chart } from "./chart.js";
import { charts as episodeCharts, newest } from "./episodes.js";

export const title = "Curves";
const LOOK_MS = 5000, WINDOW = 20, MOST_POINTS = 300, EPISODES = 20;
let chosen = "reward_mean"; // figure of the last chart

export function show(root, { signal }) {
  const charts = h("div", { class: "charts" });
  const select = h("select", { "aria-label": "A figure of each step" });
  const own = h("div", {}), list = h("div", {});
  put(root, h("header", { class: "head" }, h("h1", {}, "Curves"),
    h("p", { class: "soft" }, "A point of a step leads to its batch. Dotted lines: where versions change.")),
    charts, h("h2", {}, "Any figure ", select), own, list);
  let shown = "", last = null;

  select.addEventListener("change", () => { chosen = select.value; drawOwn(); });

  async function look() {
    const found = await asAdmin(`v1/admin/history${ofChosen()}`, { signal });
    const now = JSON.stringify([found.versions.map((version) => [version.weight_version, version.state, version.metrics]), found.verdicts, found.first_tokens, found.episodes]);
    if (now === shown || charts.contains(document.activeElement)) return;
    shown = now;
    last = found;
    put(charts, reward(found), kl(found), gap(found), practice(found), staleness(found), firstToken(found), episodeCharts(found));
    if (found.episodes.length) put(list, newest((await asAdmin(`v1/episodes?limit=${EPISODES}`, { signal })).episodes, signal));
    const names = [...new Set(found.versions.flatMap((version) => Object.keys(version.metrics)))].sort();
    put(select, names.map((name) => h("option", {}, name)));
    if (names.includes(chosen)) select.value = chosen;
    drawOwn();
  }

  function drawOwn() {
    put(own, last && byVersion(last, select.value || "", [[select.value, select.value]]));
  }

  repeat(look, LOOK_MS, signal, (error) => put(charts, nothing(error.message)));
}

const batch = (version) => `#/turns?trained_in=${version.weight_version}`;
const isStep = (version) => Object.keys(version.metrics).length > 0;

/** One chart of figures of the steps: `figures` are [name in the metrics or function, name for people]. */
function byVersion({ versions }, title, figures, more = {}) {
  const steps = versions.filter(isStep);
  const marks = steps.map((version) => ({ x: version.weight_version, text: `v${version.weight_version}` }));
  const series = figures.map(([figure, name]) => ({
    name,
    points: steps.map((version) => ({
      x: version.weight_version,
      y: (typeof figure === "function" ? figure(version) : version.metrics[figure]) ?? null,
      label: `version ${version.weight_version}, ${when(version.committed_at)}`,
      href: batch(version),
    })),
  })).filter((one, n) => n === 0 || one.points.some((point) => point.y !== null));
  return chart({ title, series, marks, note: steps.length ? "" : "No step was trained yet.", ...more });
}

function reward({ verdicts, ...found }) {
  const said = verdicts.filter(([, value]) => value);
  if (!said.length) return byVersion(found, "Reward", [["reward_mean", "mean of the step"]], { low: -1, high: 1 });
  const points = said.map(([version], at) => {
    const recent = said.slice(Math.max(0, at + 1 - WINDOW), at + 1);
    return { x: at, y: recent.filter(([, value]) => value > 0).length / recent.length, label: `verdict ${at + 1}, on version ${version}`, href: `#/turns?weight_version=${version}` };
  });
  const marks = said.flatMap(([version], at) => (at && version === said[at - 1][0] ? [] : [{ x: at, text: `v${version}` }]));
  return chart({ title: "Good verdicts", unit: `share of the last ${WINDOW}`, series: [{ name: "good", points: thin(points) }], marks, low: 0, high: 1 });
}

const kl = (found) => byVersion(found, "KL", [["ref_kl", "step: to the base"], ["gate_kl_base", "gate: to the base"], ["gate_kl_parent", "gate: to the parent"]], { unit: "nats a token",
  ...(found.versions.some(({ metrics }) => metrics.gate_kl_parent < 0 || metrics.gate_kl_base < 0)
    ? { note: "The gate estimates from stored replies: a small KL may come out below 0." } : {}) });

const gap = (found) => byVersion(found, "Gap", [["gap", "teacher − student"], ["gap_abs", "its size"]], { unit: "nats a token", note: found.versions.some((version) => "gap" in version.metrics) ? "" : "No step has a gap: only OPD and Combined have a teacher." });

const practice = (found) => byVersion(found, "Practice", [[(version) => version.batch && version.batch.practice / version.batch.samples, "share"]], { unit: "share of each batch", low: 0, high: 1 });

const staleness = (found) => byVersion(found, "Staleness", [[(version) => version.batch?.lag ?? null, "lag"]], { unit: "versions between sampling and step" });

function firstToken({ first_tokens: times }) {
  const points = times.map(([at, version, seconds]) => ({ x: at, y: 1000 * seconds, label: `${when(at)}, version ${version}`, href: null }));
  const marks = times.flatMap(([at, version], n) => (n && version === times[n - 1][1] ? [] : [{ x: at, text: `v${version}` }]));
  return chart({ title: "Time to the first token", unit: "ms, since the server started", series: [{ name: "chats", points: thin(points) }], marks, note: times.length ? "" : "No chat ran since the server started." });
}

/** Keep every k-th point of a long row, and the last. */
function thin(points) {
  const step = Math.ceil(points.length / MOST_POINTS);
  return points.filter((_, at) => at % step === 0 || at === points.length - 1);
}
