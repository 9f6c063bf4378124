// Steps of a sequence: the server keeps what the model remembers of a stream.

import { Refused, infer } from "../../requests.js";

const AGAIN = "Start again; what was heard before is forgotten.";

export class Sequence {
  constructor(model, input) {
    this.model = model;
    this.input = input;
    this.id = crypto.randomUUID();
    this.begun = false;
  }

  /** Sends the next chunk. Returns {likely, seconds}. An error's message is a sentence for the user. */
  async step(chunk, end) {
    const data = new Uint8Array(chunk.buffer, chunk.byteOffset, chunk.byteLength);
    const input = { name: this.input, datatype: "FP32", shape: [1, chunk.length], data };
    const parameters = { sequence_id: this.id, sequence_start: !this.begun, sequence_end: end };
    try {
      const { outputs, seconds } = await infer(this.model, [input], undefined, parameters);
      this.begun = true;
      const [{ values }] = outputs.values();
      return { likely: values[0], seconds };
    } catch (error) {
      throw new Error(sentence(error));
    }
  }
}

function sentence(error) {
  if (!(error instanceof Refused)) return `The server does not answer: it has ended, or the network is down. ${AGAIN}`;
  if (error.status === 409) return `The server has lost the sequence: ${error.message}. ${AGAIN}`;
  return `The server refuses: ${error.message}. ${AGAIN}`;
}
