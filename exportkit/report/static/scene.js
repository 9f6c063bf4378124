// What is drawn of a graph: boxes of nodes and of modules, which are closed or open, and the arrows between them.

import { placeInLayers } from "./layers.js";
import { countText, shortened, timeText } from "./text.js";

const CHARACTER = 6.65; // pixels, of the monospaced font of 11 pixels
const LINE = 15;
const PADDING = 9;
const HEAD = 24; // of an open module
const LONGEST = 34; // characters in a line
const PORT = 10;
const [FEW, AT_FIRST] = [8, 72]; // boxes that are shown at first: at least, and at most

export class Model {
  /** Takes the graph as the page has it, and numbers its modules. */
  constructor(graph) {
    this.nodes = graph.nodes.map((node, id) => ({ ...node, id, users: [], ms: graph.profile?.nodes[node.index]?.[0] }));
    this.edges = graph.edges;
    this.groups = [];
    this.root = this.groupOf(graph.tree, null);
    for (const [from, to] of this.edges) this.nodes[from].users.push(to);
    this.total = this.nodes.reduce((sum, node) => sum + (node.ms ?? 0), 0);
    this.timed = Boolean(graph.profile);
    this.slowest = Math.max(0, ...this.nodes.map((node) => node.ms ?? 0));
  }

  groupOf(tree, parent) {
    const group = { id: this.groups.length, ...tree, parent, open: parent === null, members: 0, ms: 0, custom: 0 };
    this.groups.push(group);
    group.items = tree.items.map((item) => {
      if (typeof item !== "number") return this.groupOf(item, group);
      this.nodes[item].parent = group;
      return this.nodes[item];
    });
    for (const item of group.items) {
      const inner = item.items !== undefined;
      group.members += inner ? item.members : Number(isShown(item, false));
      group.ms += item.ms ?? 0;
      group.custom += inner ? item.custom : Number(item.kind === "custom");
    }
    return group;
  }

  /** Opens modules, the outer ones first, as long as the picture stays small: of one class all of them or none. */
  openSome() {
    for (const group of this.groups) group.open = group === this.root;
    let shown = this.root.items.length;
    let level = [this.root];
    while (level.length) {
      const next = level.flatMap((group) => group.items.filter((item) => item.items));
      const alike = new Map();
      for (const group of next) alike.set(group.class, [...(alike.get(group.class) ?? []), group]);
      const more = (groups) => groups.reduce((sum, group) => sum + group.items.length, 0);
      for (const groups of [...alike.values()].sort((one, other) => more(one) - more(other))) {
        if (shown + more(groups) > AT_FIRST && shown >= FEW) continue;
        for (const group of groups) group.open = true;
        shown += more(groups);
      }
      level = next.filter((group) => group.open);
    }
  }

  openAll(open) {
    for (const group of this.groups) group.open = open || group === this.root;
  }

  /** Opens the modules that a node or a module is in. */
  reveal(item) {
    for (let group = item.parent; group; group = group.parent) group.open = true;
  }

  /** The share of the whole time that a node or a module took, from 0 to 1. */
  share(item) {
    return this.total > 0 ? (item.ms ?? 0) / this.total : 0;
  }
}

export function isShown(node, all) {
  return all || (node.kind !== "size" && node.kind !== "check");
}

/** Returns {width, height, boxes, arrows} of what is open. `all` shows the arithmetic of sizes too. */
export function sceneOf(model, all) {
  const scene = { boxes: [], arrows: [] };
  const whole = groupPicture(model, model.root, all);
  flatten(whole, 0, 0, scene);
  scene.width = whole.width;
  scene.height = whole.height;
  return scene;
}

/** Places what is in an open group. Values from outside enter at ports on its upper edge, and leave at its lower one. */
function groupPicture(model, group, all) {
  const boxes = [];
  const boxOf = new Map(); // by node: the box in this group that has it
  for (const item of group.items) {
    const members = [...nodesOf(item)].filter((node) => isShown(node, all));
    if (!members.length) continue;
    const box = item.items === undefined ? nodeBox(model, item) : item.open ? groupPicture(model, item, all) : closedBox(model, item);
    boxes.push(box);
    for (const node of members) boxOf.set(node.id, box);
  }
  const [inside, ports] = [new Map(), { in: new Map(), out: new Map() }];
  const link = (from, to, value) => inside.set(`${from.key} ${to.key} ${value}`, { from, to, value });
  const port = (side, value, pin) => {
    if (!ports[side].has(value)) ports[side].set(value, { key: `${side}${value}`, port: true, width: PORT, height: 0, pin });
    return ports[side].get(value);
  };
  for (const [source, target] of model.edges) {
    if (!isShown(model.nodes[source], all) || !isShown(model.nodes[target], all)) continue;
    const [from, to] = [boxOf.get(source), boxOf.get(target)];
    if (from && to && from !== to) link(from, to, source);
    else if (!from && to) link(port("in", source, "top"), to, source);
    else if (from && !to) link(from, port("out", source, "bottom"), source);
  }
  const placed = [...ports.in.values(), ...boxes, ...ports.out.values()];
  const places = new Map(placed.map((box, index) => [box, index]));
  const links = [...inside.values()];
  const layout = placeInLayers(placed, links.map(({ from, to }) => [places.get(from), places.get(to)]));
  const title = group.parent ? `${group.name}${group.class ? ` · ${group.class}` : ""}` : "";
  const margin = group.parent ? PADDING + 4 : 0;
  const head = group.parent ? HEAD : 0;
  const width = Math.max(layout.width + 2 * margin, title.length * CHARACTER + 46);
  const shift = (width - layout.width) / 2;
  // Between the upper edge and the first boxes there is room for the name, and for arrows from the ports.
  const top = ports.in.size ? 0 : head;
  for (const box of placed) {
    box.x += shift;
    box.y += top;
  }
  const bottom = ports.out.size ? 0 : margin;
  const arrows = links.map((each, index) => ({ ...each, way: layout.ways[index].map(([x, y]) => [x + shift, y + top]) }));
  return { key: `g${group.id}`, group, title, boxes, arrows, ports, width, height: layout.height + top + bottom, x: 0, y: 0 };
}

function* nodesOf(item) {
  if (item.items === undefined) yield item;
  else for (const each of item.items) yield* nodesOf(each);
}

function nodeBox(model, node) {
  const lines = [shortened(node.kind === "custom" ? `◆ ${node.title}` : node.title, LONGEST)];
  const type = node.out[0]?.[1];
  if (type) lines.push(shortened(node.out.length > 1 ? `${type} +${node.out.length - 1}` : type, LONGEST));
  if (node.ms !== undefined) lines.push(timeText(node.ms));
  return boxWith(`n${node.id}`, lines, { node, heat: model.slowest ? (node.ms ?? 0) / model.slowest : 0 });
}

function closedBox(model, group) {
  const lines = [shortened(`▸ ${group.name}`, LONGEST)];
  if (group.class) lines.push(shortened(group.class, LONGEST));
  lines.push(countText(group.members, "node") + (group.custom ? `, ${group.custom} ◆` : ""));
  if (model.timed) lines.push(timeText(group.ms));
  return boxWith(`g${group.id}`, lines, { closed: group, heat: model.share(group) });
}

function boxWith(key, lines, rest) {
  const width = Math.max(64, Math.max(...lines.map((line) => line.length)) * CHARACTER + 2 * PADDING);
  return { key, lines, width, height: lines.length * LINE + 2 * PADDING - 5, ...rest };
}

/** Adds a picture's boxes and arrows to the scene, with positions in the scene. */
function flatten(picture, x, y, scene) {
  if (picture.group.parent) scene.boxes.push({ ...picture, x, y, open: picture.group });
  for (const { from, to, value, way } of picture.arrows) {
    const points = [exit(from, value), ...way, entry(to, value)].map(([a, b]) => [a + x, b + y]);
    scene.arrows.push({ points, value, tip: !to.port && !to.group, ends: [from.key, to.key] });
  }
  for (const box of picture.boxes) {
    if (box.group) flatten(box, x + box.x, y + box.y, scene);
    else scene.boxes.push({ ...box, x: x + box.x, y: y + box.y });
  }
}

function exit(box, value) {
  const port = box.ports?.out.get(value);
  return [box.x + (port ? port.x + PORT / 2 : box.width / 2), box.y + (port ? box.height : box.height)];
}

function entry(box, value) {
  const port = box.ports?.in.get(value);
  return [box.x + (port ? port.x + PORT / 2 : box.width / 2), box.y];
}
