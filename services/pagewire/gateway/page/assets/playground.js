// With `pagewire run --playground`: buttons that kill a worker, to see that streams continue.

import { button, byId, toast } from "./dom.js";
import { call } from "./server.js";

let asked = null;

/** Whether this server lets the page kill workers. */
export function hasPlayground() {
  asked ??= call("engine/playground")
    .then(async (response) => (await response.json()).playground)
    .catch(() => false);
  return asked;
}

/** Kills the worker at an address, or the busiest one of the chosen model, and reports it. */
export async function killWorker(address = null) {
  try {
    const body = JSON.stringify(address ? { worker: address } : { model: byId("model").value });
    const response = await call("engine/kill", { method: "POST", body });
    const { killed } = await response.json();
    toast(`${killed} was killed. It is started again, and open streams go on.`);
  } catch (error) {
    toast(error.message);
  }
}

/** A button that kills one worker; hidden without a playground. */
export function killButton(address) {
  const made = button("Kill", () => killWorker(address),
    { className: "danger", hidden: true, "aria-label": "Kill this worker" });
  hasPlayground().then((has) => { made.hidden = !has; });
  return made;
}

/** Shows the button of the chat, while an answer streams. */
export async function offerKill() {
  if (!await hasPlayground()) return;
  byId("kill").hidden = false;
  byId("kill").addEventListener("click", () => killWorker());
}
