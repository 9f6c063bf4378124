// The protocol's binary tensors as typed arrays. They are little-endian, as every machine is that runs a browser.

const PLAIN = {
  __proto__: null,
  BOOL: Uint8Array,
  UINT8: Uint8Array,
  UINT16: Uint16Array,
  UINT32: Uint32Array,
  UINT64: BigUint64Array,
  INT8: Int8Array,
  INT16: Int16Array,
  INT32: Int32Array,
  INT64: BigInt64Array,
  FP32: Float32Array,
  FP64: Float64Array,
};
const HALVES = { __proto__: null, FP16: [toFP16, fromFP16], BF16: [toBF16, fromBF16] };
const BITS = { float: new Float32Array(1) };
BITS.integer = new Uint32Array(BITS.float.buffer);

/** Whether the page can make and read tensors of a datatype. */
export const known = (datatype) => datatype in PLAIN || datatype in HALVES;

/** Whether a datatype has fractions. */
export const floating = (datatype) => /^(FP|BF)/.test(datatype);

/** Bytes of one element. */
export const itemBytes = (datatype) => (datatype in HALVES ? 2 : PLAIN[datatype].BYTES_PER_ELEMENT);

export const product = (shape) => shape.reduce((all, size) => all * size, 1);

/** Returns the bytes of numbers. */
export function encode(datatype, numbers) {
  let array;
  if (datatype in HALVES) array = Uint16Array.from(numbers, HALVES[datatype][0]);
  else if (PLAIN[datatype] === numbers.constructor) array = numbers;
  else if (datatype.endsWith("INT64")) array = PLAIN[datatype].from(numbers, BigInt);
  else array = PLAIN[datatype].from(numbers);
  return new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
}

/** Returns the numbers of bytes: a typed array, of BigInt for 64-bit integers. */
export function decode(datatype, raw) {
  const aligned = raw.slice().buffer;
  if (!(datatype in HALVES)) return new PLAIN[datatype](aligned);
  return Float32Array.from(new Uint16Array(aligned), HALVES[datatype][1]);
}

function toBF16(value) {
  BITS.float[0] = value;
  const bits = BITS.integer[0];
  if (Number.isNaN(value)) return (bits >>> 16) | 0x40;
  return ((bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16) & 0xffff;
}

function fromBF16(bits) {
  BITS.integer[0] = bits << 16;
  return BITS.float[0];
}

function toFP16(value) {
  if (Number.isNaN(value)) return 0x7e00;
  const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0;
  const size = Math.abs(value);
  if (size >= 65520) return sign | 0x7c00;
  // Below 2^-14 the steps are 2^-24. A rounded mantissa of 1024 carries into the exponent, as it should.
  const exponent = Math.max(-14, size === 0 ? -14 : floorLog2(size));
  const steps = toEven(size * 2 ** (10 - exponent));
  return sign | (exponent === -14 ? steps : steps + ((exponent + 14) << 10));
}

function fromFP16(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >>> 10) & 31;
  const mantissa = bits & 1023;
  if (exponent === 31) return mantissa ? NaN : sign * Infinity;
  return sign * (exponent === 0 ? mantissa * 2 ** -24 : (1024 + mantissa) * 2 ** (exponent - 25));
}

function floorLog2(size) {
  const guess = Math.floor(Math.log2(size)); // may be one too high just below a power of two
  return 2 ** guess > size ? guess - 1 : guess;
}

function toEven(value) {
  const below = Math.floor(value);
  const rest = value - below;
  return rest > 0.5 || (rest === 0.5 && below % 2 === 1) ? below + 1 : below;
}
