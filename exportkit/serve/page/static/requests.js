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
  const response = await send(place(model), { method: "POST", body, headers, signal });
  const answer = new Uint8Array(await response.arrayBuffer());
  return { outputs: read(answer, Number(response.headers.get(HEADER))), seconds: (performance.now() - start) / 1e3 };
}

const MOST = 256; // values that a command line may have

/** Returns the command that makes the same request, or why there is none. Inputs are {name, datatype, shape, numbers}. */
export function curl(model, inputs, parameters = {}) {
  const all = inputs.flatMap(({ numbers }) => numbers);
  if (all.length > MOST) return `The inputs have ${all.length} values: send so many in the binary form.`;
  const binary = inputs.some(({ datatype }) => /^B?F(P16|16)$/.test(datatype)) || !all.every(Number.isFinite);
  if (binary) return "float16, bfloat16, NaN and infinities have the binary form only.";
  const value = (datatype, number) => (datatype === "BOOL" ? number !== 0 : number);
  const body = JSON.stringify({
    inputs: inputs.map(({ numbers, ...input }) => ({ ...input, data: numbers.map((n) => value(input.datatype, n)) })),
    ...(Object.keys(parameters).length && { parameters }),
  });
  const key = access.key && " -H 'Authorization: Bearer YOUR_KEY'";
  return `curl -s${key} ${new URL(place(model), document.baseURI)} -d '${body.replaceAll("'", "'\\''")}'`;
}

const place = (model) =>
  `v2/models/${encodeURIComponent(model.name)}/versions/${encodeURIComponent(model.version)}/infer`;

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
