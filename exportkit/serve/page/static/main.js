// The page: asks for the status every second while it is seen, and shows the model that the address names.

import { el, fill } from "./dom.js";
import { ModelView } from "./model_view.js";
import { onKeyNeeded, status } from "./requests.js";
import { setUpTheme } from "./theme.js";
import { short } from "./words.js";

const PERIOD = 1000;
const byId = (id) => document.getElementById(id);
const views = new Map(); // by address
let newest = null;
let timer = null;
let asking = false;

/** The address of a model, which a link can have. */
const address = (model) => `#/${encodeURIComponent(model.name)}/${encodeURIComponent(model.version)}`;

async function poll() {
  if (asking) return;
  asking = true;
  try {
    newest = await status();
    show();
  } catch (error) {
    say("bad", error.status === undefined ? "No connection" : error.message);
  }
  asking = false;
  clearTimeout(timer);
  if (!document.hidden) timer = setTimeout(poll, PERIOD);
}

function show() {
  const { server, models, bounds } = newest;
  say(server.ready ? "good" : "bad", server.draining ? "Draining" : server.ready ? "Ready" : "Not ready");
  byId("version").textContent = `serve ${server.version}`;
  const at = performance.now() / 1e3;
  for (const model of models) {
    const place = address(model);
    if (views.get(place)?.outdated(model) ?? true) views.set(place, new ModelView(model, bounds));
    views.get(place).update(model, at);
  }
  const here = new Set(models.map(address));
  for (const place of views.keys()) if (!here.has(place)) views.delete(place);
  navigate();
}

function navigate() {
  const { models, others } = newest;
  const chosen = models.find((model) => address(model) === location.hash) ?? models[0];
  drawModels(models, others, chosen);
  const main = byId("model");
  const view = chosen && views.get(address(chosen));
  if (view) {
    if (main.firstChild !== view.element) fill(main, view.element);
    document.title = `${chosen.name} – exportkit serve`;
  } else if (!main.querySelector(".empty")) {
    fill(main, el("p", { class: "card empty" }, "This server has loaded no model."));
  }
}

function drawModels(models, others, chosen) {
  const nav = byId("models");
  const state = JSON.stringify([models.map((m) => [m.name, m.version, m.ready]), others, chosen && address(chosen)]);
  if (nav.dataset.state !== state) {
    // Only when something changed, because a link that is replaced loses the focus.
    nav.dataset.state = state;
    const focused = document.activeElement?.getAttribute("href");
    fill(nav, el("ul", {}, models.map((model) => entry(model, model === chosen)), others.map(absent)));
    if (focused) [...nav.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus();
  }
  models.forEach((model, index) => {
    const rate = views.get(address(model)).rate;
    nav.querySelectorAll("a .rate")[index].textContent = rate === null ? "" : `${short(rate)}/s`;
  });
}

function entry(model, chosen) {
  const link = el(
    "a",
    { href: address(model), "aria-current": chosen ? "page" : null },
    el("span", { class: `dot ${model.ready ? "good" : "bad"}`, role: "img", "aria-label": model.ready ? "ready" : "not ready" }),
    el("b", {}, model.name),
    el("span", { class: "faint" }, `version ${model.version}`),
    el("span", { class: "rate faint" }),
  );
  return el("li", {}, link);
}

function absent({ name, version, state, reason }) {
  const why = reason ? `${state.toLowerCase()}: ${reason}` : state.toLowerCase();
  return el("li", { class: "absent" }, el("b", {}, name), el("span", { class: "faint" }, `${version} ${why}`));
}

function say(kind, text) {
  const place = byId("server");
  place.className = kind;
  if (place.textContent !== text) place.textContent = text;
}

function askForKey(message) {
  const form = byId("key");
  const field = byId("key-field");
  say("bad", "API key needed");
  byId("key-problem").textContent = message;
  form.hidden = false;
  field.focus();
  return new Promise((resolve) => {
    form.onsubmit = (event) => {
      event.preventDefault();
      form.hidden = true;
      resolve(field.value.trim());
      field.value = "";
    };
  });
}

onKeyNeeded(askForKey);
setUpTheme(byId("theme"));
addEventListener("hashchange", () => {
  if (newest === null || !location.hash.startsWith("#/")) return;
  navigate();
  byId("model").focus({ preventScroll: true });
});
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : poll()));
poll();
