// Puts the page together from the data in it. Text of the artifact becomes text nodes only.

import { el, fill } from "../../web/static/dom.js";
import { setUpTheme } from "../../web/static/theme.js";
import { GraphView } from "./graph_view.js";
import { callSection, card, caseSection, headSection, operatorSection, originSection, sizeSection, slowestSection, targetSection, verificationSection, weightSection } from "./sections.js";

const page = JSON.parse(document.getElementById("data").textContent);
const { section: operators, rows } = operatorSection(page);
const view = page.graph && new GraphView(page.graph, rows);
const go = (id) => {
  document.getElementById("graph").scrollIntoView({ block: "start" });
  view.go(view.model.nodes[id]);
};
const from = page.graph?.file ? [el("p", { class: "about" }, `From ${page.graph.file}, which was given beside the artifact.`)] : [];

setUpTheme(document.getElementById("theme"));
fill(
  document.getElementById("report"),
  headSection(page),
  card("graph", "Graph", ...from, view ? view.element : el("p", {}, page.no_graph)),
  page.graph?.profile && slowestSection(page.graph, go),
  callSection(page),
  operators,
  targetSection(page),
  sizeSection(page),
  weightSection(page),
  caseSection(page),
  verificationSection(page),
  originSection(page),
);
view?.start();
