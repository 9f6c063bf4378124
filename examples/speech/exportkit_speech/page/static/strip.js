// The last ten seconds: the waveform, how likely speech is over it, and where somebody spoke.

import { svg } from "../../dom.js";
import { BEGINS, CHUNK } from "./speech_times.js";

const SECONDS = 10;
const COLUMNS = Math.round(SECONDS / CHUNK);
const STEP = 2; // units between two columns
const WIDTH = STEP * COLUMNS;
const HEIGHT = 150;
const EDGE = 6; // of the height, that nothing reaches, so that lines stay whole
const LEAST = 0.02; // the smallest scale of the waveform, so that noise does not fill it

const place = (share) => (HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * share).toFixed(1);

export class Strip {
  constructor() {
    this.columns = []; // of {low, high, likely, speech}
    this.speech = svg("path", { class: "spoken" });
    this.wave = svg("path", { class: "wave" });
    this.line = svg("path", { class: "line line-1" });
    const threshold = svg("path", { class: "threshold", d: `M0 ${place(BEGINS)}H${WIDTH}` });
    this.element = svg(
      "svg",
      { class: "strip", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      this.speech,
      this.wave,
      threshold,
      this.line,
    );
    this.draw();
  }

  clear() {
    this.columns = [];
    this.draw();
  }

  /** Adds a chunk and its answer; drawn with the next frame. */
  add(chunk, likely, speech) {
    this.columns.push({ low: Math.min(...chunk), high: Math.max(...chunk), likely, speech });
    while (this.columns.length > COLUMNS) this.columns.shift();
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  draw() {
    const { columns } = this;
    const x = (index) => WIDTH - STEP * (columns.length - index);
    const loudest = columns.reduce((most, { low, high }) => Math.max(most, -low, high), LEAST);
    const y = (value) => place(0.5 + value / loudest / 2);
    this.wave.setAttribute("d", columns.map(({ low, high }, at) => `M${x(at) + STEP / 2} ${y(high)}V${y(low)}`).join(""));
    this.line.setAttribute("d", columns.map(({ likely }, at) => `${at ? "L" : "M"}${x(at) + STEP / 2} ${place(likely)}`).join(""));
    const spoken = columns.map(({ speech }, at) => (speech ? `M${x(at)} 0h${STEP}V${HEIGHT}h-${STEP}z` : ""));
    this.speech.setAttribute("d", spoken.join(""));
    const share = Math.round((100 * columns.filter(({ speech }) => speech).length) / (columns.length || 1));
    const seconds = (columns.length * CHUNK).toFixed(0);
    this.element.setAttribute("aria-label", `The last ${seconds} seconds: the waveform, and how likely speech is. Speech in ${share} %.`);
  }
}
