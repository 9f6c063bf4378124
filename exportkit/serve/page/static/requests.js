// Requests to this server: the page's own status, and the Open Inference Protocol with its binary extension.

import { decode } from "./tensors.js";

const HEADER = "Inference-Header-Content-Length";

/** The API key that the visitor gave. */
export const access = { key: "" };

/** What the server refused, with its own words. */
export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export const status = async () => (await send("page/status", { signal: AbortSignal.timeout(10_000) })).json();

/**
 * Runs a model.
 *
 * Inputs are {name, datatype, shape, data}, where data is a Uint8Array. The answer has `outputs`, a Map from names to
 * {datatype, shape, values}, and `seconds` from the first byte that was sent to the last that came. `more` are further
 * parameters of the request, such as those of a step of a sequence.
 */
export async function infer(model, inputs, signal, more = {}) {
  const header = JSON.stringify({
    inputs: inputs.map(({ data, ...input }) => ({ ...input, parameters: { binary_data_size: data.byteLength } })),
    parameters: { binary_data_output: true, ...more },
  });
  const json = new TextEncoder().encode(header);
  const headers = { "Content-Type": "application/octet-stream", [HEADER]: json.byteLength };
  if (more.sequence_id) headers["x-session-id"] = encodeURIComponent(more.sequence_id); // for proxies before replicas
  const start = performance.now();
  const body = new Blob([json, ...inputs.map((input) => input.data)]);
  const place = `v2/models/${encodeURIComponent(model.name)}/versions/${encodeURIComponent(model.version)}/infer`;
  const response = await send(place, { method: "POST", body, headers, signal });
  const answer = new Uint8Array(await response.arrayBuffer());
  return { outputs: read(answer, Number(response.headers.get(HEADER))), seconds: (performance.now() - start) / 1e3 };
}

function read(body, length) {
  const { outputs } = JSON.parse(new TextDecoder().decode(body.subarray(0, length)));
  let offset = length;
  return new Map(
    outputs.map(({ name, datatype, shape, parameters }) => {
      const raw = body.subarray(offset, (offset += parameters.binary_data_size));
      return [name, { datatype, shape, values: decode(datatype, raw) }];
    }),
  );
}

async function send(path, options) {
  const headers = { ...options.headers, ...(access.key && { Authorization: `Bearer ${access.key}` }) };
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({})); // a proxy answers in its own way
  throw new Refused(error ?? `status ${response.status}`, response.status);
}
