// Running and waiting requests, with their phase. The page does not receive their text.

import { element } from "./dom.js";
import { workerName } from "./topology.js";

const PHASES = ["waiting", "prefill", "decode", "preempted", "held"];

/** A row for each request of a state. */
export function requestRows(state) {
  const rows = [];
  for (const { snapshot } of state.schedulers) {
    const table = snapshot?.requests;
    table?.ids.forEach((id, index) => rows.push(row(table, index, id, snapshot.workers)));
  }
  return rows;
}

function row(table, index, id, workers) {
  const phase = PHASES[table.phases[index]];
  const worker = workers[table.workers[index] - 1];
  const [prompt, output, most] = [table.prompt[index], table.output[index], table.max[index]];
  const share = phase === "prefill" ? table.computed[index] / Math.max(1, prompt) : output / most;
  const bar = element("i", { className: `share ${phase}` });
  bar.style.width = `${Math.min(100, share * 100)}%`;
  return element("tr", {},
    element("th", { scope: "row", title: id }, element("code", {}, short(id))),
    element("td", {}, element("span", { className: `phase ${phase}` }, phase)),
    element("td", {}, worker ? workerName(worker.address) : "–"),
    element("td", {}, String(prompt)),
    element("td", {}, String(table.cached[index])),
    element("td", {}, `${output} of ${most}`),
    element("td", { "aria-label": `${Math.round(share * 100)} %` },
      element("span", { className: "track" }, bar)));
}

function short(id) {
  return id.length > 22 ? `${id.slice(0, 21)}…` : id;
}
