// Building elements. Text becomes text nodes only: no string is ever parsed as HTML.

/** The element with an id of index.html. */
export function byId(id) {
  return document.getElementById(id);
}

/**
 * An element with properties, attributes and children.
 *
 * `on...` names are listeners; names with a dash and `role` are attributes; others are properties.
 * A child is a node, a string, or null for none.
 */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name.includes("-") || name === "role") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** A button that calls `onclick`. */
export function button(label, onclick, properties = {}) {
  return element("button", { type: "button", onclick, ...properties }, label);
}

let toastTimer = 0;

/** Shows a message for some seconds; screen readers read it at once. */
export function toast(text) {
  const box = byId("toast");
  box.textContent = text;
  box.hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => { box.hidden = true; }, 6000);
}

/** Lets a screen reader read a text after its current one. */
export function announce(text) {
  byId("announcements").textContent = text;
}

/** Copies a text, and says so. */
export async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    toast(`${what} copied`);
  } catch {
    // Only pages of HTTPS and of this machine may write to the clipboard.
    const area = element("textarea", { value: text });
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    toast(copied ? `${what} copied` : `${what} could not be copied`);
  }
}
