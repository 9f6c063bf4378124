// Draws a scene as SVG.

import { svg } from "../../web/static/dom.js";

const LINE_HEIGHT = 15;

/** Returns the elements of a scene, and those of its boxes by key. */
export function drawScene(scene) {
  const elements = new Map();
  const frames = scene.boxes.filter((box) => box.open).map((box) => drawn(box, frame, elements));
  const arrows = scene.arrows.map((arrow) => {
    const path = svg("path", { class: "arrow", d: curve(arrow.points), "marker-end": arrow.tip && "url(#tip)" });
    for (const key of arrow.ends) (elements.get(`arrows ${key}`) ?? elements.set(`arrows ${key}`, []).get(`arrows ${key}`)).push(path);
    return path;
  });
  const boxes = scene.boxes.filter((box) => !box.open).map((box) => drawn(box, filledBox, elements));
  return { elements, all: [...frames, ...arrows, ...boxes] };
}

/** The tip of the arrows. */
export function tip() {
  const shape = svg("path", { d: "M0,0 L7,3 L0,6 Z" });
  return svg("defs", {}, svg("marker", { id: "tip", viewBox: "0 0 7 6", refX: 6, refY: 3, markerWidth: 7, markerHeight: 6, markerUnits: "userSpaceOnUse", orient: "auto" }, shape));
}

function drawn(box, draw, elements) {
  const element = draw(box);
  element.dataset.key = box.key;
  elements.set(box.key, element);
  return element;
}

function frame(box) {
  return svg(
    "g",
    { class: `box open depth-${depth(box.group) % 2}`, transform: `translate(${box.x},${box.y})` },
    svg("rect", { class: "shape", width: box.width, height: box.height, rx: 8 }),
    svg("text", { class: "name", x: 12, y: 16 }, `▾ ${box.title}`),
  );
}

function depth(group) {
  return group.parent ? 1 + depth(group.parent) : 0;
}

function filledBox(box) {
  const kind = box.node?.kind ?? "closed";
  const round = kind === "input" || kind === "output" ? box.height / 2 : 5;
  const shape = { width: box.width, height: box.height, rx: round };
  return svg(
    "g",
    { class: `box ${kind}`, transform: `translate(${box.x},${box.y})` },
    box.closed && svg("rect", { class: "shape behind", ...shape, x: 4, y: 4 }),
    svg("rect", { class: "shape", ...shape }),
    box.heat > 0 && svg("rect", { class: "heat", ...shape, "fill-opacity": (0.75 * Math.sqrt(Math.min(1, box.heat))).toFixed(3) }),
    box.lines.map((line, index) =>
      svg("text", { class: index ? "detail" : "name", x: box.width / 2, y: 18 + index * LINE_HEIGHT, "text-anchor": "middle" }, line),
    ),
  );
}

/** A line through points, vertical at each of them. */
function curve(points) {
  let path = `M${points[0][0].toFixed(1)},${points[0][1].toFixed(1)}`;
  for (let index = 1; index < points.length; index++) {
    const [[x0, y0], [x1, y1]] = [points[index - 1], points[index]];
    if (Math.abs(x0 - x1) < 0.05) path += `V${y1.toFixed(1)}`;
    else {
      const middle = ((y0 + y1) / 2).toFixed(1);
      path += `C${x0.toFixed(1)},${middle} ${x1.toFixed(1)},${middle} ${x1.toFixed(1)},${y1.toFixed(1)}`;
    }
  }
  return path;
}
