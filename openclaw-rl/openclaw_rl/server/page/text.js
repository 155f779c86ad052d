/* A reply as nodes: paragraphs, code, lists, headings, strong words. What is no such form stays as it was written.
 *
 * Nothing is ever parsed as HTML. A link is shown as text: a model may write any address. */

import { h } from "./dom.js";

const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,3}[.)])\s+(.*)$/;
const HEADING = /^(#{1,4})\s+(.*)$/;
const INLINE = /(`[^`\n]+`)|(\*\*[^*\n]+\*\*)/g;

/** Return the nodes of a text. */
export function render(text) {
  const nodes = [], lines = text.split("\n");
  let at = 0;
  while (at < lines.length) {
    const fence = FENCE.exec(lines[at]);
    if (fence) {
      const end = lines.findIndex((line, n) => n > at && line.trim().startsWith(fence[1]));
      const inside = lines.slice(at + 1, end < 0 ? lines.length : end);
      nodes.push(h("pre", { tabindex: 0, "data-language": fence[2] || null }, h("code", {}, inside.join("\n"))));
      at = end < 0 ? lines.length : end + 1;
    } else if (ITEM.test(lines[at])) {
      const from = at, isNumbered = /\d/.test(ITEM.exec(lines[at])[2]);
      while (at < lines.length && ITEM.test(lines[at]) && /\d/.test(ITEM.exec(lines[at])[2]) === isNumbered) at += 1;
      const items = lines.slice(from, at).map((line) => h("li", {}, inline(ITEM.exec(line)[3])));
      const start = isNumbered ? parseInt(ITEM.exec(lines[from])[2], 10) : null;
      nodes.push(h(isNumbered ? "ol" : "ul", { start: start === 1 ? null : start }, items));
    } else if (HEADING.test(lines[at])) {
      nodes.push(h("p", { class: "heading" }, inline(HEADING.exec(lines[at])[2])));
      at += 1;
    } else if (!lines[at].trim()) {
      at += 1;
    } else {
      const from = at;
      while (at < lines.length && lines[at].trim() && ![FENCE, ITEM, HEADING].some((form) => form.test(lines[at]))) at += 1;
      nodes.push(h("p", {}, inline(lines.slice(from, at).join("\n"))));
    }
  }
  return nodes;
}

function inline(text) {
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    parts.push(text.slice(end, found.index));
    parts.push(found[1] ? h("code", {}, found[1].slice(1, -1)) : h("strong", {}, found[2].slice(2, -2)));
    end = found.index + found[0].length;
  }
  parts.push(text.slice(end));
  return parts;
}
