// The protocol's binary tensors as typed arrays. They are little-endian, as every machine is that runs a browser.

const TYPES = {
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
  FP16: globalThis.Float16Array, // browsers have it since 2025
  BF16: Uint16Array, // the upper halves of FP32
  FP32: Float32Array,
  FP64: Float64Array,
};

/** Returns the bytes of numbers. */
export function encode(datatype, numbers) {
  const part = /INT/.test(datatype) && numbers.find((number) => !Number.isInteger(number));
  if (typeof part === "number") throw new Error(`${part} is no whole number, and the input has dtype ${datatype}`);
  let array;
  if (datatype === "BF16") array = upperHalves(numbers);
  else if (datatype.endsWith("INT64")) array = TYPES[datatype].from(numbers, BigInt);
  else array = new TYPES[datatype](numbers);
  return new Uint8Array(array.buffer);
}

/** Returns the numbers of a text: a list, of lists or not. */
export function numbersIn(text) {
  const words = text.match(/[^\s,[\]]+/g) ?? [];
  const named = { true: 1, false: 0, inf: Infinity, "-inf": -Infinity };
  return words.map((word) => {
    const number = named[word.toLowerCase()] ?? Number(word);
    if (Number.isNaN(number) && word.toLowerCase() !== "nan") throw new Error(`${word} is no number`);
    return number;
  });
}

/** Returns the numbers of bytes: a typed array, of BigInt for 64-bit integers. */
export function decode(datatype, raw) {
  const array = new TYPES[datatype](raw.slice().buffer); // a copy is aligned
  return datatype === "BF16" ? new Float32Array(Uint32Array.from(array, (half) => half << 16).buffer) : array;
}

/** Rounds to the nearest, ties to even. */
function upperHalves(numbers) {
  const bits = new Uint32Array(new Float32Array(numbers).buffer);
  const isNaN = (bit) => (bit & 0x7fffffff) > 0x7f800000;
  return Uint16Array.from(bits, (bit) => (isNaN(bit) ? bit >>> 16 | 0x40 : (bit + 0x7fff + ((bit >>> 16) & 1)) >>> 16));
}
