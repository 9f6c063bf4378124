// A query made from a rectangle: "more like this". It is the mean of the features of the rectangle's patches, weighted
// by area, as exportkit.arr_coc.model.region_query computes it.
//
// A package gives the features of the patches that it chooses, not of all. So the rectangle and the patches around it
// are sent as a small image of its own, in which few patches compete. This is exact for an encoder that sees a patch
// and its neighbours. An encoder that sees the whole image sees another image here.

import { infer } from "../../requests.js";
import { encode } from "../../tensors.js";
import { planes } from "./picture.js";

/** The model's call as the page makes it: an image, and a query of as many numbers as a feature has. */
export class RegionModel {
  constructor(model, { image, query, mask, patch, width }) {
    this.model = model;
    this.patch = patch;
    this.width = width;
    const named = (name) => model.inputs.find((input) => input.name === name) ?? null;
    this.image = named(image);
    this.query = named(query);
    this.mask = named(mask);
    const range = (size) => model.dimensions.find((one) => one.name === size.dimension);
    this.limits = { rows: range(this.image.shape[2]), columns: range(this.image.shape[3]) };
  }

  /** Runs the model on a rectangle of a picture, in pixels. Returns its outputs by name, and the seconds. */
  async run(canvas, rectangle, query, signal) {
    const { left, top, width, height } = rectangle;
    const inputs = [
      [this.image, [1, 3, height, width], planes(canvas, left, top, width, height)],
      [this.query, this.query.shape.length === 2 ? [1, this.width] : [1, 1, this.width], query],
      ...(this.mask ? [[this.mask, [1, 1], [1]]] : []),
    ];
    const tensors = inputs.map(([{ name, datatype }, shape, numbers]) => {
      return { name, datatype, shape, data: encode(datatype, numbers) };
    });
    const { outputs, seconds } = await infer(this.model, tensors, signal);
    return { answer: new Answer(outputs), seconds };
  }
}

/** What the model chose in one image: patches in the order of their relevance. */
export class Answer {
  constructor(outputs) {
    const values = (name) => outputs.get(name).values;
    this.relevance = values("relevance");
    this.indices = Array.from(values("indices"), Number);
    this.budgets = Array.from(values("budgets"), Number);
    this.scores = values("scores");
    this.features = values("features");
    this.scales = outputs.get("feature_scales")?.values; // of int8 features
    this.width = outputs.get("features").shape[2];
  }

  /** The rank of each patch that was kept, by its index. */
  ranks() {
    return new Map(this.indices.map((patch, rank) => [patch, rank]));
  }

  /** The features of the patch of a rank. */
  feature(rank) {
    const scale = this.scales?.[rank] ?? 1;
    return Array.from(this.features.subarray(rank * this.width, (rank + 1) * this.width), (value) => value * scale);
  }
}

/** Returns the query of a rectangle of a picture, and the number of requests that it took. */
export async function regionQuery(model, canvas, region, signal) {
  const { patch } = model;
  const sum = new Float64Array(model.width);
  const count = { requests: 0 };
  const first = { row: Math.floor(region.top / patch), column: Math.floor(region.left / patch) };
  const block = {
    ...first,
    rows: Math.ceil((region.top + region.height) / patch) - first.row,
    columns: Math.ceil((region.left + region.width) / patch) - first.column,
  };
  for (const { row, column, feature } of await features(model, canvas, block, signal, count)) {
    const area =
      overlap(region.top, region.height, row * patch, patch) * overlap(region.left, region.width, column * patch, patch);
    feature.forEach((value, index) => (sum[index] += area * value));
  }
  const total = region.width * region.height;
  return { query: Float32Array.from(sum, (value) => value / total), requests: count.requests };
}

/** The features of a block of patches. Where not all of them are chosen, its halves are asked for. */
async function features(model, canvas, block, signal, count) {
  const { patch } = model;
  const grid = { rows: canvas.height / patch, columns: canvas.width / patch };
  const [row, rows] = surrounded(block.row, block.rows, grid.rows, model.limits.rows.min);
  const [column, columns] = surrounded(block.column, block.columns, grid.columns, model.limits.columns.min);
  const rectangle = { left: column * patch, top: row * patch, width: columns * patch, height: rows * patch };
  // A query and its opposite, which say how features are gated by scores.
  const probes = [1, -1].map((sign) => new Float32Array(model.width).fill(sign));
  count.requests += probes.length;
  const runs = await Promise.all(probes.map((probe) => model.run(canvas, rectangle, probe, signal)));
  const read = ungated(...runs.map((run) => run.answer));
  const wanted = [];
  for (let index = 0; index < block.rows * block.columns; index++) {
    const place = { row: block.row + Math.floor(index / block.columns), column: block.column + (index % block.columns) };
    wanted.push({ ...place, feature: read.get((place.row - row) * columns + place.column - column) });
  }
  if (wanted.every((one) => one.feature)) return wanted;
  if (wanted.length === 1) throw new Error("The model does not give the features of this place: draw another region.");
  const found = [];
  for (const half of halves(block)) found.push(...(await features(model, canvas, half, signal, count)));
  return found;
}

/**
 * The features of the patches that two answers have, without the gate.
 *
 * Models multiply features by the patch's score, or leave them alone. Two queries give a patch two scores, so what
 * changes with them is gated.
 */
function ungated(one, other) {
  const ranks = other.ranks();
  const both = one.indices.flatMap((patch, rank) => (ranks.has(patch) ? [[rank, ranks.get(patch)]] : []));
  const [here, there] = both.reduce(
    (best, pair) => (difference(one, other, pair) > difference(one, other, best) ? pair : best),
    both[0] ?? [0, 0],
  );
  const size = one.feature(here).reduce((all, value) => all + Math.abs(value), 0);
  const change = one.feature(here).reduce((all, value, index) => all + Math.abs(value - other.feature(there)[index]), 0);
  const same = change <= 1e-3 * size && difference(one, other, [here, there]) > 1e-2;
  const read = new Map();
  for (const answer of [one, other]) {
    answer.indices.forEach((patch, rank) => {
      const gate = same ? 1 : answer.scores[rank];
      if (gate > 0) read.set(patch, answer.feature(rank).map((value) => value / gate));
    });
  }
  return read;
}

const difference = (one, other, [here, there]) => Math.abs(one.scores[here] / other.scores[there] - 1);

/** Grows a run of patches by one at each end, to at least `least`, within the image. */
function surrounded(start, length, count, least) {
  const low = Math.max(0, start - 1);
  const high = Math.min(count, Math.max(start + length + 1, low + least));
  const begin = Math.max(0, Math.min(low, high - least));
  return [begin, high - begin];
}

function halves(block) {
  const { row, column, rows, columns } = block;
  if (rows >= columns) {
    const top = Math.ceil(rows / 2);
    return [{ ...block, rows: top }, { ...block, row: row + top, rows: rows - top }];
  }
  const left = Math.ceil(columns / 2);
  return [{ ...block, columns: left }, { ...block, column: column + left, columns: columns - left }];
}

function overlap(start, length, low, side) {
  return Math.max(0, Math.min(start + length, low + side) - Math.max(start, low));
}

