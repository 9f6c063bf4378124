// Requests to this server: the page's own status, and the Open Inference Protocol with its binary extension.

import { decode, known } from "./tensors.js";

const KEY = "exportkit-api-key";
const HEADER = "Inference-Header-Content-Length";
const SESSION = "x-session-id"; // by which proxies find the replica that has a sequence
const STATUS_TIMEOUT = 10_000; // ms that the status may take; a model may take as long as it takes
let askForKey = async () => null;

/** What the server refused, with its own words. */
export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Sets what asks the user for a key: it gets what the server said about the last one, and resolves to the key. */
export function onKeyNeeded(ask) {
  let asking = null; // requests that are refused at the same time ask once
  askForKey = (message) => (asking ??= ask(message).finally(() => (asking = null)));
}

/** Returns /page/status. */
export async function status() {
  return (await send("page/status", {}, STATUS_TIMEOUT)).json();
}

/**
 * Runs a model.
 *
 * Inputs are {name, datatype, shape, data}, where data is a Uint8Array. The answer has `outputs`, a Map from names to
 * {datatype, shape, values}, and `seconds` from the first byte that was sent to the last that came. `more` are further
 * parameters of the request, such as those of a step of a sequence.
 */
export async function infer(model, inputs, signal, more = {}) {
  const header = {
    inputs: inputs.map(({ name, datatype, shape, data }) => ({
      name,
      datatype,
      shape,
      parameters: { binary_data_size: data.byteLength },
    })),
    parameters: { binary_data_output: true, ...more },
  };
  const json = new TextEncoder().encode(JSON.stringify(header));
  const place = `v2/models/${encodeURIComponent(model.name)}/versions/${encodeURIComponent(model.version)}/infer`;
  const start = performance.now();
  const response = await send(place, {
    method: "POST",
    body: new Blob([json, ...inputs.map((input) => input.data)]),
    headers: {
      "Content-Type": "application/octet-stream",
      [HEADER]: String(json.byteLength),
      ...(more.sequence_id === undefined ? {} : { [SESSION]: encodeURIComponent(more.sequence_id) }),
    },
    signal,
  });
  const body = new Uint8Array(await response.arrayBuffer());
  const seconds = (performance.now() - start) / 1e3;
  return { outputs: readOutputs(body, response.headers.get(HEADER)), seconds };
}

function readOutputs(body, length) {
  const end = length === null ? body.byteLength : Number(length);
  const answer = JSON.parse(new TextDecoder().decode(body.subarray(0, end)));
  const outputs = new Map();
  let offset = end;
  for (const { name, datatype, shape, parameters, data } of answer.outputs) {
    const size = parameters?.binary_data_size ?? 0;
    const raw = body.subarray(offset, offset + size);
    offset += size;
    const values = data ?? (known(datatype) ? decode(datatype, raw) : null);
    outputs.set(name, { datatype, shape, values });
  }
  return outputs;
}

async function send(path, options, timeout) {
  for (;;) {
    const key = storedKey();
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const response = await within(timeout, (signal) => fetch(path, { signal, ...options, headers, cache: "no-store" }));
    if (response.ok) return response;
    const message = await refusal(response);
    if (response.status !== 401) throw new Refused(message, response.status);
    // Another request may have asked for the key in the meantime.
    if (key === storedKey()) storeKey(await askForKey(key ? message : ""));
  }
}

/** Calls what can be aborted, and aborts it after some time. */
async function within(timeout, call) {
  if (timeout === undefined) return call(undefined);
  const late = new AbortController();
  const timer = setTimeout(() => late.abort(), timeout);
  try {
    return await call(late.signal);
  } finally {
    clearTimeout(timer);
  }
}

async function refusal(response) {
  const text = await response.text();
  try {
    return String(JSON.parse(text).error ?? text);
  } catch {
    return text || `status ${response.status}`;
  }
}

let remembered = null;

function storedKey() {
  try {
    return sessionStorage.getItem(KEY) ?? remembered;
  } catch {
    return remembered; // storage may be forbidden
  }
}

function storeKey(key) {
  remembered = key;
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // It lasts as long as the page then.
  }
}
