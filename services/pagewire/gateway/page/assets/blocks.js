// A worker's blocks as a map: one square for a block, or for several of the same state.

import { element } from "./dom.js";

const STATES = ["free", "cached", "held", "shared"];
const GAP = 1;

export class BlockMap {
  /** `host`: blocks in host memory; there, blocks in use count as cached. */
  constructor(title, host = false) {
    this._colours = host ? ["free", "host", "host", "host"] : STATES;
    this._host = host;
    this._canvas = element("canvas", { role: "img" });
    this._counts = element("span", { className: "soft counts" });
    this.root = element("section", { className: "blocks" },
      element("h5", {}, `${title} `, this._counts), this._canvas);
    this._title = title;
  }

  show({ cells, per_cell: perCell, counts }) {
    const named = this._host
      ? [`${counts[0]} free`, `${counts[1] + counts[2] + counts[3]} cached`]
      : STATES.map((state, index) => `${counts[index]} ${state}`);
    const text = named.join(", ") + (perCell > 1 ? `; a square is ${perCell} blocks` : "");
    this._counts.textContent = text;
    this._canvas.setAttribute("aria-label", `${this._title}: ${text}`);
    this._draw(cells);
  }

  _draw(cells) {
    const ratio = devicePixelRatio || 1;
    const width = this._canvas.parentElement.clientWidth;
    if (!width) return;
    const size = cells.length > 600 ? 9 : 12;
    const columns = Math.max(1, Math.floor((width + GAP) / size));
    const height = Math.ceil(cells.length / columns) * size - GAP;
    this._canvas.style.height = `${height}px`;
    this._canvas.width = width * ratio;
    this._canvas.height = height * ratio;
    const paint = this._canvas.getContext("2d");
    paint.scale(ratio, ratio);
    const style = getComputedStyle(this._canvas);
    const colours = this._colours.map((name) => style.getPropertyValue(`--${name}`));
    for (let index = 0; index < cells.length; index += 1) {
      paint.fillStyle = colours[Number(cells[index])];
      paint.beginPath();
      paint.roundRect((index % columns) * size, Math.floor(index / columns) * size,
        size - GAP, size - GAP, 2);
      paint.fill();
    }
  }
}

/** The legend of the colours. */
export function legend() {
  const names = { free: "free", cached: "cached, without a holder", held: "held by one request",
    shared: "shared by several", host: "in host memory" };
  return element("ul", { className: "legend" }, element("li", {}, "Blocks:"), ...Object.entries(names).map(([state, name]) =>
    element("li", {}, element("i", { className: `dot ${state}`, "aria-hidden": "true" }), name)));
}
