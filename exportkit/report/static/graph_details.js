// What is said about the node or the module that is selected.

import { el } from "../../web/static/dom.js";
import { countText, shareText, timeText } from "./text.js";

const MOST_LINKS = 24;
const SLOWEST = 6;

/** Returns the elements about a node. `go` selects another item. */
export function nodeDetails(model, node, go, operators) {
  const kinds = { input: "Input", output: "Output", custom: "Custom operator", size: "Size", check: "Check", op: "Operator" };
  const sources = new Set((node.args ?? []).flatMap(([, , from]) => from));
  const row = operators.get(node.operator);
  return [
    el("p", { class: "kind" }, kinds[node.kind]),
    el("h3", {}, node.name || node.title),
    node.target && el("p", {}, el("code", {}, node.target)),
    node.operator && el("p", {}, "◆ ", row ? el("a", { href: `#${row.id}` }, node.operator) : node.operator, " ", el("small", {}, row ? row.given : "not among the operators of the manifest")),
    node.ms !== undefined && el("p", { class: "time" }, el("b", {}, timeText(node.ms)), ` ${shareText(model.share(node))} of the time`),
    modules(node, go),
    source(node.frames),
    table(node.out.length > 1 ? "Results" : "Result", node.out.map(([name, type]) => [name, type])),
    node.args && table("Arguments", node.args.map(([name, text, from]) => [name, from.length === 1 ? link(model.nodes[from[0]], text, go) : text])),
    table("Weights", node.weights ?? []),
    links("Uses", [...sources], model, go),
    links("Used by", node.users, model, go),
  ];
}

/** Returns the elements about a module. `toggle` opens or closes it. */
export function groupDetails(model, group, go, toggle) {
  const nodes = [];
  const collect = (each) => each.items.forEach((item) => (item.items ? collect(item) : nodes.push(item)));
  collect(group);
  const slowest = nodes.filter((node) => node.ms > 0).sort((one, other) => other.ms - one.ms).slice(0, SLOWEST);
  const custom = nodes.filter((node) => node.kind === "custom");
  return [
    el("p", { class: "kind" }, group.path ? "Module" : "Part of a module"),
    el("h3", {}, group.path || group.name),
    group.class && el("p", {}, el("code", {}, group.class)),
    el("p", {}, countText(group.members, "node")),
    model.timed && el("p", { class: "time" }, el("b", {}, timeText(group.ms)), ` ${shareText(model.share(group))} of the time`),
    el("p", {}, el("button", { type: "button", click: toggle }, group.open ? "Close" : "Open")),
    group.parent && modules(group, go),
    custom.length > 0 && links("Custom operators", custom.map((node) => node.id), model, go),
    slowest.length > 0 && table("Slowest", slowest.map((node) => [link(node, node.title, go), timeText(node.ms)])),
  ];
}

function modules(item, go) {
  const path = [];
  for (let group = item.parent; group?.parent; group = group.parent) path.unshift(group);
  if (!path.length) return null;
  const parts = path.flatMap((group, index) => [index ? " › " : "", el("button", { type: "button", class: "link", title: group.path, click: () => go(group) }, group.name)]);
  return el("p", { class: "modules" }, el("small", {}, "in "), parts);
}

function source(frames) {
  if (!frames?.length) return null;
  const own = frames.find((frame) => frame[4]) ?? frames[0];
  const line = ([file, number, name, code], short) => [
    el("small", { title: file }, `${short ? file.split(/[\\/]/).pop() : file}:${number} in ${name}`),
    code && el("pre", {}, code),
  ];
  const rest = frames.length > 1 && el("details", {}, el("summary", {}, `All ${frames.length} lines that led here`), frames.map((frame) => el("div", {}, line(frame, false))));
  return el("div", { class: "source" }, el("h4", {}, "Source"), line(own, true), rest);
}

function table(title, rows) {
  if (!rows.length) return null;
  return el("div", {}, el("h4", {}, title), el("table", {}, el("tbody", {}, rows.map((cells) => el("tr", {}, cells.map((cell) => el("td", {}, typeof cell === "string" ? el("code", {}, cell) : cell)))))));
}

function links(title, ids, model, go) {
  if (!ids.length) return null;
  const shown = ids.slice(0, MOST_LINKS).map((id) => el("li", {}, link(model.nodes[id], model.nodes[id].name || model.nodes[id].title, go)));
  const rest = ids.length - shown.length;
  return el("div", {}, el("h4", {}, title), el("ul", { class: "links" }, shown, rest > 0 && el("li", {}, `and ${rest} more`)));
}

function link(node, text, go) {
  return el("button", { type: "button", class: `link ${node.kind}`, click: () => go(node) }, text);
}
