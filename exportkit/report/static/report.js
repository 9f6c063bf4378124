// Puts the page together from the data in it. Text of the artifact becomes text nodes only.

import { el, fill } from "../../web/static/dom.js";
import { setUpTheme } from "../../web/static/theme.js";
import { GraphView } from "./graph_view.js";
import { callSection, card, caseSection, headSection, operatorSection, originSection, sizeSection, slowestSection, stateSection, targetSection, verificationSection, weightSection } from "./sections.js";

const page = JSON.parse(document.getElementById("data").textContent);
const { section: operators, rows } = operatorSection(page);
const views = new Map(); // by graph: what was opened in one stays open while another is shown
const stage = el("div", {});
let view = null;

function show(graph) {
  const known = views.has(graph);
  if (!known) views.set(graph, new GraphView(graph, rows));
  view = views.get(graph);
  fill(stage, view.element);
  if (!known) view.start();
}

function chooser(graphs) {
  if (graphs.length < 2) return null;
  const box = el("select", { "aria-label": "Method", change: () => show(graphs[box.selectedIndex]) }, graphs.map(({ method }) => el("option", {}, method)));
  return el("label", { class: "chosen-method" }, "Method ", box);
}

const profiled = page.graphs.find((graph) => graph.profile);
const chosen = chooser(page.graphs);
const go = (id) => {
  if (chosen) chosen.querySelector("select").selectedIndex = page.graphs.indexOf(profiled);
  show(profiled);
  document.getElementById("graph").scrollIntoView({ block: "start" });
  view.go(view.model.nodes[id]);
};
const file = page.graphs[0]?.file;
const from = file ? [el("p", { class: "about" }, `From ${file}, which was given beside the artifact.`)] : [];

setUpTheme(document.getElementById("theme"));
fill(
  document.getElementById("report"),
  headSection(page),
  card("graph", "Graph", ...from, chosen, page.graphs.length ? stage : el("p", {}, page.no_graph)),
  profiled && slowestSection(profiled, go),
  callSection(page),
  stateSection(page),
  operators,
  targetSection(page),
  sizeSection(page),
  weightSection(page),
  caseSection(page),
  verificationSection(page),
  originSection(page),
);
if (page.graphs.length) show(page.graphs[0]);
