// Everything about one model: what it is, what it does now, and a way to try it.

import { dotted, el, fill } from "./dom.js";
import { Live } from "./live.js";
import { Sequences } from "./sequences.js";
import { TryAny } from "./try_any.js";
import { bytes, duration, ranges, shape, whole } from "./words.js";

export class ModelView {
  constructor(model, bounds) {
    this.model = model;
    this.call = callOf(model);
    this.live = new Live(bounds);
    this.sequences = model.sequences ? new Sequences() : null;
    this.built = null;
  }

  /** Whether a model of the same name and version is called otherwise: another package was loaded. */
  outdated(model) {
    return this.call !== callOf(model);
  }

  /** What is shown, made when it is first asked for: a server may have many models. */
  get element() {
    return (this.built ??= this.build());
  }

  build() {
    const { model } = this;
    this.state = el("span", {});
    this.about = el("p", { class: "about" });
    this.facts = el("dl", { class: "facts" });
    this.tell();
    return el(
      "article",
      {},
      el("h2", {}, model.name, " ", el("span", { class: "faint" }, `version ${model.version}`), " ", this.state),
      this.about,
      section("Now", this.live.element),
      this.sequences && section("Sequences", this.sequences.element),
      section("Try it", tryIt(model)),
      section("Takes and gives", tensors("Inputs", model.inputs, model), tensors("Outputs", model.outputs, model)),
      section("Limits", this.facts),
    );
  }

  /** Answers a second, or null when it is not known yet. */
  get rate() {
    return this.live.charts.throughput.lines[0].values.at(-1) ?? null;
  }

  update(model, at) {
    this.model = model;
    this.live.add(at, model.counters);
    this.sequences?.update(model.sequences);
    if (this.built) this.tell();
  }

  /** Writes what may change, where it has changed: what is written again is read out again. */
  tell() {
    const { ready, failure, devices, counters } = this.model;
    this.state.className = `pill ${ready ? "good" : "bad"}`;
    change(this.state, ready ? "ready" : "not ready");
    const loaded = `loaded in ${duration(counters.load_seconds)}`;
    const about = [failure, devices.join(", "), loaded, batching(this.model.batching)];
    change(this.about, about.filter(Boolean).join(" · "));
    const shown = JSON.stringify(this.model.limits);
    if (this.shown !== shown) fill(this.facts, limits(this.model));
    this.shown = shown;
  }
}

const callOf = ({ dimensions, inputs, outputs, part, sequences }) =>
  JSON.stringify([dimensions, inputs, outputs, part, sequences && sequences.package]);

const parts = new Map(); // the installed parts of the page that are loaded, by name

/** Loads a part of the page: its script, and its style before anything is shown. */
function load(name) {
  if (!parts.has(name)) {
    const href = (file) => new URL(`page/parts/${name}/${file}`, document.baseURI).href;
    const styled = new Promise((resolve, reject) => {
      document.head.append(el("link", { rel: "stylesheet", href: href("part.css"), load: resolve, error: reject }));
    });
    parts.set(name, Promise.all([import(href("part.js")), styled]).then(([part]) => part));
  }
  return parts.get(name);
}

/** A try-it with plain tensors, behind that of the part which recognises the model's call, if there is one. */
function tryIt(model) {
  const plain = new TryAny(model).element;
  if (!model.part) return plain;
  const { name, facts } = model.part;
  const place = el("div", {}, el("p", { class: "faint loading" }, "Loading"));
  const others = el("details", {}, el("summary", {}, "Try it with plain tensors"), plain);
  load(name).then(
    (part) => fill(place, part.tryIt(model, facts), others),
    () => fill(place, el("p", { class: "problem" }, `The part ${name} of this page cannot be loaded.`), plain),
  );
  return place;
}

function change(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function section(title, ...content) {
  return el("section", { class: "card" }, el("h3", {}, title), content);
}

function tensors(title, list, model) {
  const rows = list.map((tensor) => {
    const sizes = ranges([tensor.shape], model.dimensions);
    const text = el("code", {}, `${tensor.dtype}${shape(tensor.shape)}`);
    const where = sizes ? el("span", { class: "faint" }, sizes) : null;
    return el("tr", {}, el("th", { scope: "row" }, dotted(tensor.name)), el("td", {}, text, where && " ", where));
  });
  const head = el("tr", {}, el("th", { scope: "col" }, title), el("th", { scope: "col" }, "dtype, sizes and their ranges"));
  return el("table", { class: "tensors", "aria-label": title }, el("thead", {}, head), el("tbody", {}, rows));
}

function batching({ enabled, reason, max_rows: rows, bit_equal: equal }) {
  if (!enabled) return `requests run alone: ${reason}`;
  const answers = equal ? "answers are equal to the last bit" : "answers may differ in the last bits";
  return `up to ${whole(rows)} rows run together, and ${answers}`;
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
