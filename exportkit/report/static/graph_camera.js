// Moves and scales a picture: with the wheel, one or two pointers, or keys.

const [SMALLEST, LARGEST_SCALE] = [0.03, 4];
const DRAG = 4; // pixels that a pointer may move in a click
const MARGIN = 16;

export class Camera {
  /** `layer` is the group in `view`, an svg element, that moves. `clicked` gets the event of a click. */
  constructor(view, layer, clicked) {
    Object.assign(this, { view, layer, clicked, x: 0, y: 0, scale: 1, pointers: new Map() });
    view.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    view.addEventListener("pointerdown", (event) => this.press(event));
    view.addEventListener("pointermove", (event) => this.drag(event));
    view.addEventListener("pointerup", (event) => this.release(event));
    view.addEventListener("pointercancel", (event) => this.pointers.delete(event.pointerId));
  }

  get size() {
    return [this.view.clientWidth, this.view.clientHeight];
  }

  set(x, y, scale) {
    this.scale = Math.min(LARGEST_SCALE, Math.max(SMALLEST, scale));
    [this.x, this.y] = [x, y];
    this.layer.setAttribute("transform", `translate(${x.toFixed(1)},${y.toFixed(1)}) scale(${this.scale.toFixed(4)})`);
    this.view.classList.toggle("far", this.scale < 0.4);
    this.moved?.();
  }

  move(dx, dy) {
    this.set(this.x + dx, this.y + dy, this.scale);
  }

  /** Scales, while the point (x, y) of the view stays where it is. */
  zoom(factor, x = this.size[0] / 2, y = this.size[1] / 2) {
    const scale = Math.min(LARGEST_SCALE, Math.max(SMALLEST, this.scale * factor));
    const by = scale / this.scale;
    this.set(x - (x - this.x) * by, y - (y - this.y) * by, scale);
  }

  /** Shows a whole scene; with `readable`, as much of it from the top as can be read. */
  fit(scene, readable = false) {
    const [width, height] = this.size;
    const across = (width - 2 * MARGIN) / Math.max(1, scene.width);
    const whole = Math.min(across, (height - 2 * MARGIN) / Math.max(1, scene.height), 1.4);
    const scale = readable ? Math.max(whole, Math.min(1, Math.max(across, 0.62))) : whole;
    const y = scene.height * scale < height ? (height - scene.height * scale) / 2 : MARGIN;
    // Where not all of it is seen, what comes first is as close to the middle as the edges allow.
    const first = scene.boxes.reduce((top, box) => (box.y < top.y ? box : top), scene.boxes[0] ?? { x: 0, width: 0 });
    const beyond = width - scene.width * scale;
    const x = Math.max(beyond - MARGIN, Math.min(MARGIN, width / 2 - (first.x + first.width / 2) * scale));
    this.set(beyond >= 0 ? beyond / 2 : x, y, scale);
  }

  /** Brings a box to the middle, if it is not well in view. */
  show(box, always = false) {
    const [width, height] = this.size;
    const x = this.x + (box.x + box.width / 2) * this.scale;
    const y = this.y + (box.y + Math.min(box.height, 60) / 2) * this.scale;
    const inside = x > 60 && x < width - 60 && y > 40 && y < height - 40;
    if (always && this.scale < 0.6) this.zoom(0.8 / this.scale);
    if (always || !inside) this.set(width / 2 - (box.x + box.width / 2) * this.scale, height / 2 - (box.y + Math.min(box.height, 60) / 2) * this.scale, this.scale);
  }

  at(event) {
    const box = this.view.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  /** The page scrolls with the wheel until the picture was clicked, or a key asks for more. */
  wheel(event) {
    if (!event.ctrlKey && !event.metaKey && document.activeElement !== this.view) return;
    event.preventDefault();
    const lines = event.deltaMode === 1 ? 16 : 1;
    this.zoom(Math.exp(-event.deltaY * lines * (event.ctrlKey ? 0.006 : 0.0016)), ...this.at(event));
  }

  press(event) {
    if (event.button !== 0) return;
    this.view.focus({ preventScroll: true });
    this.view.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, this.at(event));
    this.start = this.pointers.size === 1 ? { at: this.at(event), target: event.target } : null;
  }

  drag(event) {
    const before = this.pointers.get(event.pointerId);
    if (!before) return;
    const now = this.at(event);
    const other = [...this.pointers].find(([id]) => id !== event.pointerId)?.[1];
    this.pointers.set(event.pointerId, now);
    if (other) {
      const distance = ([x, y]) => Math.hypot(x - other[0], y - other[1]);
      this.move((now[0] - before[0]) / 2, (now[1] - before[1]) / 2);
      this.zoom(distance(now) / Math.max(1, distance(before)), (now[0] + other[0]) / 2, (now[1] + other[1]) / 2);
    } else if (!this.start || Math.hypot(now[0] - this.start.at[0], now[1] - this.start.at[1]) > DRAG) {
      this.start = null;
      this.move(now[0] - before[0], now[1] - before[1]);
    }
  }

  release(event) {
    if (!this.pointers.delete(event.pointerId) || !this.start) return;
    this.clicked(this.start.target, event);
    this.start = null;
  }
}
