// A worker's steps of the last seconds: the work of each, and the bubbles between them.

import { element } from "./dom.js";

const SECONDS = 10;
const HEIGHT = 44;
const COPIES = 5;

export class Timeline {
  constructor() {
    this._canvas = element("canvas", { className: "timeline", role: "img" });
    this._summary = element("span", { className: "soft" });
    this.root = element("section", {}, element("h5", {}, "Steps ", this._summary), this._canvas);
  }

  show(steps, now) {
    const begin = now - SECONDS;
    const recent = steps.filter(({ ended }) => ended > begin);
    const busy = recent.reduce((total, step) => total + step.seconds, 0) / SECONDS;
    const meanMs = recent.length ? (1000 * busy * SECONDS) / recent.length : 0;
    const text = recent.length
      ? `${(recent.length / SECONDS).toFixed(1)} a second, ${meanMs.toFixed(1)} ms each, `
        + `busy ${Math.min(100, busy * 100).toFixed(0)} %`
      : "none in the last 10 s";
    this._summary.textContent = text;
    this._canvas.setAttribute("aria-label", `Steps of the last 10 seconds: ${text}`);
    this._draw(recent, begin);
  }

  /** A step is a bar: decoded rows below, prefilled tokens above, copies as a line at the top. */
  _draw(steps, begin) {
    const ratio = devicePixelRatio || 1;
    const width = this._canvas.clientWidth;
    if (!width) return;
    this._canvas.width = width * ratio;
    this._canvas.height = HEIGHT * ratio;
    const paint = this._canvas.getContext("2d");
    paint.scale(ratio, ratio);
    const style = getComputedStyle(this._canvas);
    const colour = (name) => style.getPropertyValue(`--${name}`);
    const [decode, prefill, copies] = [colour("held"), colour("shared"), colour("host")];
    const scale = width / SECONDS;
    for (const step of steps) {
      const right = (step.ended - begin) * scale;
      const left = Math.max(0, right - Math.max(step.seconds * scale, 0.6));
      const tokens = step.decodes + step.prefills || 1;
      const low = (HEIGHT - COPIES) * (step.decodes / tokens);
      paint.fillStyle = decode;
      paint.fillRect(left, HEIGHT - low, right - left, low);
      paint.fillStyle = prefill;
      paint.fillRect(left, COPIES, right - left, HEIGHT - COPIES - low);
      if (step.copies) {
        paint.fillStyle = copies;
        paint.fillRect(left, 0, Math.max(right - left, 2), COPIES - 1);
      }
    }
  }
}

/** The legend of the bars' colours. */
export function stepLegend() {
  const names = { held: "decode", shared: "prefill", host: "copies", free: "bubble" };
  return element("ul", { className: "legend" }, element("li", {}, "Steps:"),
    ...Object.entries(names).map(([state, name]) => element("li", {},
      element("i", { className: `dot ${state}`, "aria-hidden": "true" }), name)));
}
