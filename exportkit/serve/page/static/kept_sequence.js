// The sequence that a visitor of the page keeps, which the methods of a package share.

import { el } from "./dom.js";
import { span } from "./words.js";

const NOT_RUN = new Set([400, 401, 404, 413, 429, 503]); // statuses of steps that changed nothing
const kept = new Map(); // by package and version

/** One sequence after another. */
class KeptSequence {
  constructor() {
    this.watching = new Set();
    this.begin();
  }

  /** The next step begins another one. */
  begin() {
    this.id = `page-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
    this.steps = 0;
    this.tell();
  }

  /** The parameters of the next step. */
  parameters(last) {
    return { sequence_id: this.id, sequence_start: this.steps === 0, sequence_end: last };
  }

  answered(last) {
    if (last) return this.begin();
    this.steps += 1;
    this.tell();
  }

  /** A step was refused. Returns whether the sequence is lost with it. */
  refused(status) {
    const lost = this.steps > 0 && !NOT_RUN.has(status);
    if (lost) this.begin();
    return lost;
  }

  tell() {
    for (const watch of this.watching) watch();
  }
}

/** The part of a try-it that says which step comes next. */
export class SequenceField {
  constructor({ sequences, version }) {
    const key = JSON.stringify([sequences.package, version]);
    if (!kept.has(key)) kept.set(key, new KeptSequence());
    this.sequence = kept.get(key);
    this.idle = sequences.idle_seconds;
    this.said = el("p", { role: "status" });
    this.last = el("select", {}, el("option", { value: "" }, "goes on"), el("option", { value: "last" }, "is the last one"));
    this.again = el("button", { type: "button", click: () => this.sequence.begin() }, "Begin another one");
    const step = el("label", {}, el("b", {}, "this step"), this.last);
    this.element = el("fieldset", {}, el("legend", {}, "Sequence"), step, el("div", { class: "said" }, this.said, this.again));
    this.sequence.watching.add(() => this.show());
    this.show();
  }

  get isLast() {
    return this.last.value === "last";
  }

  parameters() {
    return this.sequence.parameters(this.isLast);
  }

  answered() {
    this.sequence.answered(this.isLast);
    this.last.value = "";
  }

  /** Returns what is said beside a refusal. */
  refused(status) {
    return this.sequence.refused(status) ? "The sequence is lost: the next run begins another one." : "";
  }

  show() {
    const { steps } = this.sequence;
    this.again.disabled = steps === 0;
    this.said.textContent = steps
      ? `Step ${steps + 1} comes next. The server keeps the state for ${span(this.idle)} without a step.`
      : "The next run begins a sequence.";
  }
}
