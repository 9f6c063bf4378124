// Photographs as the model takes them: whole patches, red, green and blue in [0, 1].

/** Reads an image file, turned as it says and put on white. */
export async function read(file) {
  try {
    return await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name || "This"} is not an image that this browser can read.`);
  }
}

/**
 * Shrinks an image so that its longer side has at most `longest` pixels, then cuts it to whole patches at the right and
 * the bottom. It is enlarged only where the model takes no fewer patches: `limits` has its ranges of rows and columns.
 */
export function fit(image, longest, patch, limits) {
  const enough = Math.max((limits.rows.min * patch) / image.height, (limits.columns.min * patch) / image.width);
  const scale = Math.max(Math.min(1, longest / Math.max(image.height, image.width)), enough);
  const count = (pixels, { min, max }) => Math.min(max, Math.max(min, Math.floor((pixels * scale + 0.5) / patch)));
  const canvas = document.createElement("canvas");
  canvas.height = count(image.height, limits.rows) * patch;
  canvas.width = count(image.width, limits.columns) * patch;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(image, 0, 0, image.width * scale, image.height * scale);
  return canvas;
}

/** The pixels of a rectangle as numbers [3, height, width] in [0, 1]. */
export function planes(canvas, left, top, width, height) {
  const { data } = canvas.getContext("2d").getImageData(left, top, width, height);
  const count = width * height;
  const numbers = new Float32Array(3 * count);
  for (let pixel = 0; pixel < count; pixel++) {
    for (let channel = 0; channel < 3; channel++) numbers[channel * count + pixel] = data[4 * pixel + channel] / 255;
  }
  return numbers;
}

/** A sky with balloons, drawn the same each time, and the balloon that the first query is about. */
export function sample() {
  const canvas = document.createElement("canvas");
  canvas.width = 768;
  canvas.height = 512;
  const draw = canvas.getContext("2d");
  const random = generator(11);
  const between = (low, high) => low + (high - low) * random();
  sky(draw, between);
  hills(draw);
  for (const balloon of BALLOONS) drawBalloon(draw, ...balloon);
  grain(draw, canvas, between);
  return { image: canvas, region: { left: 152, top: 84, width: 112, height: 112 } };
}

const RED = ["#c8242b", "#f3e9d8", "#c8242b", "#e2542f"];
const BLUE = ["#1d5fa8", "#e8c53c", "#1d5fa8", "#2f86c9"];
const GREEN = ["#2f7d4f", "#d9e3c0", "#2f7d4f", "#1f5f56"];

// The place of each one, its radius, and its colours, far ones first.
const BALLOONS = [
  [705, 118, 19, GREEN],
  [392, 208, 24, RED],
  [90, 268, 27, BLUE],
  [318, 96, 30, GREEN],
  [640, 256, 40, RED],
  [492, 138, 55, BLUE],
  [208, 140, 66, RED],
];

function sky(draw, between) {
  const fade = draw.createLinearGradient(0, 0, 0, 400);
  fade.addColorStop(0, "#5b93cc");
  fade.addColorStop(0.65, "#b9d3e6");
  fade.addColorStop(1, "#f3d9b4");
  draw.fillStyle = fade;
  draw.fillRect(0, 0, 768, 420);
  for (let index = 0; index < 90; index++) {
    const [x, y] = [[110, 350], [390, 330], [690, 345]][index % 3];
    const [px, py, radius] = [x + between(-130, 130), y + between(-10, 10), between(14, 40)];
    const puff = draw.createRadialGradient(px, py, 0, px, py, radius);
    puff.addColorStop(0, `rgb(255 250 242 / ${between(0.08, 0.22)})`);
    puff.addColorStop(1, "rgb(255 250 242 / 0)");
    draw.fillStyle = puff;
    draw.fillRect(px - radius, py - radius, 2 * radius, 2 * radius);
  }
}

function hills(draw) {
  const layers = [["#a9b8c6", 372, 22, 120], ["#7f9a94", 404, 20, 95], ["#557a5c", 440, 18, 150], ["#35583c", 478, 12, 110]];
  layers.forEach(([colour, base, height, length], index) => {
    draw.fillStyle = colour;
    draw.beginPath();
    draw.moveTo(0, 512);
    for (let x = 0; x <= 768; x += 4) {
      draw.lineTo(x, base - height * (Math.sin(x / length + 2.1 * index) + 0.4 * Math.sin((2.7 * x) / length + index)));
    }
    draw.lineTo(768, 512);
    draw.fill();
  });
}

function drawBalloon(draw, x, y, radius, colours) {
  const mouth = y + 1.55 * radius;
  draw.save();
  draw.beginPath();
  draw.moveTo(x - 0.16 * radius, mouth);
  draw.bezierCurveTo(x - 0.5 * radius, y + radius, x - radius, y + 0.7 * radius, x - radius, y);
  draw.arc(x, y, radius, Math.PI, 0);
  draw.bezierCurveTo(x + radius, y + 0.7 * radius, x + 0.5 * radius, y + radius, x + 0.16 * radius, mouth);
  draw.closePath();
  draw.clip();
  // Gores are narrower towards the edge, as on a sphere.
  for (let gore = 0; gore < 8; gore++) {
    const [left, right] = [gore, gore + 1].map((edge) => x - radius * Math.cos((Math.PI * edge) / 8));
    draw.fillStyle = colours[gore % colours.length];
    draw.fillRect(left, y - radius, right - left + 1, 2.7 * radius);
  }
  const light = draw.createRadialGradient(x - 0.4 * radius, y - 0.4 * radius, 0.1 * radius, x, y + 0.2 * radius, 1.5 * radius);
  light.addColorStop(0, "rgb(255 255 255 / 0.35)");
  light.addColorStop(0.5, "rgb(255 255 255 / 0)");
  light.addColorStop(1, "rgb(10 10 40 / 0.5)");
  draw.fillStyle = light;
  draw.fillRect(x - radius, y - radius, 2 * radius, 2.7 * radius);
  draw.restore();
  draw.strokeStyle = "#4a3b30";
  draw.lineWidth = Math.max(1, radius / 30);
  draw.beginPath();
  for (const side of [-1, 1]) {
    draw.moveTo(x + 0.14 * side * radius, mouth);
    draw.lineTo(x + 0.12 * side * radius, mouth + 0.3 * radius);
  }
  draw.stroke();
  draw.fillStyle = "#6b4a30";
  draw.fillRect(x - 0.15 * radius, mouth + 0.28 * radius, 0.3 * radius, 0.22 * radius);
}

/** A little noise, as every camera has. */
function grain(draw, { width, height }, between) {
  const image = draw.getImageData(0, 0, width, height);
  for (let at = 0; at < image.data.length; at += 4) {
    const noise = between(-3, 3);
    for (let channel = 0; channel < 3; channel++) image.data[at + channel] += noise;
  }
  draw.putImageData(image, 0, 0);
}

/** Random numbers in [0, 1), the same for the same seed: a linear congruence modulo 2^32. */
function generator(seed) {
  let state = seed;
  return () => {
    state = (Math.imul(1664525, state) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}
