// Brings samples to 16 kHz as recording.py does: by a sinc in a Hann window. It runs in the thread of the audio.

const RATE = 16_000;
const CUTOFF = 0.95; // of 8 kHz, where it lets half of the amplitude pass
const REACH = 24; // samples at 16 kHz, to each side

/** The weight of a sample at a distance in samples at 16 kHz. */
function weight(distance) {
  if (Math.abs(distance) >= REACH) return 0;
  const angle = Math.PI * CUTOFF * distance;
  const sinc = angle === 0 ? 1 : Math.sin(angle) / angle;
  return CUTOFF * sinc * Math.cos(((Math.PI / 2) * distance) / REACH) ** 2;
}

/** Resamples a stream that comes in pieces. Before it is silence. */
export class Resampler {
  /** `rate` is that of the pieces, in Hz: a whole number, 16 kHz or more. */
  constructor(rate) {
    this.rate = rate;
    this.step = rate / RATE;
    this.reach = Math.ceil(REACH * this.step);
    this.kept = new Float32Array(this.reach); // what later samples depend on
    this.first = -this.reach; // the place of kept[0] in the stream
    this.made = 0;
    this.kernels = new Map(); // few, because they repeat
  }

  /** Takes the next samples. Returns those at 16 kHz for which enough is known. */
  push(samples) {
    if (this.rate === RATE) return samples;
    const all = new Float32Array(this.kept.length + samples.length);
    all.set(this.kept);
    all.set(samples, this.kept.length);
    const found = [];
    for (;;) {
      const at = (this.made * this.rate) / RATE;
      const near = Math.floor(at);
      const start = near - this.reach - this.first;
      if (start + 2 * this.reach >= all.length) {
        this.kept = all.slice(start);
        this.first += start;
        return found;
      }
      const kernel = this.kernel((this.made * this.rate) % RATE, at - near);
      let sum = 0;
      for (let tap = 0; tap < kernel.length; tap++) sum += kernel[tap] * all[start + tap];
      found.push(sum);
      this.made++;
    }
  }

  /** The weights of the samples around a place that is `after` a sample. */
  kernel(phase, after) {
    if (!this.kernels.has(phase)) {
      const taps = Float64Array.from({ length: 2 * this.reach + 1 }, (_, tap) => {
        return weight((tap - this.reach - after) / this.step) / this.step;
      });
      this.kernels.set(phase, taps);
    }
    return this.kernels.get(phase);
  }
}
