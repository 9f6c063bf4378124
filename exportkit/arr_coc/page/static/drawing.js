// Draws a picture with what a model chose in it. The colours are those of the demo's picture.

// Stops from low to high, after matplotlib's plasma and magma.
const BUDGETS = [[75, 3, 161], [156, 23, 158], [213, 75, 109], [245, 144, 65], [240, 249, 33]];
const RELEVANCE = [[0, 0, 4], [81, 18, 124], [183, 55, 121], [252, 137, 97], [252, 253, 191]];
const DARK = 0.28; // what is left of the light of a patch that was left out

/** The views, by name: what each draws, and its scale: colours, the two ends, and what they count. */
export const VIEWS = {
  budgets: { label: "Budgets", stops: BUDGETS, ends: (answer) => extent(answer.budgets), unit: "tokens a patch" },
  kept: { label: "Kept", stops: null, note: "In colour: kept. Dark and grey: left out." },
  relevance: { label: "Relevance", stops: RELEVANCE, ends: (answer) => extent(answer.relevance), unit: "relevance" },
  photograph: { label: "Photograph", stops: null, note: "As the model gets it." },
};

/** Draws one view of a picture into a canvas of the same size. */
export function drawView(target, picture, patch, view, answer) {
  target.width = picture.width;
  target.height = picture.height;
  const context = target.getContext("2d", { willReadFrequently: true });
  context.drawImage(picture, 0, 0);
  if (answer === null || view === "photograph") return;
  const columns = picture.width / patch;
  const square = (index) => [(index % columns) * patch, Math.floor(index / columns) * patch];
  if (view === "relevance") {
    const colour = scaled(answer.relevance, RELEVANCE);
    answer.relevance.forEach((value, index) => {
      context.fillStyle = colour(value);
      context.fillRect(...square(index), patch, patch);
    });
    return;
  }
  darken(context, picture);
  if (view === "kept") {
    for (const index of answer.indices) context.drawImage(picture, ...square(index), patch, patch, ...square(index), patch, patch);
    return;
  }
  const colour = scaled(answer.budgets, BUDGETS);
  answer.indices.forEach((index, rank) => {
    const [x, y] = square(index);
    context.fillStyle = colour(answer.budgets[rank]);
    context.fillRect(x + 0.5, y + 0.5, patch - 1, patch - 1);
  });
}

/** Draws a scale from low at the left to high at the right. */
export function drawScale(canvas, stops) {
  const context = canvas.getContext("2d");
  const fade = context.createLinearGradient(0, 0, canvas.width, 0);
  stops.forEach((stop, index) => fade.addColorStop(index / (stops.length - 1), `rgb(${stop.join(" ")})`));
  context.fillStyle = fade;
  context.fillRect(0, 0, canvas.width, canvas.height);
}

function darken(context, { width, height }) {
  const image = context.getImageData(0, 0, width, height);
  const { data } = image;
  for (let at = 0; at < data.length; at += 4) {
    data[at] = data[at + 1] = data[at + 2] = (DARK * (data[at] + data[at + 1] + data[at + 2])) / 3;
  }
  context.putImageData(image, 0, 0);
}

/** A function from values to colours between the stops, over the values' whole range. */
function scaled(values, stops) {
  const [low, high] = extent(values);
  return (value) => {
    const place = high > low ? ((value - low) / (high - low)) * (stops.length - 1) : stops.length - 1;
    const index = Math.min(Math.floor(place), stops.length - 2);
    const mixed = stops[index].map((from, channel) => from + (stops[index + 1][channel] - from) * (place - index));
    return `rgb(${mixed.map(Math.round).join(" ")})`;
  };
}

function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}
