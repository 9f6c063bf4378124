// A try-it for any model: sizes and what fills the inputs are chosen, the outputs' shapes and first values are shown.

import { dotted, el, fill } from "./dom.js";
import { SequenceField } from "./kept_sequence.js";
import { infer } from "./requests.js";
import { encode, floating, itemBytes, known, product } from "./tensors.js";
import { bytes, duration, element, shape } from "./words.js";

const FIRST = 8;

export class TryAny {
  constructor(model) {
    this.model = model;
    const unknown = model.inputs.find((input) => !known(input.datatype));
    this.result = el("div", { class: "result", "aria-live": "polite" });
    this.size = el("span", { class: "faint" });
    this.button = el("button", { type: "submit", class: "primary" }, "Run");
    this.sequence = model.sequences ? new SequenceField(model) : null;
    this.sizes = new Map(model.dimensions.map((one) => [one.name, this.sizeField(one)]));
    this.fills = new Map(model.inputs.map((input) => [input.name, fillField(input)]));
    this.element = unknown
      ? el("p", {}, `This page cannot make ${unknown.dtype} tensors, such as ${unknown.name} takes.`)
      : el(
          "form",
          { class: "any", submit: (event) => this.run(event) },
          this.sizes.size ? el("fieldset", {}, el("legend", {}, "Sizes"), this.sizeLabels()) : null,
          el("fieldset", {}, el("legend", {}, "Inputs"), this.inputLabels()),
          this.sequence?.element,
          el("div", { class: "row" }, this.button, this.size),
          this.result,
        );
    this.measure();
  }

  sizeField({ min, max }) {
    const attributes = { type: "number", min, max, value: min, step: 1, required: true, inputmode: "numeric" };
    return el("input", { ...attributes, input: () => this.measure() });
  }

  sizeLabels() {
    return this.model.dimensions.map(({ name, min, max }) => labelled(name, `${min}..${max}`, this.sizes.get(name)));
  }

  inputLabels() {
    return this.model.inputs.map(({ name, dtype, shape: sizes }) =>
      labelled(name, `${dtype} ${shape(sizes)}`, this.fills.get(name)),
    );
  }

  /** The inputs' shapes at the chosen sizes. */
  shapes() {
    const at = (size) => size.scale * Number(this.sizes.get(size.dimension).value) + size.offset;
    return this.model.inputs.map((input) => input.shape.map((size) => (typeof size === "number" ? size : at(size))));
  }

  measure() {
    const shapes = this.shapes();
    const count = this.model.inputs.reduce(
      (all, { datatype }, index) => all + (known(datatype) ? product(shapes[index]) * itemBytes(datatype) : 0),
      0,
    );
    this.size.textContent = `${bytes(count)} to send`;
  }

  async run(event) {
    event.preventDefault();
    this.button.disabled = true;
    fill(this.result, el("p", { class: "faint" }, "Running"));
    try {
      const shapes = this.shapes();
      const inputs = this.model.inputs.map(({ name, datatype }, index) => ({
        name,
        datatype,
        shape: shapes[index],
        data: encode(datatype, filled(datatype, product(shapes[index]), this.fills.get(name).value)),
      }));
      const answer = await infer(this.model, inputs, undefined, this.sequence?.parameters());
      this.sequence?.answered();
      this.show(answer);
    } catch (error) {
      const lost = this.sequence?.refused(error.status);
      fill(this.result, el("p", { class: "problem", role: "alert" }, error.message, lost && ` ${lost}`));
    }
    this.button.disabled = false;
  }

  show({ outputs, seconds }) {
    const rows = [...outputs].map(([name, { datatype, shape: sizes, values }]) => {
      const first = values === null ? "not shown" : Array.from(values.slice(0, FIRST), element).join(", ");
      const more = values !== null && values.length > FIRST ? ", …" : "";
      const kind = el("span", { class: "faint" }, `${datatype}${shape(sizes)}`);
      return el("tr", {}, el("th", { scope: "row" }, dotted(name)), el("td", {}, kind, el("code", {}, first + more || "empty")));
    });
    const head = ["output", "datatype, shape and first values"].map((text) => el("th", { scope: "col" }, text));
    fill(
      this.result,
      el("p", {}, "Answered in ", el("b", {}, duration(seconds)), ", both ways and this page included."),
      el("table", { class: "tensors", "aria-label": "Outputs" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows)),
    );
  }
}

const labelled = (name, note, field) => el("label", {}, el("b", {}, name), " ", el("small", {}, note), field);

function fillField({ datatype }) {
  // Whole numbers are often indices into something, where a large one would be refused or worse.
  const random = floating(datatype) ? "random, normal" : "random, 0 or 1";
  const options = [["zeros", "zeros"], ["ones", "ones"], ["random", random]];
  const chosen = floating(datatype) ? "random" : "zeros";
  return el(
    "select",
    {},
    options.map(([value, text]) => el("option", { value, selected: value === chosen }, text)),
  );
}

function filled(datatype, count, how) {
  const numbers = new Float64Array(count);
  if (how === "ones") return numbers.fill(1);
  if (how === "zeros") return numbers;
  const draw = floating(datatype) ? normal : () => Number(Math.random() < 0.5);
  return numbers.map(draw);
}

/** A number of the standard normal distribution (Box and Muller 1958). */
function normal() {
  return Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
}
