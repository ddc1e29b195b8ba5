// A request as a shell command, and as Python. Neither contains the key.

import { apiKey } from "./server.js";

const OPENAI = new Set([
  "model", "messages", "stream", "stream_options", "temperature", "top_p", "max_tokens", "seed",
  "stop", "presence_penalty", "frequency_penalty", "logprobs", "top_logprobs", "tools",
  "response_format",
]);

/** The request as a curl command. */
export function curl(body) {
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const key = apiKey() ? '  -H "Authorization: Bearer $PAGEWIRE_API_KEY" \\\n' : "";
  return `curl -N ${address("v1/chat/completions")} \\\n${key}`
    + `  -H 'Content-Type: application/json' \\\n  -d '${quoted}'\n`;
}

/** The request as a program that uses OpenAI's client. */
export function python(body) {
  const own = Object.fromEntries(Object.entries(body).filter(([name]) => OPENAI.has(name)));
  const others = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI.has(name)));
  const lines = Object.entries(own).map(([name, value]) => `    ${name}=${literal(value)},`);
  if (Object.keys(others).length) lines.push(`    extra_body=${literal(others)},`);
  const key = apiKey() ? 'os.environ["PAGEWIRE_API_KEY"]' : '"none"';
  return `${apiKey() ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${literal(address("v1"))}, api_key=${key})
stream = client.chat.completions.create(
${lines.join("\n")}
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
`;
}

function address(path) {
  return new URL(path, document.baseURI.split("#")[0]).href;
}

function literal(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") {
    const items = Object.entries(value).map(([name, item]) => `${literal(name)}: ${literal(item)}`);
    return `{${items.join(", ")}}`;
  }
  return JSON.stringify(value);
}
