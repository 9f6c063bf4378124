// What a model takes and gives, as a form: an input is chosen, and the first values of each output are shown.

import { dotted, el, fill } from "./dom.js";
import { curl, infer } from "./requests.js";
import { encode, numbersIn } from "./tensors.js";
import { duration, element, shape } from "./words.js";

const FIRST = 8;
const OWN = "own values";
const SEQUENCE = `page-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`; // the methods of a package share it

export class TryIt {
  constructor(model) {
    this.model = model;
    this.sizes = new Map(model.dimensions.map((one) => [one.name, number(one)]));
    this.own = new Map(model.inputs.map(({ name }) => [name, ownValues(name)]));
    this.fills = new Map(model.inputs.map((input) => [input.name, this.filling(input)]));
    this.step = model.sequences && choice("start", "continue", "end");
    this.values = new Map(model.outputs.map((output) => [output.name, el("code", {})]));
    this.button = el("button", { class: "primary" }, "Run");
    this.said = el("p", { role: "status" });
    this.command = el("pre", { "aria-label": "The same with curl" });
    this.shown = el("details", { class: "row", hidden: true }, el("summary", {}, "The same with curl"), this.command);
    this.element = el(
      "form",
      { class: "any", submit: (event) => this.run(event) },
      model.dimensions.map(({ name, min, max }) => labelled(name, `${min}..${max}`, this.sizes.get(name))),
      model.inputs.map((input) => labelled(input.name, kind(input), this.fills.get(input.name), this.own.get(input.name))),
      this.step && labelled("sequence", "steps with state", this.step),
      el("div", { class: "row" }, this.button, this.said),
      this.shown,
      el("table", { "aria-label": "Outputs" }, el("tbody", {}, model.outputs.map((output) => this.row(output)))),
    );
  }

  filling(input) {
    const chosen = choice(...fillings(input), OWN);
    chosen.addEventListener("change", () => (this.own.get(input.name).hidden = chosen.value !== OWN));
    return chosen;
  }

  row(output) {
    const cell = el("td", {}, el("span", { class: "faint" }, kind(output)), this.values.get(output.name));
    return el("tr", {}, el("th", { scope: "row" }, dotted(output.name)), cell);
  }

  async run(event) {
    event.preventDefault();
    this.button.disabled = true;
    const step = this.step?.value;
    const more = step && { sequence_id: SEQUENCE, sequence_start: step === "start", sequence_end: step === "end" };
    try {
      const tensors = this.model.inputs.map(this.tensor, this);
      fill(this.command, curl(this.model, tensors, more));
      this.shown.hidden = false;
      const inputs = tensors.map(({ numbers, ...tensor }) => ({ ...tensor, data: encode(tensor.datatype, numbers) }));
      const { outputs, seconds } = await infer(this.model, inputs, undefined, more);
      for (const [name, output] of outputs) fill(this.values.get(name), first(output));
      fill(this.said, `Answered in ${duration(seconds)}, both ways and this page included.`);
      if (step) this.step.value = step === "end" ? "start" : "continue";
    } catch (error) {
      for (const value of this.values.values()) fill(value);
      fill(this.said, el("span", { class: "problem" }, error.message));
    }
    this.button.disabled = false;
  }

  tensor({ name, datatype, shape: sizes }) {
    const at = (size) => size.scale * Number(this.sizes.get(size.dimension).value) + size.offset;
    const shape = sizes.map((size) => (typeof size === "number" ? size : at(size)));
    const length = shape.reduce((all, size) => all * size, 1);
    const filling = this.fills.get(name).value;
    const value = { zeros: () => 0, ones: () => 1, random: normal }[filling];
    const numbers = filling === OWN ? numbersIn(this.own.get(name).value) : Array.from({ length }, value);
    if (numbers.length !== length) throw new Error(`${name} takes ${length} values, and ${numbers.length} are given`);
    return { name, datatype, shape, numbers };
  }
}

const kind = (tensor) => `${tensor.dtype}${shape(tensor.shape)}`;
const labelled = (name, note, ...fields) => el("label", {}, el("b", {}, name), " ", el("small", {}, note), ...fields);
const number = ({ min, max }) => el("input", { type: "number", min, max, value: min, required: true });
const ownValues = (name) => el("input", { placeholder: "1, 2.5, -3", "aria-label": `values of ${name}`, hidden: true });
const choice = (...values) => el("select", {}, values.map((value) => el("option", {}, value)));
// Whole numbers are often indices into something, where a random one would be refused or worse.
const fillings = ({ dtype }) => (dtype.includes("float") ? ["random", "zeros", "ones"] : ["zeros", "ones"]);

/** A number of the standard normal distribution (Box and Muller 1958). */
const normal = () => Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());

function first({ shape: sizes, values }) {
  const more = values.length > FIRST ? ", …" : "";
  return `${shape(sizes)} ${Array.from(values.slice(0, FIRST), element).join(", ")}${more}`;
}
