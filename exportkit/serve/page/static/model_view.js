// Everything about one model: what it is, what it does now, and ways to try it.

import { el, fill } from "./dom.js";
import { figures } from "./figures.js";
import { TryIt } from "./try_it.js";
import { whole } from "./words.js";

export class ModelView {
  constructor(model) {
    const { name, version, devices, batching, part } = model;
    const { enabled, reason, max_rows: rows } = batching;
    const together = enabled ? `Up to ${rows} rows run together` : `Requests run alone: ${reason}`;
    this.key = model.key;
    this.state = el("span", {});
    this.failure = el("p", { class: "problem" });
    this.figures = el("div", { class: "figures" });
    this.totals = el("p", { class: "faint" });
    this.element = el(
      "article",
      {},
      el("h2", {}, name, " ", el("span", { class: "faint" }, `version ${version}`), " ", this.state),
      el("p", { class: "about" }, `On ${devices.join(", ")}. ${together}.`),
      this.failure,
      section("The last minute", this.figures, this.totals),
      part && section("Try it", load(part, model)),
      section(part ? "Try it with plain tensors" : "Try it", new TryIt(model).element),
    );
  }

  /** Shows the newest of some samples, and what the model did between them. */
  show(samples) {
    const { ready, failure, requests, failures } = samples.at(-1);
    this.state.className = `pill ${ready ? "good" : "bad"}`;
    this.state.textContent = ready ? "ready" : "not ready";
    this.failure.textContent = failure ?? "";
    fill(this.figures, figures(samples));
    const failed = Object.entries(failures).map(([reason, count]) => `, ${whole(count)} ${reason}`);
    this.totals.textContent = `Since the start: ${whole(requests)} answered${failed.join("")}.`;
  }
}

/** Returns the try-it of an installed part of the page, which comes in a moment. */
function load({ name, facts }, model) {
  const place = el("div", {}, el("p", { class: "loading" }, "Loading"));
  const href = (file) => new URL(`page/parts/${name}/${file}`, document.baseURI).href;
  document.head.append(el("link", { rel: "stylesheet", href: href("part.css") }));
  import(href("part.js")).then(
    (part) => fill(place, part.tryIt(model, facts)),
    () => fill(place, el("p", { class: "problem" }, `The part ${name} of this page cannot be loaded.`)),
  );
  return place;
}

const section = (title, ...content) => el("section", { class: "card" }, el("h3", {}, title), content);
