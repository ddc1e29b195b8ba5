// The data that the browser stores: conversations and settings. It is not sent anywhere.

import { toast } from "./dom.js";
import { Conversation } from "./conversation.js";

const CONVERSATION = "pagewire.conversation.";
const SETTINGS = "pagewire.settings";

/** All conversations, the latest first. An unreadable one is left out, and stays stored. */
export function conversations() {
  const found = [];
  for (let index = 0; index < localStorage.length; index += 1) {
    const key = localStorage.key(index);
    if (!key.startsWith(CONVERSATION)) continue;
    const saved = parsed(localStorage.getItem(key));
    if (saved?.nodes) found.push(new Conversation(saved));
  }
  return found.sort((a, b) => b.updated - a.updated);
}

export function save(conversation) {
  write(CONVERSATION + conversation.id, conversation);
}

export function remove(conversation) {
  localStorage.removeItem(CONVERSATION + conversation.id);
}

export function settings() {
  return parsed(localStorage.getItem(SETTINGS)) ?? {};
}

export function saveSettings(values) {
  write(SETTINGS, values);
}

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
  } catch {
    toast("The browser's storage is full: delete a conversation to keep this one");
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
