// The page: asks for the status every second while it is seen, and shows the model that the address names.

import { el, fill } from "./dom.js";
import { ModelView } from "./model_view.js";
import { access, status } from "./requests.js";
import { setUpTheme } from "./theme.js";

const byId = (id) => document.getElementById(id);
const address = ({ name, version }) => `#/${encodeURIComponent(name)}/${encodeURIComponent(version)}`;
let newest = null; // status; each of its models has its samples of the last minute
let view = null;

async function poll() {
  try {
    if (!document.hidden && byId("key").hidden) take(await status());
  } catch (error) {
    say("bad", error.status ? error.message : "No connection");
    if (error.status === 401) {
      byId("key").hidden = false;
      byId("key-field").focus();
    }
  }
  setTimeout(poll, 1000);
}

function take(status) {
  const at = performance.now() / 1e3;
  for (const model of status.models) {
    const { now, ...same } = model;
    model.key = JSON.stringify(same);
    const before = newest?.models.find((one) => one.key === model.key)?.samples ?? [];
    // A server that begins again counts from 0.
    model.samples = [...before.filter((one) => one.at > at - 60 && one.requests <= now.requests), { ...now, at }];
  }
  newest = status;
  show();
}

function show() {
  const { server, models } = newest;
  say(server.ready ? "good" : "bad", server.draining ? "Draining" : server.ready ? "Ready" : "Not ready");
  byId("version").textContent = `serve ${server.version}`;
  const chosen = models.find((model) => address(model) === location.hash) ?? models[0];
  const links = el("ul", {}, models.map((model) => entry(model, model === chosen)));
  if (!byId("models").firstChild?.isEqualNode(links)) fill(byId("models"), links); // which takes the focus away
  if (!view || view.key !== chosen?.key) {
    view = chosen ? new ModelView(chosen) : { element: el("p", { class: "card empty" }, "No model is loaded.") };
    fill(byId("model"), view.element);
  }
  if (chosen) view.show(chosen.samples);
}

function entry({ name, version, now }, chosen) {
  const state = now.ready ? "good" : "bad";
  const link = { href: address({ name, version }), class: state, "aria-current": chosen && "page" };
  const note = `version ${version}${now.ready ? "" : ", not ready"}`;
  return el("li", {}, el("a", link, el("b", {}, name), el("span", { class: "faint" }, note)));
}

function say(kind, text) {
  byId("server").className = kind;
  if (byId("server").textContent !== text) byId("server").textContent = text; // it is read out
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  access.key = byId("key-field").value.trim();
  byId("key").hidden = true;
});
addEventListener("hashchange", () => {
  if (newest) show();
  byId("model").focus({ preventScroll: true });
});
setUpTheme(byId("theme"));
poll();
