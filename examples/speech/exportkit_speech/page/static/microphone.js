// The microphone, as chunks of samples at 16 kHz; and in words why there is none.

const RATE = 16_000;
const PLAIN =
  "A browser gives the microphone only to pages that come over HTTPS or from this machine. " +
  "Serve with --tls-certificate, or open the page as http://localhost.";
const REASONS = {
  __proto__: null,
  NotAllowedError: "The microphone is not allowed. Allow it for this page in the browser's address bar, and start again.",
  SecurityError: "The microphone is not allowed. Allow it for this page in the browser's settings, and start again.",
  NotFoundError: "There is no microphone. Connect one, and start again.",
  NotReadableError: "The microphone cannot be read: another program may use it. Close that, and start again.",
};
const GONE = "The microphone is gone. Connect it, and start again.";
// What a phone call wants of a microphone would change what the model hears.
const RAW = { echoCancellation: false, noiseSuppression: false, autoGainControl: false };

/**
 * Opens the microphone, and calls `heard` with each chunk of so many samples, and `lost` with a sentence when there
 * will be no more. Returns what closes it. An error's message is a sentence for the user.
 */
export async function openMicrophone(samples, heard, lost) {
  if (!navigator.mediaDevices?.getUserMedia) throw new Error(PLAIN);
  const stream = await navigator.mediaDevices.getUserMedia({ audio: RAW }).catch((error) => {
    throw new Error(REASONS[error.name] ?? `The microphone cannot be opened: ${error.message}.`);
  });
  const context = new AudioContext();
  const close = () => {
    for (const track of stream.getTracks()) track.stop();
    context.close();
  };
  try {
    if (context.sampleRate < RATE) throw new Error(`The audio of this browser has ${context.sampleRate} Hz, less than ${RATE}.`);
    await context.audioWorklet.addModule(new URL("capture.js", import.meta.url));
    const capture = new AudioWorkletNode(context, "capture", { numberOfOutputs: 0, processorOptions: { samples } });
    capture.port.onmessage = ({ data }) => heard(data);
    for (const track of stream.getTracks()) track.addEventListener("ended", () => lost(GONE));
    context.createMediaStreamSource(stream).connect(capture);
    await context.resume();
  } catch (error) {
    close();
    throw error;
  }
  return close;
}
