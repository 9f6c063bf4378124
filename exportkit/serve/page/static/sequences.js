// The sequences of a model with state: how many there are, what they hold, and why others ended.

import { Chart } from "./chart.js";
import { el, fill } from "./dom.js";
import { bytes, span, whole } from "./words.js";

const WHY = {
  end: "their last step was answered",
  restarted: "another one began in their place",
  idle: "no step came for too long",
  failed: "the model failed on a step",
  unanswered: "a step was given up",
  lost: "the process with their state died",
  unloaded: "the model was unloaded or replaced",
};

/** The sequences of one model. Its package's other methods share them. */
export class Sequences {
  constructor() {
    this.charts = { count: new Chart("Sequences", ["open"], whole, 1), bytes: new Chart("State", ["held"], bytes, 1) };
    this.facts = el("dl", { class: "facts" });
    this.ended = el("div", {});
    const charts = el("div", { class: "charts" }, this.charts.count.element, this.charts.bytes.element);
    this.element = el("div", {}, charts, this.facts, this.ended);
  }

  /** Takes what a new status says. */
  update(now) {
    this.charts.count.add([now.count]);
    this.charts.bytes.add([now.bytes]);
    const rows = [
      ["package", now.package],
      ["open", `${whole(now.count)} of ${whole(now.most)}`],
      ["state", `${bytes(now.bytes)} of ${bytes(now.most_bytes)}`],
      ["oldest", now.count ? span(now.oldest) : "–"],
      ["end when idle for", span(now.idle_seconds)],
    ];
    fill(this.facts, rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
    const shown = JSON.stringify(now.ended);
    if (this.shown !== shown) fill(this.ended, ended(Object.entries(now.ended)));
    this.shown = shown;
  }
}

function ended(reasons) {
  if (!reasons.length) return el("p", { class: "faint note" }, "None has ended yet.");
  const rows = reasons.map(([reason, count]) =>
    el("tr", {}, el("th", { scope: "row" }, reason), el("td", {}, whole(count)), el("td", { class: "faint" }, WHY[reason] ?? "")),
  );
  const head = ["ended", "count", "because"].map((text) => el("th", { scope: "col" }, text));
  return el(
    "table",
    { "aria-label": "Ended sequences" },
    el("thead", {}, el("tr", {}, head)),
    el("tbody", {}, rows),
  );
}
