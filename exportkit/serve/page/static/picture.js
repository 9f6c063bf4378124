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
 * Scales an image so that its longer side has `longest` pixels, then cuts it to whole patches at the right and the
 * bottom. `limits` are the fewest and most rows and columns of patches that the model takes.
 */
export function fit(image, longest, patch, limits) {
  const enough = Math.max((limits.rows.min * patch) / image.height, (limits.columns.min * patch) / image.width);
  const scale = Math.max(longest / Math.max(image.height, image.width), enough);
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

/** A meadow with poppies, drawn the same each time, and the poppy that the first query is about. */
export function sample() {
  const canvas = document.createElement("canvas");
  canvas.width = 768;
  canvas.height = 512;
  const draw = canvas.getContext("2d");
  const random = generator(7);
  const between = (low, high) => low + (high - low) * random();
  sky(draw, between);
  hills(draw, between);
  meadow(draw, between);
  for (let index = 0; index < 46; index++) {
    const depth = (index / 45) ** 1.6; // far ones first
    poppy(draw, between(-10, 778), 318 + 185 * depth + between(-9, 9), 5 + 25 * depth * between(0.75, 1), between);
  }
  poppy(draw, 560, 400, 44, between);
  return { image: canvas, region: { left: 520, top: 360, width: 80, height: 80 } };
}

function sky(draw, between) {
  const fade = draw.createLinearGradient(0, 0, 0, 300);
  fade.addColorStop(0, "#4f8fd0");
  fade.addColorStop(1, "#dcebf5");
  draw.fillStyle = fade;
  draw.fillRect(0, 0, 768, 320);
  for (let index = 0; index < 70; index++) {
    const [x, y] = [[150, 90], [430, 60], [640, 130]][index % 3];
    blob(draw, x + between(-75, 75), y + between(-17, 17), between(12, 34), `rgb(255 255 255 / ${between(0.1, 0.3)})`);
  }
}

function hills(draw, between) {
  [["#8fb0c4", 262, 30], ["#6f9a86", 290, 24], ["#4f7d4c", 312, 12]].forEach(([colour, base, height], index) => {
    draw.fillStyle = colour;
    draw.beginPath();
    draw.moveTo(0, 330);
    for (let x = 0; x <= 768; x += 4) {
      const wave = Math.sin(x / (95 - 17 * index) + 2 * index) + 0.5 * Math.sin(x / 37 + index);
      draw.lineTo(x, base - height * wave + between(-1, 1));
    }
    draw.lineTo(768, 330);
    draw.fill();
  });
}

function meadow(draw, between) {
  const fade = draw.createLinearGradient(0, 310, 0, 512);
  fade.addColorStop(0, "#7fa04c");
  fade.addColorStop(1, "#2f5a26");
  draw.fillStyle = fade;
  draw.fillRect(0, 314, 768, 198);
  for (let index = 0; index < 5200; index++) {
    const y = between(316, 522);
    const length = 3 + ((y - 316) / 200) * between(8, 26);
    draw.strokeStyle = `hsl(${between(80, 118)} ${between(30, 55)}% ${between(18, 48)}%)`;
    draw.lineWidth = between(0.6, 1.8);
    draw.beginPath();
    const x = between(0, 768);
    draw.moveTo(x, y);
    draw.lineTo(x + between(-5, 5), y - length);
    draw.stroke();
  }
}

function poppy(draw, x, y, radius, between) {
  draw.strokeStyle = "#41662f";
  draw.lineWidth = Math.max(1, radius / 9);
  draw.beginPath();
  draw.moveTo(x, y);
  draw.quadraticCurveTo(x + between(-6, 6), y + radius, x + between(-8, 8), y + 2.2 * radius);
  draw.stroke();
  for (let petal = 0; petal < 5; petal++) {
    const angle = petal * 1.257 + between(-0.2, 0.2);
    const [px, py] = [x + 0.45 * radius * Math.cos(angle), y + 0.4 * radius * Math.sin(angle)];
    const shade = draw.createRadialGradient(px, py, 0, px, py, 0.75 * radius);
    shade.addColorStop(0, `hsl(${between(0, 12)} 88% ${between(46, 56)}%)`);
    shade.addColorStop(1, `hsl(${between(352, 360)} 84% ${between(32, 40)}%)`);
    blob(draw, px, py, 0.66 * radius, shade);
  }
  blob(draw, x, y, 0.22 * radius, "#241a1c");
}

function blob(draw, x, y, radius, style) {
  draw.fillStyle = style;
  draw.beginPath();
  draw.ellipse(x, y, radius, 0.86 * radius, 0, 0, 2 * Math.PI);
  draw.fill();
}

/** Random numbers in [0, 1), the same for the same seed: a linear congruence modulo 2^32. */
function generator(seed) {
  let state = seed;
  return () => {
    state = (Math.imul(1664525, state) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}
