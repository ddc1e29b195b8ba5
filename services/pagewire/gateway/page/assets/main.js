// Starts the page: the two views, the models and the API key.

import { Chat } from "./chat.js";
import { byId, element, toast } from "./dom.js";
import { Engine } from "./engine.js";
import { offerKill } from "./playground.js";
import { apiKey, models, setApiKey } from "./server.js";

const VIEWS = ["chat", "engine"];
const RETRY_MS = 2000;

const chat = new Chat(askForKey);
const engine = new Engine(askForKey);

function show() {
  const name = VIEWS.find((view) => location.hash === `#${view}`) ?? "chat";
  for (const view of VIEWS) {
    byId(`${view}-view`).hidden = view !== name;
    const link = byId(`to-${view}`);
    if (view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  engine.shown = name === "engine";
  document.title = name === "chat" ? "Pagewire" : "Engine · Pagewire";
}

async function loadModels() {
  try {
    const list = await models();
    const options = list.map(({ id }) => element("option", { value: id }, id));
    byId("model").replaceChildren(...options);
    if (!list.length) setTimeout(loadModels, RETRY_MS); // no scheduler has had a worker yet
  } catch (error) {
    if (error.status === 401) askForKey();
    else toast(error.message);
  }
}

function askForKey() {
  byId("key").value = apiKey();
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

byId("key-button").addEventListener("click", askForKey);
byId("key-dialog").addEventListener("close", () => {
  if (byId("key-dialog").returnValue !== "save") return;
  setApiKey(byId("key").value.trim());
  loadModels();
  window.dispatchEvent(new Event("key"));
});
// Enter in the field uses the key; without this, it would press the form's first button, Cancel.
byId("key").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  byId("key-dialog").close("save");
});
window.addEventListener("hashchange", show);
window.addEventListener("beforeunload", () => chat.stop());
show();
offerKill();
loadModels();
