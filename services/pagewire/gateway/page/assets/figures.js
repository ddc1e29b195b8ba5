// The figures at the top: each has a value, and a line for its last minute.

import { element } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 120;
const HEIGHT = 28;

const FIGURES = [
  ["Output", "tokens/s", (point) => point.rate, whole],
  ["Prefill", "tokens/s", (point) => point.prefillRate, whole],
  ["Running", "", (point) => point.running, whole],
  ["Waiting", "", (point) => point.waiting, whole],
  ["First token", "ms", (point) => point.firstMean, milliseconds],
  ["Per token", "ms", (point) => point.perMean, milliseconds],
  ["Blocks held", "%", (point) => (point.total ? point.used / point.total : null), percent],
  ["From cache", "%", (point) => point.hitShare, percent],
];

export class Figures {
  constructor() {
    this._tiles = FIGURES.map(([label, unit, read, write]) => {
      const value = element("span", { className: "value" }, "–");
      const line = document.createElementNS(SVG, "polyline");
      const chart = document.createElementNS(SVG, "svg");
      chart.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
      chart.setAttribute("preserveAspectRatio", "none");
      chart.setAttribute("aria-hidden", "true");
      chart.append(line);
      const tile = element("div", { className: "figure" },
        element("dt", {}, label),
        element("dd", {}, value, " ", element("span", { className: "soft" }, unit)));
      tile.append(chart);
      return { tile, value, line, read, write };
    });
    this.root = element("dl", { className: "figures" }, ...this._tiles.map(({ tile }) => tile));
  }

  show({ points, latest }) {
    const span = Math.max(10, latest.at - points[0].at);
    for (const { value, line, read, write } of this._tiles) {
      const now = read(latest);
      value.textContent = now === null || now === undefined ? "–" : write(now);
      const values = points.map((point) => read(point) ?? 0);
      const most = Math.max(...values, 1e-9);
      const drawn = points.map((point, index) => {
        const x = WIDTH - ((latest.at - point.at) / span) * WIDTH;
        return `${x.toFixed(1)},${(HEIGHT - 2 - (values[index] / most) * (HEIGHT - 4)).toFixed(1)}`;
      });
      line.setAttribute("points", drawn.join(" "));
    }
  }
}

function whole(value) {
  return value >= 10 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(1);
}

function milliseconds(seconds) {
  return whole(seconds * 1000);
}

function percent(share) {
  return whole(share * 100);
}
