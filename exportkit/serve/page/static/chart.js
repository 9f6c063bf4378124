// A small chart of the last minute: one or two lines, the newest value in words, the largest as the scale.

import { el, fill, svg } from "./dom.js";

export const SAMPLES = 60;
const WIDTH = 240;
const HEIGHT = 64;
const TOP = 6; // the line of the largest value stays whole

export class Chart {
  /**
   * `lines` are the names of the lines; `words` says a value. `least` is the smallest scale, so that noise around
   * nothing does not fill the chart.
   */
  constructor(title, lines, words, least) {
    this.lines = lines.map((name) => ({ name, values: [] }));
    this.title = title;
    this.words = words;
    this.least = least;
    this.values = el("p", { class: "values" });
    this.scale = el("span", { class: "scale" });
    this.paths = this.lines.map((_, index) => svg("path", { class: `line line-${index}` }));
    this.area = svg("path", { class: "area" });
    this.drawing = svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      this.area,
      this.paths,
    );
    const frame = el("div", { class: "plot" }, this.drawing, this.scale);
    this.element = el("section", { class: "chart" }, el("h4", {}, title), this.values, frame);
    this.draw();
  }

  /** Adds a value for each line; null where there is nothing to say. */
  add(values) {
    values.forEach((value, index) => {
      const line = this.lines[index].values;
      line.push(value);
      while (line.length > SAMPLES) line.shift();
    });
    this.draw();
  }

  /** Marks that time went by unseen. */
  interrupt() {
    for (const { values } of this.lines) values.push(null);
  }

  draw() {
    const known = this.lines.flatMap((line) => line.values).filter((value) => value !== null);
    const top = Math.max(this.least, ...known);
    this.lines.forEach((line, index) => this.paths[index].setAttribute("d", pathOf(line.values, top, false)));
    this.area.setAttribute("d", pathOf(this.lines[0].values, top, true));
    const last = this.lines.map(({ name, values }) => [name, values.at(-1) ?? null]);
    fill(this.values, last.map(([name, value], index) => this.value(name, value, index)));
    this.scale.textContent = known.some(Boolean) ? this.words(top) : ""; // no scale over nothing
    const said = last.map(([name, value]) => `${name} ${value === null ? "none" : this.words(value)}`).join(", ");
    this.drawing.setAttribute("aria-label", `${this.title}, last minute: now ${said}${known.some(Boolean) ? `; scale to ${this.words(top)}` : ""}`);
  }

  value(name, value, index) {
    const text = value === null ? "–" : this.words(value);
    return el("span", { class: `value value-${index}` }, el("b", {}, text), ` ${name}`);
  }
}

/** The path of a line, in pieces where values are missing; or of the area below it. The newest value is at the right. */
function pathOf(values, top, area) {
  const step = WIDTH / (SAMPLES - 1);
  const x = (index) => (WIDTH - (values.length - 1 - index) * step).toFixed(1);
  const y = (value) => (HEIGHT - 1 - ((HEIGHT - 1 - TOP) * value) / top).toFixed(1);
  let path = "";
  let first = null;
  values.forEach((value, index) => {
    if (value === null) return;
    if (first === null) first = index;
    path += `${first === index ? "M" : "L"}${x(index)} ${y(value)}`;
    if (index + 1 < values.length && values[index + 1] !== null) return;
    if (first === index) path += `h0.1`; // a single value is a dot
    if (area) path += `V${HEIGHT}H${x(first)}Z`;
    first = null;
  });
  return path;
}
