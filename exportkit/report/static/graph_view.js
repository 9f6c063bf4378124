// The graph with its tools: search, zoom, details of what is selected.

import { el, fill, svg } from "../../web/static/dom.js";
import { Camera } from "./graph_camera.js";
import { drawScene, tip } from "./graph_drawing.js";
import { groupDetails, nodeDetails } from "./graph_details.js";
import { Model, isShown, sceneOf } from "./scene.js";
import { countText, shortened } from "./text.js";

const STEP = 60; // pixels of an arrow key
const MOST_FOUND = 40;
const HELP =
  "Graph. Arrow keys go from node to node, Shift and arrow keys move the picture, plus and minus scale it, " +
  "0 shows all of it, Enter opens or closes a module, slash searches.";

export class GraphView {
  /** `operators` maps an operator's name to the element id of its row. */
  constructor(graph, operators) {
    this.model = new Model(graph);
    this.operators = operators;
    this.sizes = false; // whether the arithmetic of sizes is shown
    this.selected = null;
    this.layer = svg("g", {});
    this.view = svg("svg", { class: "graph", tabindex: 0, role: "application", "aria-label": HELP, keydown: (event) => this.key(event) }, tip(), this.layer);
    this.camera = new Camera(this.view, this.layer, (target, event) => this.click(target, event));
    this.details = el("div", { class: "details", role: "status" });
    this.found = el("ul", { class: "found", "aria-label": "Found nodes", hidden: true });
    this.field = el("input", {
      type: "search",
      placeholder: "Search nodes, modules, lines",
      "aria-label": "Search nodes, modules, lines",
      spellcheck: "false",
      input: () => this.search(),
      keydown: (event) => this.searchKey(event),
    });
    this.element = el(
      "div",
      { class: "graph-parts" },
      el("div", { class: "stage-side" }, this.tools(), el("div", {}, this.view, this.legend())),
      this.details,
    );
    this.model.openSome();
  }

  /** Draws for the first time, once the element is in the page. */
  start() {
    this.draw();
    this.camera.fit(this.scene, true);
    this.select(null);
    new ResizeObserver(() => this.camera.moved?.()).observe(this.view);
  }

  tools() {
    const button = (text, click, title) => el("button", { type: "button", title, click }, text);
    const several = this.model.groups.length > 1;
    const hidden = this.model.nodes.filter((node) => !isShown(node, false)).length;
    const box = el("input", { type: "checkbox", change: () => this.showSizes(box.checked) });
    return el(
      "div",
      { class: "tools" },
      el("div", { class: "search" }, this.field, this.found),
      button("+", () => this.camera.zoom(1.3), "Larger"),
      button("−", () => this.camera.zoom(1 / 1.3), "Smaller"),
      button("Fit", () => this.camera.fit(this.scene), "Show the whole graph"),
      several ? button("Open all", () => this.openAll(true), "Open all modules") : null,
      several ? button("Close all", () => this.openAll(false), "Close all modules") : null,
      hidden === 0 ? null : el("label", { class: "check", title: "Nodes that compute sizes, and checks" }, box, `sizes and checks (${hidden})`),
    );
  }

  legend() {
    const kinds = new Set(this.model.nodes.map((node) => node.kind));
    const item = (kind, text) => el("li", {}, el("span", { class: `swatch ${kind}` }), text);
    return el(
      "ul",
      { class: "key" },
      kinds.has("custom") ? item("custom", "◆ custom operator") : null,
      this.model.groups.length > 1 ? item("closed", "▸ module: open it with a double click") : null,
      this.model.timed ? item("heat", "share of the time") : null,
    );
  }

  draw() {
    this.scene = sceneOf(this.model, this.sizes);
    this.places = new Map(this.scene.boxes.map((box) => [box.key, box]));
    const drawing = drawScene(this.scene);
    this.elements = drawing.elements;
    fill(this.layer, ...drawing.all);
    this.mark();
  }

  /** Draws again, and keeps what is at `key` where it was in the view. */
  redraw(key) {
    const before = this.places.get(key);
    this.draw();
    const after = this.places.get(key);
    if (before && after) this.camera.move((before.x + before.width / 2 - after.x - after.width / 2) * this.camera.scale, (before.y - after.y) * this.camera.scale);
    else this.camera.fit(this.scene, true);
  }

  openAll(open) {
    this.model.openAll(open);
    this.draw();
    this.camera.fit(this.scene, true);
  }

  showSizes(shown) {
    this.sizes = shown;
    this.redraw(this.selected ? keyOf(this.selected) : "");
  }

  toggle(group) {
    group.open = !group.open;
    this.redraw(`g${group.id}`);
    this.select(group);
  }

  /** Selects a node or a module, or nothing. */
  select(item) {
    this.selected = item;
    this.mark();
    fill(this.details, ...(item ? this.describe(item) : [this.welcome()]));
  }

  describe(item) {
    const go = (other) => this.go(other);
    return item.items ? groupDetails(this.model, item, go, () => this.toggle(item)) : nodeDetails(this.model, item, go, this.operators);
  }

  welcome() {
    const nodes = this.model.nodes.filter((node) => node.index !== undefined);
    const custom = nodes.filter((node) => node.kind === "custom");
    const names = [...new Set(custom.map((node) => node.operator))];
    return el(
      "div",
      { class: "welcome" },
      el("p", {}, `${countText(nodes.length, "node")} in ${countText(this.model.groups.length - 1, "module")}, ${countText(custom.length, "call")} of custom operators.`),
      el("ul", {}, names.map((name) => el("li", {}, this.pick(custom.find((node) => node.operator === name), `◆ ${name}`)))),
      el("p", { class: "faint" }, "Select a node to see its shapes and its line of code. Drag to move, click and then use the wheel to zoom, double-click a module to open it. Keys: arrows, + −, 0, Enter, /"),
    );
  }

  pick(item, text) {
    return el("button", { type: "button", class: "link", click: () => this.go(item) }, text);
  }

  mark() {
    for (const element of this.layer.querySelectorAll(".selected, .near")) element.classList.remove("selected", "near");
    if (!this.selected) return;
    const key = keyOf(this.selected);
    this.elements.get(key)?.classList.add("selected");
    for (const path of this.elements.get(`arrows ${key}`) ?? []) path.classList.add("near");
  }

  /** Opens what an item is in, selects it and shows it. */
  go(item) {
    if (!item.items && !isShown(item, this.sizes)) this.sizes = this.element.querySelector(".check input").checked = true;
    this.model.reveal(item);
    this.draw();
    this.select(item);
    const place = this.places.get(keyOf(item));
    if (place) this.camera.show(place, true);
  }

  itemAt(target) {
    const key = target.closest?.("[data-key]")?.dataset.key;
    if (!key) return null;
    return key[0] === "n" ? this.model.nodes[Number(key.slice(1))] : this.model.groups[Number(key.slice(1))];
  }

  click(target, event) {
    const item = this.itemAt(target);
    const again = item && item === this.last?.item && event.timeStamp - this.last.time < 400;
    this.last = { item, time: event.timeStamp };
    if (again && item.items) this.toggle(item);
    else this.select(item);
  }

  key(event) {
    const [dx, dy] = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }[event.key] ?? [0, 0];
    const actions = {
      "+": () => this.camera.zoom(1.25),
      "=": () => this.camera.zoom(1.25),
      "-": () => this.camera.zoom(0.8),
      0: () => this.camera.fit(this.scene),
      "/": () => this.field.focus(),
      Escape: () => this.select(null),
      Enter: () => this.selected?.items && this.toggle(this.selected),
    };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (dx || dy) {
      if (event.shiftKey) this.camera.move(-dx * STEP, -dy * STEP);
      else this.step(dx, dy);
    } else if (actions[event.key]) actions[event.key]();
    else return;
    event.preventDefault();
  }

  /** Selects the nearest box in a direction. */
  step(dx, dy) {
    const boxes = this.scene.boxes.filter((box) => !box.open);
    const here = this.selected && this.places.get(keyOf(this.selected));
    const middle = (box) => [box.x + box.width / 2, box.y + Math.min(box.height, 40) / 2];
    let best = null;
    let least = Infinity;
    for (const box of boxes) {
      if (box === here) continue;
      const [x, y] = middle(box);
      const [fromX, fromY] = here ? middle(here) : [x, y - 1];
      const along = here ? (x - fromX) * dx + (y - fromY) * dy : y;
      const across = here ? Math.abs((x - fromX) * dy) + Math.abs((y - fromY) * dx) : Math.abs(x - this.scene.width / 2);
      const cost = along + 2 * across;
      if ((!here || along > 1) && cost < least) [best, least] = [box, cost];
    }
    if (!best) return;
    this.select(best.node ?? best.closed);
    this.camera.show(best);
  }

  search() {
    const words = this.field.value.toLowerCase().split(/\s+/).filter(Boolean);
    const all = words.length ? [...this.model.groups.slice(1), ...this.model.nodes] : [];
    const named = new Set(all.filter((item) => words.every((word) => nameText(item).includes(word))));
    const found = [...named, ...all.filter((item) => !named.has(item) && words.every((word) => otherText(item).includes(word)))];
    const rows = found.slice(0, MOST_FOUND).map((item) => {
      const where = item.items ? item.class : item.parent.path;
      const choose = () => {
        this.found.hidden = true;
        this.go(item);
        this.view.focus({ preventScroll: true });
      };
      const name = item.items ? item.path || item.name : item.name || item.title;
      return el("li", {}, el("button", { type: "button", click: choose }, el("b", {}, shortened(name, 44)), el("small", {}, `${item.items ? "" : `${item.title} · `}${where}`)));
    });
    const rest = found.length - rows.length;
    fill(this.found, ...rows, rest > 0 ? el("li", { class: "faint" }, `and ${rest} more`) : null, words.length && !found.length ? el("li", { class: "faint" }, "nothing found") : null);
    this.found.hidden = !words.length;
  }

  searchKey(event) {
    if (event.key === "Escape") {
      this.field.value = "";
      this.search();
      this.view.focus({ preventScroll: true });
    } else if (event.key === "Enter") this.found.querySelector("button")?.click();
    else if (event.key === "ArrowDown") this.found.querySelector("button")?.focus();
    else return;
    event.preventDefault();
  }
}

function keyOf(item) {
  return item.items ? `g${item.id}` : `n${item.id}`;
}

/** What an item is called, and where it is. */
function nameText(item) {
  item.nameText ??= (item.items ? [item.path, item.name, item.class] : [item.name, item.title, item.target, item.operator, item.parent.path]).join(" ").toLowerCase();
  return item.nameText;
}

/** That, its weights, and the lines that it was traced from. */
function otherText(item) {
  const lines = (item.frames ?? []).map(([file, line, , code]) => `${file}:${line} ${code}`);
  item.otherText ??= [nameText(item), ...(item.weights ?? []).map(([name]) => name), ...lines].join(" ").toLowerCase();
  return item.otherText;
}
