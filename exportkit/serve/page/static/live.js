// What a model does now: the differences between two statuses.

import { Chart } from "./chart.js";
import { el, fill } from "./dom.js";
import { duration, short, whole } from "./words.js";

const WINDOW = 5; // seconds that latencies and batches are taken over, so that slow models have some in each
const GAP = 3; // seconds without a status, as in a hidden tab, after which lines are interrupted

const NOTE = `The last minute. Latencies are estimated from a histogram. They, and batches, are over ${WINDOW} seconds.`;

/** The charts of one model, and how its counters went on. */
export class Live {
  constructor(bounds) {
    this.bounds = bounds;
    this.history = []; // of {at, counters}
    this.charts = {
      latency: new Chart("Latency", ["p50", "p99"], duration, 0.001),
      throughput: new Chart("Throughput", ["answers a second"], short, 1),
      queue: new Chart("Queue", ["rows wait"], whole, 1),
      batch: new Chart("Mean batch", ["rows"], short, 1),
    };
    this.totals = el("dl", { class: "facts" });
    this.element = el(
      "div",
      {},
      el("div", { class: "charts" }, Object.values(this.charts).map((chart) => chart.element)),
      el("p", { class: "faint note" }, NOTE),
      this.totals,
    );
  }

  /** Takes the counters of a new status; `at` is its time in seconds. Charts begin with the second one. */
  add(at, counters) {
    // Counters start again at 0 when the server does.
    if (this.history.length && this.history.at(-1).counters.requests > counters.requests) this.history = [];
    const last = this.history.at(-1);
    if (last && at - last.at > GAP) {
      for (const chart of Object.values(this.charts)) chart.interrupt();
      this.history = [last];
    }
    this.history.push({ at, counters });
    while (this.history.length > 2 && this.history[1].at <= at - WINDOW) this.history.shift();
    this.total(counters);
    this.charts.queue.add([counters.queued_rows]);
    if (last === undefined || at <= last.at) return;
    const before = this.history[0].counters;
    const counts = counters.seconds.map((count, index) => count - before.seconds[index]);
    this.charts.latency.add([percentile(this.bounds, counts, 0.5), percentile(this.bounds, counts, 0.99)]);
    this.charts.throughput.add([(counters.requests - last.counters.requests) / (at - last.at)]);
    const executions = counters.executions - before.executions;
    this.charts.batch.add([executions ? (counters.rows - before.rows) / executions : null]);
  }

  total(counters) {
    const failures = Object.entries(counters.failures).map(([reason, count]) => `${whole(count)} ${reason}`);
    const rows = [
      ["answered", whole(counters.requests)],
      ["failed", failures.join(", ") || "0"],
      ["rows", whole(counters.rows)],
      ["executions", whole(counters.executions)],
      ["mean batch", counters.mean_batch === null ? "–" : short(counters.mean_batch)],
      ["p50", duration(percentile(this.bounds, counters.seconds, 0.5))],
      ["p99", duration(percentile(this.bounds, counters.seconds, 0.99))],
      ["runners", `${counters.busy_runners} of ${counters.runners} busy`],
    ];
    fill(this.totals, rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  }
}

/** Estimates a percentile of a histogram as Prometheus does: linear within a bucket, the last bound beyond it. */
export function percentile(bounds, counts, share) {
  let rank = share * counts.reduce((all, count) => all + count, 0);
  if (rank === 0) return null;
  for (let index = 0; index < bounds.length; index++) {
    const below = index ? bounds[index - 1] : 0;
    if (rank <= counts[index]) return below + ((bounds[index] - below) * rank) / counts[index];
    rank -= counts[index];
  }
  return bounds.at(-1);
}
