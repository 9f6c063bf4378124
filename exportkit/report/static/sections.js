// The sections of the page.

import { dotted, el } from "../../web/static/dom.js";
import { errorHistogram, shareBar, treemap, valueHistogram } from "./charts.js";
import { bytesText, countText, numberText, shareText, shortened, timeText } from "./text.js";

const LISTED = 12; // rows of a long table that are shown at once
const DIGITS = 16; // of a digest
const NUMBER = /^(< )?[\d.,e+-]+( (µs|ms|s|kB|MB|GB|bytes|%))?$/;

/** What the file is, in a few words. */
export function headSection(data) {
  const signed = data.signatures.required.length
    ? ["good", "signed as required"]
    : data.signatures.files.length
      ? ["", "signature not checked"]
      : ["", "not signed"];
  const verified = data.verification && (data.verification.ok ? ["good", "verified"] : ["bad", "verification failed"]);
  return el(
    "header",
    { class: "about-file" },
    el("h2", {}, data.name, " ", el("span", { class: "faint" }, data.version)),
    el("p", { class: "about" }, `${data.file.name}, ${bytesText(data.file.size)}, ${data.made_by}`),
    el("p", { class: "pills" }, [signed, verified].filter(Boolean).map(([kind, text]) => el("span", { class: `pill ${kind}` }, text))),
  );
}

export function callSection({ methods }) {
  const parts = methods.map(({ name, inputs, outputs, dimensions }) => {
    const ranges = dimensions.map(([dimension, min, max]) => el("li", {}, el("code", {}, dimension), ` ${min} to ${max}`));
    return el(
      "div",
      { class: "method" },
      methods.length > 1 && el("h4", {}, "Method ", el("code", {}, name)),
      el("div", { class: "two" }, columns("Takes", ["input", "type"], inputs.map(named)), columns("Returns", ["output", "type", "held to"], outputs.map(named))),
      ranges.length > 0 && el("div", {}, el("h4", {}, "Ranges"), el("ul", { class: "ranges" }, ranges)),
    );
  });
  return card("call", methods.length > 1 ? "Methods" : "Inputs and outputs", ...parts);
}

export function stateSection({ state }) {
  if (!state.length) return null;
  return card(
    "state",
    "State",
    el("p", { class: "about" }, "What a session remembers between its calls. Each session has its own."),
    longColumns(["tensor", "type", "size", "use", "at first", "held to"], state.map(named), "tensors"),
  );
}

export function operatorSection(data) {
  const operators = data.operators.map(([name, schema, library]) => {
    const given = library !== null && data.libraries[library] ? data.libraries[library][0] : null;
    return [el("span", {}, el("b", {}, "◆ ", name), el("code", { class: "schema" }, schema)), given ? el("code", {}, given) : data.onnx.length ? "the ONNX model" : el("span", { class: "problem" }, "not in this artifact; exportkit package adds it")];
  });
  const libraries = data.libraries.map(([name, text, size, digest]) => [el("code", {}, name), text, bytesText(size), el("code", { title: digest }, digest.slice(0, DIGITS))]);
  return card(
    "operators",
    "Operators and libraries",
    operators.length ? columns("Custom operators that the model calls", ["operator", "library"], operators) : el("p", { class: "faint" }, "The model calls no custom operator."),
    libraries.length > 0 && columns("Libraries", ["library", "what it has and needs", "size", "sha256"], libraries),
  );
}

export function targetSection(data) {
  const rows = data.targets.map(([name, text, size]) => [el("code", {}, name), text, bytesText(size)]);
  const called = data.compiled_calls.map((row) => row.map((text) => el("code", {}, text)));
  const onnx = data.onnx.map((row) => [row[0], row.slice(1).join(", ")]);
  return card(
    "targets",
    "Where it runs",
    rows.length > 0 && columns("Compiled targets", ["target", "needs", "size"], rows),
    called.length > 0 && el("details", {}, el("summary", {}, `${countText(called.length, "call")} of operators by the compiled code, in order`), columns("", ["target", "operator", "arguments"], called)),
    data.program && el("p", {}, data.program),
    onnx.length > 0 && columns("ONNX model", ["part", "what"], onnx),
  );
}

/** A record's file, and whose code it is where there is a choice: `ending` keeps that when there is little room. */
function labelOf(name, code) {
  const file = name.split("/").pop().replace(/^(\d+)\.safetensors$/, "case $1");
  return code ? `${file}, ${code}` : file;
}

export function sizeSection(data) {
  const records = data.records.map(([name, size, kind, digest, owner, code]) => ({ name: owner ? `${owner}: ${name}` : name, label: owner ?? labelOf(name, code), path: name, size, kind, digest, owner }));
  const totals = new Map();
  for (const { kind, size } of records) totals.set(kind, (totals.get(kind) ?? 0) + size);
  const ordered = [...totals].sort((one, other) => other[1] - one[1]);
  const kinds = new Map(ordered.map(([kind], index) => [kind, index]));
  const total = ordered.reduce((sum, [, size]) => sum + size, 0) || 1;
  const legend = ordered.map(([kind, size]) => el("li", {}, el("span", { class: `swatch kind-${kinds.get(kind)}` }), `${kind} `, el("b", {}, bytesText(size)), ` ${shareText(size / total)}`));
  const rows = records.map(({ path, size, digest }) => [el("code", {}, path), bytesText(size), el("code", { title: digest }, digest?.slice(0, DIGITS) ?? "")]);
  return card(
    "sizes",
    "Sizes",
    treemap(records, kinds),
    el("ul", { class: "ranges" }, legend),
    el("details", {}, el("summary", {}, `All ${countText(records.length, "record")}`), columns("", ["record", "size", "sha256"], rows)),
  );
}

export function weightSection({ weights }) {
  if (!weights.count) return null;
  const largest = Math.max(1, ...weights.rows.map((row) => row[3]));
  const rows = weights.rows.map(([name, dtype, shape, size, state, aliases, stored]) => [
    el("span", {}, el("code", {}, dotted(name)), aliases > 0 && el("small", {}, ` and ${countText(aliases, "other name")}`)),
    `${dtype}[${shape.join(", ")}]`,
    el("span", { class: "share-of" }, shareBar(size / largest), bytesText(size)),
    stored ? (state ? "can be swapped" : "constant") : "not read",
  ]);
  return card("weights", "Weights", el("p", { class: "about" }, `${countText(weights.count, "tensor")}, ${bytesText(weights.bytes)} beside the code; ${weights.state} can be swapped.`), longColumns(["weight", "type", "size", "use"], rows, "weights"));
}

export function caseSection(data) {
  const compiled = compiledErrors(data.verification);
  const cases = data.cases.map(([calls, size, reference], index) => [`case ${index}`, calls, bytesText(size), reference ? `references in ${reference}` : "no references"]);
  const figures = data.numbers.map((output) => {
    const worst = compiled.get(titleOf(data, output));
    const marks = output.errors ? [
      { kind: "eager", name: "eager, greatest", value: output.errors.greatest },
      { kind: "allowed", name: "allowed, greatest", value: output.errors.greatest_allowed },
      ...(typeof worst?.greatest === "number" ? [{ kind: "compiled", name: "compiled, greatest", value: worst.greatest }] : []),
    ] : [];
    return el(
      "div",
      { class: "output" },
      el("h4", {}, el("code", {}, titleOf(data, output)), ` ${output.dtype}`),
      output.errors && errorHistogram(output.errors, marks),
      output.errors && el("p", { class: "marks" }, marks.map(({ kind, name, value }) => el("span", { class: `mark-name ${kind}` }, `${name} ${numberText(value)}`))),
      output.values && valueHistogram(output.values),
    );
  });
  const explained = data.numbers.some((output) => output.errors);
  return card(
    "cases",
    "Recorded cases",
    cases.length ? columns("", ["case", "calls", "size", ""], cases) : el("p", { class: "faint" }, "No call was recorded."),
    figures.length > 0 && el("p", { class: "about" }, explained
      ? "For each output, over all cases: how far eager's answers are from the reference, relative to its magnitude, on a scale of decades, and the values. Rows that an index selects are compared where the index is the same."
      : "For each output, over all cases: the recorded values."),
    el("div", { class: "figures" }, figures),
  );
}

/** Returns the name of a result: with its method where there are several; state has none. */
function titleOf({ methods }, { name, method }) {
  if (method === null) return `state ${name}`;
  return methods.length > 1 ? `${method}: ${name}` : name;
}

/** Returns the worst errors of compiled code by output. */
function compiledErrors(verification) {
  const worst = new Map();
  const most = (one, other) => (typeof one === "number" && typeof other === "number" ? Math.max(one, other) : typeof other === "string" ? other : one ?? other);
  for (const { verdict } of verification?.checks ?? []) {
    for (const { name, error, max_abs: difference, compared, mismatched } of verdict.outputs) {
      const found = worst.get(name) ?? { compared: 0, mismatched: 0 };
      worst.set(name, {
        rms: most(found.rms, error?.rms),
        greatest: most(found.greatest, error?.greatest),
        difference: most(found.difference, difference ?? undefined),
        compared: found.compared + compared,
        mismatched: found.mismatched + mismatched,
      });
    }
  }
  return worst;
}

export function verificationSection({ verification }) {
  if (!verification) return null;
  const outputs = [...compiledErrors(verification)].map(([name, found]) => [el("code", {}, name), found.compared.toLocaleString("en"), el("span", { class: found.mismatched ? "problem" : null }, found.mismatched.toLocaleString("en")), numberText(found.difference), numberText(found.rms), numberText(found.greatest)]);
  const checks = verification.checks.map(({ against, label, target, seconds, verdict }) => [
    el("span", { class: verdict.exit_code ? "problem short" : "good short" }, verdict.exit_code ? "failed" : "ok"),
    [target, against].filter(Boolean).join(", "),
    label,
    seconds === null ? "" : timeText(seconds * 1000),
    el("span", { class: "message" }, verdict.message),
  ]);
  const ran = verification.torch ? `torch ${verification.torch}` : verification.onnxruntime ? `ONNX Runtime ${verification.onnxruntime}` : "nothing was run";
  return card(
    "verification",
    "Verification",
    el("p", { class: "about" }, `${verification.ok ? "Every check passed" : "A check failed"}: ${verification.artifact}, ${ran}. Read from a file that exportkit verify --json printed; it does not name the artifact's digest.`),
    outputs.length > 0 && columns("Compiled beside the reference, the worst of all calls", ["output", "compared", "differ", "from eager", "rms error", "greatest error"], outputs),
    longColumns(["", "against", "call", "time", ""], checks, "checks"),
  );
}

export function originSection(data) {
  const { required, files } = data.signatures;
  const signatures = [
    ...required.map(([id, source]) => el("li", { class: "good" }, "signed by ", el("code", {}, id), `, as required (${source})`)),
    ...files.flatMap(([name, ids, problem]) => [
      ...ids.map((id) => el("li", {}, `${name} names `, el("code", {}, id), "; this page did not check it")),
      problem && el("li", { class: "problem" }, `${name}: ${problem}`),
    ]),
  ].filter(Boolean);
  const facts = [["made by", data.made_by], ["model", data.source], ["file sha256", data.file.sha256], ["manifest sha256", data.manifest_sha256]];
  return card(
    "origin",
    "Signatures and origin",
    el("ul", {}, signatures.length ? signatures : el("li", {}, "No signature file is beside the artifact.")),
    columns("", ["", ""], facts.map(([name, value]) => [name, el("code", {}, value)])),
    data.left_out.length > 0 && el("div", { class: "left-out" }, el("h4", {}, "Not on this page"), el("ul", {}, data.left_out.map((note) => el("li", {}, note)))),
  );
}

export function card(id, title, ...children) {
  if (!children.some(Boolean)) return null;
  return el("section", { class: "card", id, "aria-labelledby": `${id}-title` }, el("h3", { id: `${id}-title` }, title), children.map((child) => child || null));
}

function named([name, ...rest]) {
  return [el("code", {}, dotted(shortened(name, 120))), ...rest];
}

/** A table under a title. */
function columns(title, headings, rows) {
  if (!rows.length) return null;
  const row = (cells) => el("tr", {}, cells.map((cell) => el("td", { class: NUMBER.test(cell) && "number" }, cell)));
  const head = headings.some(Boolean) && el("thead", {}, el("tr", {}, headings.map((heading) => el("th", { scope: "col" }, heading))));
  return el("div", { class: "columns" }, title && el("h4", {}, title), el("table", {}, head || null, el("tbody", {}, rows.map(row))));
}

/** A table whose later rows are shown on demand. */
function longColumns(headings, rows, noun) {
  const rest = rows.length - LISTED;
  return el(
    "div",
    {},
    columns("", headings, rows.slice(0, LISTED)),
    rest > 0 && el("details", {}, el("summary", {}, `${rest} more ${noun}`), columns("", headings, rows.slice(LISTED))),
  );
}
