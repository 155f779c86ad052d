/* A curve as SVG: points with their values, marks on the way, and links that the keyboard reaches too. */

import { h, number } from "./dom.js";

const HIGH = 190, LEFT = 46, TOP = 12, BOTTOM = 164;
const MOST_DOTS = 200;

/** `series`: [{name, points: [{x, y, label, href}]}]; `marks`: [{x, text}]; x grows, y may be null (no point there). */
export function chart({ title, unit = "", series, marks = [], low = null, high = null, note = "" }) {
  const wide = matchMedia("(max-width: 44rem)").matches ? 360 : 600, right = wide - 10; // a phone's text keeps its size
  const all = series.flatMap((one) => one.points).filter((point) => point.y !== null && Number.isFinite(point.y));
  const head = h("figcaption", {}, h("b", {}, title), unit && h("span", { class: "soft" }, ` ${unit}`),
    series.length > 1 && h("span", { class: "keys" }, series.map((one, n) => h("span", { class: `key s${n}` }, one.name))));
  if (!all.length) return h("figure", { class: "chart" }, head, h("p", { class: "soft none" }, note || "Nothing was measured yet."));
  const xs = all.map((point) => point.x), ys = all.map((point) => point.y);
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  const bottom = low ?? Math.min(0, ...ys), top = Math.max(high ?? 0, ...ys), span = top - bottom || 1;
  const x = (at) => (x1 === x0 ? (LEFT + right) / 2 : LEFT + ((right - LEFT) * (at - x0)) / (x1 - x0));
  const y = (value) => BOTTOM - ((BOTTOM - TOP) * (value - bottom)) / span;
  const parts = [bottom, bottom + span / 2, bottom + span].flatMap((value) => [
    h("svg:line", { class: "axis", x1: LEFT, x2: right, y1: y(value), y2: y(value) }),
    h("svg:text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, number(value, 2))]);
  let free = -1;
  for (const mark of marks.filter((one) => one.x >= x0 && one.x <= x1)) {
    const wideness = 7 * mark.text.length, isLast = x(mark.x) > right - 40; // those stand to the left of their line
    if (x(mark.x) - (isLast ? wideness : 0) < free) continue; // too close to the last one to be read
    parts.push(h("svg:line", { class: "mark", x1: x(mark.x), x2: x(mark.x), y1: TOP, y2: BOTTOM }),
      h("svg:text", { x: x(mark.x) + (isLast ? -3 : 3), y: BOTTOM + 16, "text-anchor": isLast ? "end" : "start" }, mark.text));
    free = x(mark.x) + 14 + (isLast ? 0 : wideness);
  }
  series.forEach((one, n) => {
    const points = one.points.filter((point) => point.y !== null && Number.isFinite(point.y));
    parts.push(h("svg:polyline", { class: `curve s${n}`, points: points.map((point) => `${x(point.x).toFixed(1)},${y(point.y).toFixed(1)}`).join(" ") }));
    if (points.length > MOST_DOTS) return;
    for (const point of points) {
      const dot = h("svg:circle", { class: `dot s${n}`, cx: x(point.x), cy: y(point.y), r: 3.2 }, h("svg:title", {}, `${point.label}: ${number(point.y)}`));
      parts.push(point.href ? h("svg:a", { href: point.href, "aria-label": `${one.name} of ${point.label}: ${number(point.y)}; open it` }, h("svg:circle", { class: "hit", cx: x(point.x), cy: y(point.y), r: 10 }), dot) : dot);
    }
  });
  const last = series[0].points.filter((point) => point.y !== null).at(-1);
  return h("figure", { class: "chart" }, head,
    h("svg:svg", { viewBox: `0 0 ${wide} ${HIGH}`, role: "group", "aria-label": `${title}: ${last ? `${number(last.y)} at the end` : "no value"}` }, parts),
    note && h("p", { class: "soft" }, note));
}
