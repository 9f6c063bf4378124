// Numbers and sizes in words.

const GROUPED = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** 1234567 -> "1,234,567". */
export const whole = (value) => GROUPED.format(value);

/** Three digits at most, as in "0.35", "12.3" and "1,234". */
export function short(value) {
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size >= 100 || value === 0) return whole(value);
  return value.toFixed(size >= 10 ? 1 : 2);
}

/** Seconds -> "3.2 ms" or "1.50 s". */
export function duration(seconds) {
  if (seconds == null) return "–";
  return seconds < 1 ? `${short(seconds * 1e3)} ms` : `${short(seconds)} s`;
}

/** A longer time: "12 s", "3.5 min", "2.0 h". */
export function span(seconds) {
  if (seconds < 120) return duration(seconds);
  return seconds < 7200 ? `${short(seconds / 60)} min` : `${short(seconds / 3600)} h`;
}

/** Bytes -> "3.1 MB". */
export function bytes(count) {
  for (const [unit, scale] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (count >= scale) return `${short(count / scale)} ${unit}`;
  }
  return `${count} bytes`;
}

/** A size of a shape: "3", "batch", "16*gh+1", or "?" where it is not a multiple of one dimension. */
export function size(value) {
  if (value === null) return "?";
  if (typeof value === "number") return String(value);
  const text = value.scale === 1 ? value.dimension : `${value.scale}*${value.dimension}`;
  return value.offset === 0 ? text : `${text}${value.offset < 0 ? "" : "+"}${value.offset}`;
}

/** "[batch, 3, 16*gh, 16*gw]". */
export const shape = (sizes) => `[${sizes.map(size).join(", ")}]`;

/** "batch 1..64, gh 2..64": the ranges of the dimensions of some shapes. */
export function ranges(shapes, dimensions) {
  const used = new Set(shapes.flat().map((one) => one?.dimension));
  return dimensions
    .filter((one) => used.has(one.name))
    .map((one) => `${one.name} ${one.min}..${one.max}`)
    .join(", ");
}

/** A number of a tensor: whole numbers as they are, others with six digits. */
export function element(value) {
  if (typeof value === "bigint" || Number.isInteger(value)) return String(value);
  return Number.isFinite(value) ? String(Number(value.toPrecision(6))) : String(value);
}
