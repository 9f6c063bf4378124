// Places boxes in layers from top to bottom, each arrow from a box to one below it: the method of Sugiyama, Tagawa and
// Toda (1981). Arrows from one box share their way down. The boxes come in an order in which each is after its sources.

const SWEEPS = 16;
const BETWEEN_BOXES = 18;
const BETWEEN_LAYERS = 34;
const LANE = 8; // the width of an arrow that passes a layer
const STRAIGHT = 4; // how much a long arrow keeps its direction

/**
 * Sets x and y, the upper left corner, of each box, and returns {width, height, ways}. A way is the list of points at
 * which an arrow passes the layers between its ends.
 *
 * A box is {width, height, pin}, where pin is "top" or "bottom" if it belongs there. An arrow is [from, to], places in
 * the list of boxes.
 */
export function placeInLayers(boxes, arrows) {
  if (!boxes.length) return { width: 0, height: 0, ways: [] };
  const rank = ranksOf(boxes, arrows);
  const cells = boxes.map((box, index) => ({ box, width: box.width, rank: rank[index], above: [], below: [] }));
  const lanes = arrows.map(([from, to]) => laneTo(cells, from, to, rank));
  const layers = [];
  for (const cell of cells) (layers[cell.rank] ??= []).push(cell);
  const filled = layers.filter(Boolean);
  order(filled);
  position(filled);
  const left = Math.min(...cells.map((cell) => cell.x - cell.width / 2));
  let y = 0;
  for (const layer of filled) {
    const height = Math.max(...layer.map((cell) => cell.box?.height ?? 0));
    for (const cell of layer) {
      cell.x -= left;
      cell.top = y;
      cell.bottom = y + height;
      if (cell.box) {
        cell.box.x = cell.x - cell.width / 2;
        cell.box.y = cell.box.pin === "top" ? y : cell.box.pin === "bottom" ? y + height - cell.box.height : y + (height - cell.box.height) / 2;
      }
    }
    y += height + BETWEEN_LAYERS;
  }
  const width = Math.max(...cells.map((cell) => cell.x + cell.width / 2));
  const ways = lanes.map((lane) => lane.flatMap((cell) => [[cell.x, cell.top], [cell.x, cell.bottom]]));
  return { width, height: y - BETWEEN_LAYERS, ways };
}

function ranksOf(boxes, arrows) {
  const sources = boxes.map(() => []);
  const targets = boxes.map(() => []);
  for (const [from, to] of arrows) {
    sources[to].push(from);
    targets[from].push(to);
  }
  const first = boxes.some((box) => box.pin === "top") ? 1 : 0;
  const rank = [];
  boxes.forEach((box, index) => {
    rank[index] = box.pin === "top" ? 0 : Math.max(first, ...sources[index].map((source) => rank[source] + 1));
  });
  for (let index = boxes.length - 1; index >= 0; index--) {
    // What needs nothing stands just above what needs it first.
    if (boxes[index].pin || sources[index].length || !targets[index].length) continue;
    rank[index] = Math.max(first, Math.min(...targets[index].map((target) => rank[target])) - 1);
  }
  const last = Math.max(0, ...rank.filter((_, index) => boxes[index].pin !== "bottom"));
  boxes.forEach((box, index) => {
    if (box.pin === "bottom") rank[index] = last + 1;
  });
  return rank;
}

/** Returns the cells between the ends of an arrow. They are made once for each box that arrows start from. */
function laneTo(cells, from, to, rank) {
  const start = cells[from];
  start.lane ??= [];
  let upper = start;
  for (let layer = rank[from] + 1; layer < rank[to]; layer++) {
    const place = layer - rank[from] - 1;
    if (!start.lane[place]) {
      const cell = { box: null, width: LANE, rank: layer, above: [upper], below: [] };
      upper.below.push(cell);
      start.lane[place] = cell;
      cells.push(cell);
    }
    upper = start.lane[place];
  }
  upper.below.push(cells[to]);
  cells[to].above.push(upper);
  return start.lane.slice(0, Math.max(0, rank[to] - rank[from] - 1));
}

/** Orders each layer so that few arrows cross. */
function order(layers) {
  const number = (layer) => layer.forEach((cell, index) => (cell.at = index));
  layers.forEach(number);
  let best = layers.map((layer) => [...layer]);
  let fewest = crossings(layers);
  for (let sweep = 0; sweep < SWEEPS && fewest; sweep++) {
    const down = sweep % 2 === 0;
    for (const layer of down ? layers.slice(1) : layers.slice(0, -1).reverse()) {
      for (const cell of layer) {
        const beside = down ? cell.above : cell.below;
        cell.wanted = beside.length ? beside.reduce((sum, other) => sum + other.at, 0) / beside.length : cell.at;
      }
      layer.sort((one, other) => one.wanted - other.wanted);
      number(layer);
    }
    const found = crossings(layers);
    if (found < fewest) {
      fewest = found;
      best = layers.map((layer) => [...layer]);
    }
  }
  best.forEach((layer, index) => {
    layers[index] = layer;
    number(layer);
  });
}

/** Counts the pairs of arrows that cross, layer by layer, with a tree of partial sums. */
function crossings(layers) {
  let count = 0;
  for (let index = 1; index < layers.length; index++) {
    const sums = new Array(layers[index].length + 1).fill(0);
    let seen = 0;
    for (const cell of layers[index - 1]) {
      const ends = cell.below.map((below) => below.at).sort((one, other) => one - other);
      for (const end of ends) {
        let before = 0;
        for (let i = end + 1; i > 0; i -= i & -i) before += sums[i];
        count += seen - before;
      }
      for (const end of ends) {
        seen += 1;
        for (let i = end + 1; i < sums.length; i += i & -i) sums[i] += 1;
      }
    }
  }
  return count;
}

/** Puts everything as close to its neighbours as the order in its layer allows. */
function position(layers) {
  for (const layer of layers) {
    for (const cell of layer) cell.wanted = 0;
    spread(layer);
  }
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    for (const layer of sweep % 2 === 0 ? layers : [...layers].reverse()) {
      for (const cell of layer) {
        const beside = [...cell.above, ...cell.below];
        const weight = (other) => (cell.box ? 1 : other.box ? 1 : STRAIGHT);
        const weights = beside.reduce((sum, other) => sum + weight(other), 0);
        cell.wanted = beside.length ? beside.reduce((sum, other) => sum + weight(other) * other.x, 0) / weights : cell.x;
      }
      spread(layer);
    }
  }
}

/** Sets the positions nearest to the wanted ones (least squares) that keep the order and the distances. */
function spread(layer) {
  const blocks = []; // {place, members: [cell, offset]}
  for (const cell of layer) {
    let block = { place: cell.wanted, members: [[cell, 0]] };
    while (blocks.length) {
      const before = blocks[blocks.length - 1];
      const [last, offset] = before.members[before.members.length - 1];
      const least = before.place + offset + (last.width + block.members[0][0].width) / 2 + BETWEEN_BOXES;
      if (block.place >= least) break;
      blocks.pop();
      const shift = least - before.place;
      const members = [...before.members, ...block.members.map(([member, at]) => [member, at + shift])];
      const place = members.reduce((sum, [member, at]) => sum + member.wanted - at, 0) / members.length;
      block = { place, members };
    }
    blocks.push(block);
  }
  for (const { place, members } of blocks) for (const [member, at] of members) member.x = place + at;
}
