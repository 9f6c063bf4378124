// Everything about one model: what it is, what it does now, and a way to try it.

import { el, fill } from "./dom.js";
import { Live } from "./live.js";
import { TryAny } from "./try_any.js";
import { TryRegions } from "./try_regions.js";
import { bytes, duration, ranges, shape, whole } from "./words.js";

export class ModelView {
  constructor(model, bounds) {
    this.live = new Live(bounds);
    this.state = el("span", { class: "pill" });
    this.facts = el("dl", { class: "facts" });
    const plain = new TryAny(model);
    const attempts = model.regions
      ? [new TryRegions(model).element, el("details", {}, el("summary", {}, "Try it with plain tensors"), plain.element)]
      : [plain.element];
    this.element = el(
      "article",
      {},
      el("h2", {}, model.name, " ", el("span", { class: "faint" }, `version ${model.version}`), " ", this.state),
      section("Now", this.live.element),
      section("Try it", ...attempts),
      section("Takes and gives", tensors("Inputs", model.inputs, model), tensors("Outputs", model.outputs, model)),
      section("Limits", this.facts),
    );
  }

  /** Answers a second, or null when it is not known yet. */
  get rate() {
    return this.live.charts.throughput.lines[0].values.at(-1) ?? null;
  }

  update(model, at) {
    this.live.add(at, model.counters);
    const text = model.ready ? "ready" : "not ready";
    if (this.state.textContent !== text) this.state.textContent = text;
    this.state.className = `pill ${model.ready ? "good" : "bad"}`;
    const facts = JSON.stringify(model.limits);
    if (this.shown !== facts) fill(this.facts, limits(model));
    this.shown = facts;
  }
}

function section(title, ...content) {
  return el("section", { class: "card" }, el("h3", {}, title), content);
}

function tensors(title, list, model) {
  const rows = list.map((tensor) => {
    const sizes = ranges([tensor.shape], model.dimensions);
    const text = shape(tensor.shape);
    const where = sizes ? el("span", { class: "faint" }, `${sizes}`) : null;
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, tensor.name),
      el("td", {}, tensor.dtype),
      el("td", {}, el("code", {}, text), where && " ", where),
    );
  });
  const head = el("tr", {}, ["name", "dtype", "sizes"].map((name) => el("th", { scope: "col" }, name)));
  return el("table", {}, el("caption", {}, title), el("thead", {}, head), el("tbody", {}, rows));
}

function limits({ limits: given, platform }) {
  const rows = [
    ["a request's tensors", `at most ${bytes(given.body)}`],
    ["waiting", `at most ${whole(given.queued_rows)} rows and ${bytes(given.queued_bytes)}`],
    ["waits for others", given.delay ? `at most ${duration(given.delay)}` : "never while a runner is free"],
    ["platform", platform],
  ];
  return rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
}
