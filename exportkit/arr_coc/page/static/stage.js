// The picture on which a region is drawn and patches are looked at, with a pointer or with keys.

import { drawView } from "./drawing.js";
import { el, svg } from "../../dom.js";

const CLICK = 4; // pixels that a pointer may move in a click

export class Stage {
  /** `drawn` gets a region that was drawn, `looked` the index of the patch that is looked at, `dropped` a file. */
  constructor(patch, { drawn, looked, dropped }) {
    this.patch = patch;
    this.drawn = drawn;
    this.looked = looked;
    this.view = el("canvas", {});
    this.outline = svg("rect", { class: "region" });
    this.halo = svg("rect", { class: "region-halo" });
    this.cursor = svg("rect", { class: "cursor", width: patch, height: patch, visibility: "hidden" });
    this.overlay = svg(
      "svg",
      {
        tabindex: 0,
        role: "application",
        "aria-label": "Picture: draw a region with the pointer, go from patch to patch with the arrow keys",
        pointerdown: (event) => this.press(event),
        pointermove: (event) => this.move(event),
        pointerup: (event) => this.release(event),
        pointercancel: () => this.cancel(),
        keydown: (event) => this.key(event),
      },
      this.halo,
      this.outline,
      this.cursor,
    );
    this.element = el(
      "div",
      {
        class: "stage",
        dragover: (event) => this.drag(event, true),
        dragleave: (event) => this.drag(event, false),
        drop: (event) => {
          this.drag(event, false);
          if (event.dataTransfer.files.length) dropped(event.dataTransfer.files[0]);
        },
      },
      this.view,
      this.overlay,
    );
  }

  /** Shows a picture, a canvas of whole patches. */
  setPicture(picture) {
    this.picture = picture;
    this.columns = picture.width / this.patch;
    this.rows = picture.height / this.patch;
    this.overlay.setAttribute("viewBox", `0 0 ${picture.width} ${picture.height}`);
    this.place = null;
    this.cursor.setAttribute("visibility", "hidden");
  }

  setRegion(region) {
    this.region = region;
    this.frame(region);
  }

  draw(view, answer) {
    drawView(this.view, this.picture, this.patch, view, answer);
  }

  frame({ left, top, width, height }) {
    for (const rectangle of [this.halo, this.outline]) {
      for (const [name, value] of Object.entries({ x: left, y: top, width, height })) rectangle.setAttribute(name, value);
    }
  }

  look(row, column) {
    this.place = { row: clamp(row, 0, this.rows - 1), column: clamp(column, 0, this.columns - 1) };
    this.cursor.setAttribute("x", this.place.column * this.patch);
    this.cursor.setAttribute("y", this.place.row * this.patch);
    this.cursor.setAttribute("visibility", "visible");
    this.looked(this.place.row * this.columns + this.place.column);
  }

  /** Where an event is, in the picture's pixels. */
  at(event) {
    const box = this.overlay.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * this.picture.width;
    const y = ((event.clientY - box.top) / box.height) * this.picture.height;
    return { x: clamp(Math.round(x), 0, this.picture.width), y: clamp(Math.round(y), 0, this.picture.height) };
  }

  press(event) {
    if (event.button !== 0) return;
    this.start = this.at(event);
    this.overlay.setPointerCapture(event.pointerId);
  }

  move(event) {
    const here = this.at(event);
    if (this.start) this.frame(between(this.start, here));
    else this.look(Math.floor(here.y / this.patch), Math.floor(here.x / this.patch));
  }

  release(event) {
    if (!this.start) return;
    const region = between(this.start, this.at(event));
    this.start = null;
    if (region.width > CLICK && region.height > CLICK) this.drawn(region);
    else {
      this.frame(this.region);
      this.move(event);
    }
  }

  cancel() {
    this.start = null;
    this.frame(this.region);
  }

  key(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const { row, column } = this.place ?? { row: 0, column: 0 };
    if (this.place) this.look(row + step[0], column + step[1]);
    else this.look(row, column);
  }

  drag(event, over) {
    event.preventDefault();
    this.element.classList.toggle("over", over);
  }
}

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

function between(one, other) {
  const [left, top] = [Math.min(one.x, other.x), Math.min(one.y, other.y)];
  return { left, top, width: Math.abs(one.x - other.x), height: Math.abs(one.y - other.y) };
}
