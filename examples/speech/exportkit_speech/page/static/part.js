// The try-it for a model that hears speech: it listens to the microphone, and says when somebody speaks.

import { el, fill } from "../../dom.js";
import { duration } from "../../words.js";
import { openMicrophone } from "./microphone.js";
import { Sequence } from "./sequence.js";
import { CHUNK, SpeechTimes } from "./speech_times.js";
import { Strip } from "./strip.js";

/** Returns the try-it for a model of which the server found `facts`: see exportkit_speech/page. */
export const tryIt = (model, facts) => new Listener(model, facts).element;

const BEHIND = 4; // seconds of sound that may wait for the server
const CHANGES = 8; // that are shown
const LATE = `The server answers more slowly than one speaks: ${BEHIND} seconds wait. Start again, nearer to it or when it has less to do.`;

class Listener {
  constructor(model, facts) {
    this.model = model;
    this.facts = facts;
    this.run = null; // what listens now
    this.strip = new Strip();
    this.button = el("button", { type: "button", class: "primary", click: () => (this.run ? this.stop() : this.start()) });
    this.light = el("p", { class: "light", role: "status" });
    this.said = el("p", { class: "said faint" });
    this.problem = el("p", { class: "problem", role: "alert" });
    this.changes = el("ol", { class: "changes", "aria-label": "Changes" });
    this.element = el(
      "div",
      { class: "listener" },
      el("p", {}, "Speak into the microphone. It sends 512 samples at 16 kHz at a time, and the server keeps what the model remembers."),
      el("div", { class: "row" }, this.button, this.light, this.said),
      this.problem,
      this.strip.element,
      el(
        "p",
        { class: "legend" },
        el("span", { class: "of-wave" }, "waveform"),
        el("span", { class: "of-line" }, "how likely speech is, from 0 to 1"),
        el("span", { class: "of-spoken" }, "somebody speaks"),
        el("span", { class: "faint" }, "the last 10 seconds"),
      ),
      this.changes,
    );
    this.show();
  }

  async start() {
    const run = (this.run = {
      sequence: new Sequence(this.model, this.facts.input),
      times: new SpeechTimes(),
      waiting: [],
      sending: false,
      close: null,
      ends: false,
    });
    this.strip.clear();
    fill(this.changes);
    fill(this.problem);
    fill(this.said, "Asking for the microphone");
    this.show();
    try {
      run.close = await openMicrophone(
        this.facts.samples,
        (chunk) => this.hear(run, chunk),
        (sentence) => this.stopBecause(run, sentence),
      );
    } catch (error) {
      return this.fail(run, error.message);
    }
    if (run.ends) run.close(); // stopped while the browser asked
    else fill(this.said, "Listening");
  }

  /** Ends the sequence, behind what waits. */
  stop() {
    const { run } = this;
    run.ends = true;
    run.close?.();
    if (run.sequence.begun || run.sending || run.waiting.length) run.waiting.push(new Float32Array(this.facts.samples));
    if (run.waiting.length) this.send(run);
    else this.ended(run);
  }

  hear(run, chunk) {
    if (run.ends) return;
    if (!this.element.isConnected) return this.stop(); // another model is shown
    run.waiting.push(chunk);
    if (run.waiting.length * CHUNK <= BEHIND) return this.send(run);
    run.waiting = [];
    return this.stopBecause(run, LATE);
  }

  stopBecause(run, sentence) {
    if (run.ends) return;
    fill(this.problem, sentence);
    this.stop();
  }

  /** Sends what waits, one chunk after another: the server keeps the order of requests only as they come. */
  async send(run) {
    if (run.sending) return;
    run.sending = true;
    try {
      while (run.waiting.length && this.run === run) {
        const chunk = run.waiting.shift();
        const last = run.ends && run.waiting.length === 0;
        const { likely, seconds } = await run.sequence.step(chunk, last);
        if (!last) this.answered(run, chunk, likely, seconds);
      }
    } catch (error) {
      this.fail(run, error.message);
    }
    run.sending = false;
    if (run.ends && this.run === run) this.ended(run);
  }

  answered(run, chunk, likely, seconds) {
    const change = run.times.add(likely);
    this.strip.add(chunk, likely, run.times.speech);
    fill(this.said, `${likely.toFixed(2)}, answered in ${duration(seconds)}`);
    if (change === null) return;
    this.changes.append(el("li", {}, `${change.at.toFixed(2)} s  speech ${change.speech ? "begins" : "ends"}`));
    while (this.changes.children.length > CHANGES) this.changes.firstChild.remove();
    this.show();
  }

  fail(run, sentence) {
    if (this.run !== run) return;
    run.ends = true;
    run.close?.();
    fill(this.problem, sentence);
    this.ended(run);
  }

  ended(run) {
    if (this.run !== run) return;
    this.run = null;
    fill(this.said);
    this.show();
  }

  /** What the button does and what the light says, where it has changed: what is written again is read out again. */
  show() {
    const state = this.run === null ? "off" : this.run.times.speech ? "speech" : "quiet";
    if (this.light.dataset.state === state) return;
    this.light.dataset.state = state;
    fill(this.light, { off: "Not listening", quiet: "Nobody speaks", speech: "Somebody speaks" }[state]);
    fill(this.button, this.run === null ? "Listen" : "Stop");
  }
}
