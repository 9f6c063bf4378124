// When somebody speaks, from how likely it is: the rule of speech_times.py, with its numbers.

export const CHUNK = 0.032; // seconds that an answer is about
export const BEGINS = 0.5; // speech begins with an answer of at least that
const ENDS = 0.35; // and can end with one below this,
const SILENCE = 0.1; // after so many seconds without an answer of BEGINS or more
const MARGIN = 0.03; // seconds that are speech before the first such answer, and after the last

/** Follows the answers of one stream. `speech` says whether somebody speaks. */
export class SpeechTimes {
  constructor() {
    this.speech = false;
    this.heard = 0; // chunks
    this.quiet = null; // how many were heard before the first that may have ended speech
  }

  /** Takes the next answer. Returns {at, speech} if it changes whether somebody speaks, else null. */
  add(likely) {
    const before = this.heard++;
    if (likely >= BEGINS) {
      this.quiet = null;
      return this.speech ? null : this.change(Math.max(0, before * CHUNK - MARGIN), true);
    }
    if (likely >= ENDS || !this.speech) return null;
    this.quiet ??= before;
    if ((before - this.quiet) * CHUNK < SILENCE) return null;
    return this.change(this.quiet * CHUNK + MARGIN, false);
  }

  change(at, speech) {
    this.quiet = null;
    this.speech = speech;
    return { at, speech };
  }
}
