// Pictures of sizes and of errors.

import { el, svg } from "../../web/static/dom.js";
import { bytesText, countText, ending, numberText, shareText } from "./text.js";

const MAP_HEIGHT = 300;
const [NARROWEST, WIDEST] = [300, 1200]; // of the picture of the records
const [BARS_WIDTH, BARS_HEIGHT] = [320, 84];
const [MOST_CELLS, DEEPEST] = [24, 8]; // of one kind, and parts of a weight's name
const SMALLEST_CELL = 0.0004; // of the whole: smaller ones are drawn together

/** A picture of the records, with areas in proportion to their sizes. `kinds` gives the number of a kind's colour. */
export function treemap(records, kinds) {
  const total = records.reduce((sum, record) => sum + record.size, 0);
  if (!total) return null;
  const across = Math.max(NARROWEST, Math.min(WIDEST, document.documentElement.clientWidth - 80));
  const groups = new Map();
  for (const record of records) groups.set(record.kind, [...(groups.get(record.kind) ?? []), record]);
  const sum = (list) => list.reduce((size, record) => size + record.size, 0);
  const ordered = [...groups].map(([kind, list]) => ({ kind, list, size: sum(list) })).filter((each) => each.size).sort((one, other) => other.size - one.size);
  const cells = squarified(ordered, { x: 0, y: 0, width: across, height: MAP_HEIGHT }, total).flatMap(({ item, place }) => {
    const list = byModule(item.list);
    const large = list.filter((record) => record.size / total >= SMALLEST_CELL);
    const small = list.filter((record) => record.size && record.size / total < SMALLEST_CELL);
    if (small.length) large.push({ label: countText(small.length, "small record"), name: countText(small.length, "small record"), size: sum(small), kind: item.kind });
    return squarified(large, place, item.size).map((cell) => drawnCell(cell, kinds.get(item.kind), total));
  });
  const label = ordered.map(({ kind, size }) => `${kind} ${bytesText(size)}`).join(", ");
  return svg("svg", { class: "treemap", viewBox: `0 0 ${across} ${MAP_HEIGHT}`, role: "img", "aria-label": `Sizes: ${label}` }, cells);
}

/** Joins many weights to modules: to as small ones as there is room for. */
function byModule(records) {
  if (records.length <= MOST_CELLS || !records.every((record) => record.owner)) return records;
  const at = (depth) => Map.groupBy(records, ({ owner }) => owner.split(".").slice(0, depth).join("."));
  let groups = at(1);
  for (let depth = 2; depth <= DEEPEST; depth++) {
    const finer = at(depth);
    if (finer.size > MOST_CELLS) break;
    groups = finer;
  }
  return [...groups].map(([label, list]) => {
    const size = list.reduce((sum, record) => sum + record.size, 0);
    return { label, name: `${label}: ${countText(list.length, "weight")}`, size };
  });
}

function drawnCell({ item, place }, colour, total) {
  const title = svg("title", {}, `${item.name}\n${bytesText(item.size)}, ${shareText(item.size / total)}`);
  const letters = Math.floor((place.width - 12) / 8.3);
  const text = place.height > 24 && letters > 4 && svg("text", { x: place.x + 8, y: place.y + 19 }, ending(item.label, letters));
  const size = place.height > 44 && letters > 7 && svg("text", { class: "detail", x: place.x + 8, y: place.y + 37 }, bytesText(item.size));
  const [width, height] = [Math.max(0.5, place.width - 1.5), Math.max(0.5, place.height - 1.5)];
  return svg("g", { class: `cell kind-${colour}` }, title, svg("rect", { x: place.x, y: place.y, width, height, rx: 2 }), text, size);
}

/** Divides a rectangle among items, largest first, so that none is long and thin (Bruls, Huizing, van Wijk, 2000). */
function squarified(items, { x, y, width, height }, total) {
  const cells = [];
  let rest = [...items].sort((one, other) => other.size - one.size);
  let area = { x, y, width, height };
  const scale = (width * height) / Math.max(1, total);
  while (rest.length) {
    const side = Math.max(1e-9, Math.min(area.width, area.height));
    let count = 1;
    const worst = (number) => {
      const sizes = rest.slice(0, number).map((item) => Math.max(1e-9, item.size * scale));
      const sum = sizes.reduce((one, other) => one + other, 0);
      return Math.max((side * side * sizes[0]) / (sum * sum), (sum * sum) / (side * side * sizes[sizes.length - 1]));
    };
    while (count < rest.length && worst(count + 1) <= worst(count)) count += 1;
    const row = rest.slice(0, count);
    const thick = (row.reduce((sum, item) => sum + item.size, 0) * scale) / side;
    const tall = area.width >= area.height;
    let at = tall ? area.y : area.x;
    for (const item of row) {
      const length = thick > 0 ? (item.size * scale) / thick : 0;
      cells.push({ item, place: tall ? { x: area.x, y: at, width: thick, height: length } : { x: at, y: area.y, width: length, height: thick } });
      at += length;
    }
    area = tall
      ? { x: area.x + thick, y: area.y, width: Math.max(0, area.width - thick), height: area.height }
      : { x: area.x, y: area.y + thick, width: area.width, height: Math.max(0, area.height - thick) };
    rest = rest.slice(count);
  }
  return cells;
}

/** A histogram of errors on a scale of decades, with marks: eager's greatest error, the allowed one, others. */
export function errorHistogram(errors, marks) {
  const { bars, lowest, per_decade: perDecade, exact, infinite, count } = errors;
  const used = bars.flatMap((height, index) => (height ? [index] : []));
  const places = marks.filter(({ value }) => value > 0).map(({ value }) => (Math.log10(value) - lowest) * perDecade);
  const all = [...used, ...used.map((index) => index + 1), ...places];
  const from = Math.max(0, Math.floor((Math.min(...all, bars.length) - 1) / perDecade) * perDecade);
  const to = Math.min(bars.length, Math.ceil((Math.max(...all, from + 2 * perDecade) + 1) / perDecade) * perDecade);
  const step = BARS_WIDTH / Math.max(1, to - from);
  const decades = [];
  for (let index = from; index <= to; index += perDecade) decades.push(index);
  const every = Math.ceil(decades.length / 7);
  const labels = decades.filter((_, index) => index % every === 0).map((index) =>
    svg("text", { x: Math.min(BARS_WIDTH - 15, Math.max(15, (index - from) * step)), y: BARS_HEIGHT + 15, "text-anchor": "middle" }, `1e${lowest + index / perDecade}`),
  );
  const lines = marks.filter(({ value }) => value > 0).map(({ value, kind, name }) => {
    const x = Math.min(BARS_WIDTH, Math.max(0, ((Math.log10(value) - lowest) * perDecade - from) * step));
    return svg("line", { class: `mark ${kind}`, x1: x, x2: x, y1: 0, y2: BARS_HEIGHT }, svg("title", {}, `${name} ${numberText(value)}`));
  });
  const drawn = bars.slice(from, to).map((height, index) => ({ height, x: index * step }));
  const notes = [`${countText(count, "element")}`, exact && `${exact.toLocaleString("en")} exact`, infinite && `${infinite.toLocaleString("en")} infinite`];
  return figure(drawn, step, [...lines, ...labels], notes.filter(Boolean).join(", "), "Errors of eager", "");
}

/** A histogram of values. */
export function valueHistogram(values) {
  const { count, nan, infinite, zero, low, high, mean, bars } = values;
  const step = BARS_WIDTH / Math.max(1, bars?.length ?? 1);
  const labels = bars && [
    svg("text", { x: 0, y: BARS_HEIGHT + 15 }, numberText(low)),
    svg("text", { x: BARS_WIDTH, y: BARS_HEIGHT + 15, "text-anchor": "end" }, numberText(high)),
  ];
  const notes = [countText(count, "element"), mean !== undefined && `mean ${numberText(mean)}`, zero && `${zero.toLocaleString("en")} zero`, nan && `${nan.toLocaleString("en")} NaN`, infinite && `${infinite.toLocaleString("en")} infinite`];
  return figure((bars ?? []).map((height, index) => ({ height, x: index * step })), step, labels ?? [], notes.filter(Boolean).join(", "), "Values", "values-figure");
}

function figure(bars, step, others, caption, label, kind) {
  const highest = Math.max(1, ...bars.map(({ height }) => height));
  const rects = bars.filter(({ height }) => height).map(({ height, x }) => {
    const tall = Math.max(2, (height / highest) * BARS_HEIGHT);
    return svg("rect", { class: "bar", x: x + 0.5, y: BARS_HEIGHT - tall, width: Math.max(1, step - 1), height: tall }, svg("title", {}, height.toLocaleString("en")));
  });
  const base = svg("line", { class: "base", x1: 0, x2: BARS_WIDTH, y1: BARS_HEIGHT, y2: BARS_HEIGHT });
  return el(
    "figure",
    { class: kind },
    svg("svg", { class: "bars", viewBox: `-2 -2 ${BARS_WIDTH + 4} ${BARS_HEIGHT + 20}`, role: "img", "aria-label": `${label}: ${caption}` }, rects, base, others),
    el("figcaption", {}, `${label}: ${caption}`),
  );
}

/** A bar for a share from 0 to 1. */
export function shareBar(share) {
  const bar = svg("rect", { class: "bar", width: Math.max(0.5, 100 * Math.min(1, share)), height: 8, rx: 2 });
  return svg("svg", { class: "share", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" }, bar);
}
