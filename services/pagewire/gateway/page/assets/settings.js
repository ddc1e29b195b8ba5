// The settings of requests: system prompt, sampling, tools, the form of the answer.

import { button, byId, element } from "./dom.js";
import * as storage from "./storage.js";

// A field's name is the API's. An empty field is left out, so that the server's default applies.
const NUMBERS = [
  ["temperature", "Temperature", 0, 2, 0.1],
  ["top_p", "Top p", 0, 1, 0.05],
  ["top_k", "Top k", -1, null, 1],
  ["min_p", "Min p", 0, 1, 0.01],
  ["max_tokens", "Max tokens", 1, null, 1],
  ["seed", "Seed", null, null, 1],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.1],
  ["repetition_penalty", "Repetition penalty", 0.01, null, 0.05],
];
const CHECKS = ["logprobs", "ignore_eos"];
const EXAMPLE_TOOL = JSON.stringify([{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather in a city",
    parameters: {
      type: "object",
      properties: { city: { type: "string" } },
      required: ["city"],
    },
  },
}], null, 2);
const EXAMPLE_SCHEMA = JSON.stringify({
  type: "object",
  properties: { answer: { type: "string" } },
  required: ["answer"],
  additionalProperties: false,
}, null, 2);

/** A setting that is not valid JSON. */
export class SettingError extends Error {}

export class Settings {
  constructor() {
    this.values = { logprobs: true, format: "text", ...storage.settings() };
    this._build();
  }

  get system() {
    return this.values.system ?? "";
  }

  /** The fields of a request's body; SettingError names a setting that cannot be used. */
  fields() {
    const values = this.values;
    const fields = {};
    for (const [name] of NUMBERS) {
      if (values[name] !== undefined && values[name] !== "") fields[name] = Number(values[name]);
    }
    const stop = (values.stop ?? "").split("\n").filter((line) => line !== "");
    if (stop.length) fields.stop = stop;
    if (values.logprobs) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
    if (values.ignore_eos) fields.ignore_eos = true;
    if (values.tools?.trim()) fields.tools = json(values.tools, "Tools");
    if (values.format === "json_object") fields.response_format = { type: "json_object" };
    if (values.format === "json_schema") {
      const schema = json(values.schema || EXAMPLE_SCHEMA, "JSON schema");
      fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    }
    return fields;
  }

  _build() {
    const panel = byId("settings");
    const format = element("select", { id: "set-format", onchange: () => this._read() },
      element("option", { value: "text" }, "Text"),
      element("option", { value: "json_object" }, "Any JSON object"),
      element("option", { value: "json_schema" }, "JSON of a schema"));
    this._schema = labelled("JSON schema", this._area("schema", 6, EXAMPLE_SCHEMA));
    panel.append(
      element("h2", {}, "Settings"),
      labelled("System prompt", this._area("system", 3, "None")),
      element("h3", {}, "Sampling"),
      element("div", { className: "numbers" }, ...NUMBERS.map((row) => this._number(row))),
      labelled("Stop strings, one a line", this._area("stop", 2, "None")),
      this._check("logprobs", "Token probabilities"),
      this._check("ignore_eos", "Go on after the end mark"),
      element("h3", {}, "Answer"),
      labelled("Form", format),
      this._schema,
      labelled("Tools, as JSON", this._area("tools", 5, "None")),
      button("Insert an example tool", () => {
        byId("set-tools").value = EXAMPLE_TOOL;
        this._read();
      }),
      button("Reset all settings", () => this._show({ logprobs: true, format: "text" })),
    );
    this._show(this.values);
  }

  _number([name, label, min, max, step]) {
    const input = element("input", {
      id: `set-${name}`, type: "number", step: step < 1 ? "any" : String(step),
      placeholder: "default", oninput: () => this._read(),
    });
    if (min !== null) input.min = min;
    if (max !== null) input.max = max;
    return labelled(label, input);
  }

  _area(name, rows, placeholder) {
    return element("textarea", {
      id: `set-${name}`, rows, placeholder, spellcheck: false, oninput: () => this._read(),
    });
  }

  _check(name, label) {
    return element("label", { className: "check" },
      element("input", { id: `set-${name}`, type: "checkbox", onchange: () => this._read() }), label);
  }

  _inputs() {
    const names = [...NUMBERS.map(([name]) => name), "system", "stop", "schema", "tools", "format"];
    return names.map((name) => [name, byId(`set-${name}`)]);
  }

  _show(values) {
    for (const [name, input] of this._inputs()) input.value = values[name] ?? "";
    byId("set-format").value = values.format ?? "text";
    for (const name of CHECKS) byId(`set-${name}`).checked = Boolean(values[name]);
    this._read();
  }

  _read() {
    for (const [name, input] of this._inputs()) this.values[name] = input.value;
    for (const name of CHECKS) this.values[name] = byId(`set-${name}`).checked;
    this._schema.hidden = this.values.format !== "json_schema";
    storage.saveSettings(this.values);
  }
}

function labelled(label, input) {
  return element("label", { className: "field" }, element("span", {}, label), input);
}

function json(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SettingError(`${what}: ${error.message}`);
  }
}
