// Numbers in words.

/** Returns such as "1.4 MB". */
export function bytesText(size) {
  let value = size;
  for (const unit of ["bytes", "kB", "MB", "GB"]) {
    if (value < 1000 || unit === "GB") return unit === "bytes" ? `${size} bytes` : `${value.toFixed(1)} ${unit}`;
    value /= 1000;
  }
}

/** Returns such as "1.24 ms" or "31 µs". */
export function timeText(ms) {
  if (ms >= 1000) return `${(ms / 1000).toPrecision(3)} s`;
  return ms >= 1 ? `${ms.toPrecision(3)} ms` : `${(ms * 1000).toPrecision(ms >= 0.01 ? 3 : 2)} µs`;
}

/** Returns such as "4.1 %". */
export function shareText(share) {
  return share > 0 && share < 0.001 ? "< 0.1 %" : `${(100 * share).toFixed(1)} %`;
}

/** Returns such as "1 node" or "1,200 nodes". */
export function countText(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

/** Returns a number of a few digits. Infinities and NaN are text already. */
export function numberText(value) {
  if (typeof value !== "number") return value ?? "";
  if (value === 0 || Number.isInteger(value)) return String(value);
  return Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

/** Shortens a text at its beginning. */
export function ending(text, longest) {
  return text.length <= longest ? text : `…${text.slice(text.length - longest + 1)}`;
}

/** Shortens a text in its middle. */
export function shortened(text, longest) {
  if (text.length <= longest) return text;
  const end = Math.floor((longest - 1) / 2);
  return `${text.slice(0, longest - 1 - end)}…${text.slice(text.length - end)}`;
}
