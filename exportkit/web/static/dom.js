// Makes elements. Text is always a text node, so nothing that a server or a package says can become HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Returns an element. Children are nodes or text; a child or an attribute that is null or false is left out. */
export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Returns an SVG element, likewise. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** Replaces what is in an element. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat().filter(isGiven));
  return element;
}

/** A name such as "batch.mask", which may go on in the next line after a dot. */
export function dotted(name) {
  return name.split(/(?<=\.)/).flatMap((part) => [part, el("wbr")]);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (isGiven(value)) element.setAttribute(name, String(value));
  }
  element.append(...children.flat().filter(isGiven));
  return element;
}

function isGiven(value) {
  return value != null && value !== false;
}
