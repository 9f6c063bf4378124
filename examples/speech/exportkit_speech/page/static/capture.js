// In the thread of the audio: makes chunks at 16 kHz of what the microphone hears, and posts them to the page.

import { Resampler } from "./resampler.js";

class Capture extends AudioWorkletProcessor {
  constructor({ processorOptions: { samples } }) {
    super();
    this.resampler = new Resampler(sampleRate);
    this.chunk = new Float32Array(samples);
    this.filled = 0;
  }

  process([channels]) {
    if (channels.length === 0) return true; // the microphone says nothing yet
    const mean = channels[0].map((_, at) => channels.reduce((sum, one) => sum + one[at], 0) / channels.length);
    for (const sample of this.resampler.push(mean)) {
      this.chunk[this.filled++] = sample;
      if (this.filled < this.chunk.length) continue;
      this.port.postMessage(this.chunk);
      this.filled = 0;
    }
    return true;
  }
}

registerProcessor("capture", Capture);
