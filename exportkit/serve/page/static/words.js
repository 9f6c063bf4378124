// Numbers and sizes in words.

/** 1234567 -> "1,234,567". */
export const whole = (value) => value.toLocaleString("en", { maximumFractionDigits: 0 });

/** Three digits at most, as in "0.35", "12.3" and "1,234". */
export function short(value) {
  const size = Math.abs(value);
  return size >= 100 || value === 0 ? whole(value) : value.toFixed(size >= 10 ? 1 : 2);
}

/** Seconds -> "3.2 ms" or "1.50 s". */
export const duration = (seconds) => (seconds < 1 ? `${short(seconds * 1e3)} ms` : `${short(seconds)} s`);

/** "[batch, 3, 16*gh+1, ?]": `?` where the package does not say. */
export function shape(sizes) {
  const text = (size) => {
    if (size === null || typeof size === "number") return size ?? "?";
    const offset = size.offset > 0 ? `+${size.offset}` : size.offset || "";
    return `${size.scale === 1 ? "" : `${size.scale}*`}${size.dimension}${offset}`;
  };
  return `[${sizes.map(text).join(", ")}]`;
}

/** A number of a tensor: whole numbers as they are, others with six digits. */
export const element = (value) => String(Number.isFinite(value) ? Number(value.toPrecision(6)) : value);
