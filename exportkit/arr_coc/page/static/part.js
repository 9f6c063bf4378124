// The try-it for models that choose patches: a photograph, a region of it as the query, and what the model chose.

import { VIEWS, drawScale } from "./drawing.js";
import { el, fill } from "../../dom.js";
import { fit, read, sample } from "./picture.js";
import { RegionModel, regionQuery } from "./region_query.js";
import { Stage } from "./stage.js";
import { duration, element, short, whole } from "../../words.js";

/** Returns the try-it for a model of which the server found `facts`: see exportkit/arr_coc/page. */
export const tryIt = (model, facts) => new TryRegions(model, facts).element;

const SIDES = [256, 512, 768, 1024];
const SIDE = 768;

class TryRegions {
  constructor(model, facts) {
    this.model = new RegionModel(model, facts);
    this.patch = this.model.patch;
    this.answer = null;
    this.chosen = "budgets";
    this.stage = new Stage(this.patch, {
      drawn: (region) => this.draw(region),
      looked: (patch) => this.look(patch),
      dropped: (file) => this.open(file),
    });
    this.makeFields();
    this.said = el("p", { class: "said", "aria-live": "polite" });
    this.readout = el("p", { class: "readout", "aria-live": "polite" });
    this.legend = el("div", { class: "legend" });
    this.table = el("details", {}, el("summary", {}, "The chosen patches as a table"), el("div", { class: "scroll" }));
    this.element = el(
      "div",
      { class: "regions" },
      el("div", {}, this.stage.element, this.legend, this.readout),
      el("div", { class: "side" }, this.controls, this.said, this.table),
    );
    const { image, region } = sample();
    this.use(image, region);
  }

  makeFields() {
    const number = () => el("input", { type: "number", min: 0, step: 1, required: true, inputmode: "numeric" });
    this.numbers = { left: number(), top: number(), width: number(), height: number() };
    const file = el("input", {
      type: "file",
      accept: "image/*",
      change: () => file.files.length && this.open(file.files[0]),
    });
    const limit = this.patch * Math.max(this.model.limits.rows.max, this.model.limits.columns.max);
    const sides = [...SIDES.filter((side) => side < limit), ...(limit <= SIDES.at(-1) ? [limit] : [SIDES.at(-1)])];
    const preset = sides.includes(SIDE) ? SIDE : sides.at(-1);
    this.side = el(
      "select",
      { change: () => this.use(this.image, null) },
      [...new Set(sides)].map((side) => el("option", { value: side, selected: side === preset }, `${side} pixels`)),
    );
    const views = Object.entries(VIEWS).map(([name, { label }]) => {
      const radio = el("input", {
        type: "radio",
        name: `view-${this.model.model.name}-${this.model.model.version}`,
        value: name,
        checked: name === this.chosen,
        change: () => this.show(name),
      });
      return el("label", {}, radio, el("span", {}, label));
    });
    this.button = el("button", { type: "submit", class: "primary" }, "Find more like this");
    this.controls = el(
      "form",
      { submit: (event) => this.submit(event) },
      el("p", {}, "Drop or choose a photograph, and draw a rectangle on it. The model finds the patches that matter for it."),
      el("label", {}, "Photograph", file),
      el("div", { class: "pair" },
        el("label", {}, "Longer side, at most", this.side),
        el("button", { type: "button", click: () => this.useSample() }, "Use the drawn sample"),
      ),
      el(
        "fieldset",
        { class: "numbers" },
        el("legend", {}, "Region, in pixels"),
        Object.entries(this.numbers).map(([name, field]) => el("label", {}, name, field)),
      ),
      this.button,
      el("fieldset", { class: "views" }, el("legend", {}, "Show"), views),
    );
  }

  useSample() {
    const { image, region } = sample();
    this.use(image, region);
  }

  async open(file) {
    try {
      this.use(await read(file), null);
    } catch (error) {
      this.fail(error);
    }
  }

  /** Takes an image. Its `region` is in the image's own pixels; null: the middle. */
  use(image, region) {
    this.running?.abort();
    this.image = image;
    this.picture = fit(image, Number(this.side.value), this.patch, this.model.limits);
    const { width, height } = this.picture;
    const scale = width / image.width;
    this.answer = null;
    this.stage.setPicture(this.picture);
    const part = (value) => Math.round(value * scale);
    this.setRegion(
      region
        ? { left: part(region.left), top: part(region.top), width: part(region.width), height: part(region.height) }
        : { left: Math.round(0.4 * width), top: Math.round(0.4 * height), width: Math.round(0.2 * width), height: Math.round(0.2 * height) },
    );
    fill(this.said, `${width} x ${height} pixels: ${height / this.patch} rows and ${width / this.patch} columns of patches.`);
    this.readout.textContent = "";
    this.table.hidden = true;
    this.show(this.chosen);
  }

  setRegion(region) {
    this.region = region;
    this.stage.setRegion(region);
    for (const [name, field] of Object.entries(this.numbers)) {
      const across = name === "left" || name === "width";
      field.max = across ? this.picture.width : this.picture.height;
      field.min = name === "width" || name === "height" ? 1 : 0;
      field.value = region[name];
    }
  }

  draw(region) {
    this.setRegion(region);
    this.run();
  }

  submit(event) {
    event.preventDefault();
    const asked = Object.fromEntries(Object.entries(this.numbers).map(([name, field]) => [name, Number(field.value)]));
    const left = Math.min(asked.left, this.picture.width - 1);
    const top = Math.min(asked.top, this.picture.height - 1);
    const width = Math.min(asked.width, this.picture.width - left);
    const height = Math.min(asked.height, this.picture.height - top);
    this.setRegion({ left, top, width, height });
    this.run();
  }

  async run() {
    this.running?.abort();
    const running = (this.running = new AbortController());
    this.stage.element.setAttribute("aria-busy", "true");
    fill(this.said, "Running");
    try {
      const { query, requests } = await regionQuery(this.model, this.picture, this.region, running.signal);
      const all = { left: 0, top: 0, width: this.picture.width, height: this.picture.height };
      const { answer, seconds } = await this.model.run(this.picture, all, query, running.signal);
      if (running !== this.running || running.signal.aborted) return;
      this.answer = answer;
      this.tell(seconds, requests);
      this.fillTable();
      this.show(this.chosen);
      if (this.stage.place) this.stage.look(this.stage.place.row, this.stage.place.column);
    } catch (error) {
      if (error.name !== "AbortError") this.fail(error);
    } finally {
      if (running === this.running) this.stage.element.removeAttribute("aria-busy");
    }
  }

  tell(seconds, requests) {
    const { indices, budgets, relevance } = this.answer;
    const share = Math.round((100 * indices.length) / relevance.length);
    const tokens = budgets.reduce((all, budget) => all + budget, 0);
    fill(
      this.said,
      el("b", {}, `${whole(indices.length)} of ${whole(relevance.length)} patches`),
      ` kept (${share} %), `,
      el("b", {}, `${whole(tokens)} tokens`),
      ` in all. Answered in ${duration(seconds)}; `,
      `${requests} small requests before it read the query from the region.`,
    );
  }

  fail(error) {
    fill(this.said, el("span", { class: "problem", role: "alert" }, error.message));
  }

  show(name) {
    this.chosen = name;
    this.stage.draw(name, this.answer);
    const { stops, note, ends, unit } = VIEWS[name];
    if (this.answer === null) return fill(this.legend, "The region is outlined in cyan.");
    if (stops === null) return fill(this.legend, note);
    const scale = el("canvas", { width: 256, height: 1, "aria-hidden": "true" });
    drawScale(scale, stops);
    const [low, high] = ends(this.answer).map((value) => (Number.isInteger(value) ? whole(value) : short(value)));
    return fill(this.legend, scale, el("p", {}, el("span", {}, low), el("span", {}, unit), el("span", {}, high)));
  }

  /** Says what the model found out about a patch. */
  look(patch) {
    const columns = this.picture.width / this.patch;
    const place = `Row ${Math.floor(patch / columns) + 1}, column ${(patch % columns) + 1}`;
    if (this.answer === null) {
      this.readout.textContent = place;
      return;
    }
    const rank = this.answer.indices.indexOf(patch);
    const relevance = `relevance ${short(this.answer.relevance[patch])}`;
    const kept = rank < 0 ? "left out" : `kept as number ${rank + 1}, ${whole(this.answer.budgets[rank])} tokens`;
    this.readout.textContent = `${place}: ${kept}, ${relevance}`;
  }

  fillTable() {
    const columns = this.picture.width / this.patch;
    const { indices, budgets, scores } = this.answer;
    const rows = indices.map((patch, rank) => {
      const [row, column] = [Math.floor(patch / columns), patch % columns];
      const look = () => this.stage.look(row, column);
      const cells = [row + 1, column + 1, budgets[rank], element(scores[rank])].map((text) => el("td", {}, String(text)));
      return el("tr", { pointerenter: look }, el("th", { scope: "row" }, String(rank + 1)), cells);
    });
    const head = ["number", "row", "column", "tokens", "score"].map((name) => el("th", { scope: "col" }, name));
    const table = el("table", { "aria-label": "Chosen patches" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows));
    fill(this.table.lastElementChild, table);
    this.table.hidden = false;
  }
}
