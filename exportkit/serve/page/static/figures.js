// What a model did in the last minute: the differences between statuses, as numbers and lines.

import { el, svg } from "./dom.js";
import { duration, short, whole } from "./words.js";

const SHOWN = 60; // seconds
const WINDOW = 5; // seconds that rates, latencies and batches are taken over, so that slow models have some in each

const ratio = (part, whole) => (whole > 0 ? part / whole : null);

// Name, words, and the value of the differences between two statuses; null where there is none.
const FIGURES = [
  ["answers a second", short, (since) => ratio(since("requests"), since("at"))],
  ["latency", duration, (since) => ratio(since("seconds"), since("requests"))],
  ["of it in the queue", duration, (since) => ratio(since("queue_seconds"), since("requests"))],
  ["rows a batch", short, (since) => ratio(since("rows"), since("executions"))],
  ["rows wait", whole, (since, now) => now.queued_rows],
];

/** Returns a tile for each figure. `samples` are statuses of a model, the oldest first, and when each came. */
export function figures(samples) {
  const end = samples.at(-1).at;
  const steps = samples.slice(1).map((now) => [now, samples.find((one) => one.at > now.at - WINDOW)]);
  return FIGURES.map(([name, words, value]) => {
    const points = steps.map(([now, then]) => [now.at - end, value((key) => now[key] - then[key], now)]);
    const last = points.at(-1)?.[1] ?? null;
    const top = Math.max(0, ...points.map(([, size]) => size));
    return el(
      "div",
      { class: "figure" },
      el("span", { class: "faint" }, name),
      el("b", {}, last === null ? "–" : words(last)),
      el("small", {}, top > 0 ? `at most ${words(top)}` : ""),
      svg(
        "svg",
        { viewBox: `${-SHOWN} -1.05 ${SHOWN} 1.1`, preserveAspectRatio: "none", "aria-hidden": "true" },
        svg("path", { class: "line", d: line(points, top || 1) }),
      ),
    );
  });
}

/** A path with a gap where there is no value. */
function line(points, top) {
  let path = "";
  let drawn = false;
  for (const [x, value] of points) {
    if (value !== null) path += `${drawn ? "L" : "M"}${x.toFixed(2)} ${(-value / top).toFixed(3)}`;
    drawn = value !== null;
  }
  return path;
}
