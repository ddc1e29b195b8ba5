// The radix tree of cached prefixes, as indented rows: sizes and use, never text.

import { element } from "./dom.js";

const MAX_ROWS = 40;

/** The rows of a tree, each node below its parent. */
export function prefixRows(tree, blockSize) {
  const children = new Map();
  tree.parents.forEach((parent, index) => {
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(index);
  });
  const longest = Math.max(1, ...tree.blocks);
  const rows = [];
  const add = (index, depth) => {
    if (rows.length === MAX_ROWS) return;
    rows.push(row(tree, index, depth, longest, blockSize));
    for (const child of children.get(index + 1) ?? []) add(child, depth + 1);
  };
  for (const root of children.get(0) ?? []) add(root, 0);
  if (!rows.length) return [element("p", { className: "soft" }, "Nothing is cached.")];
  return [element("ul", {}, ...rows)];
}

function row(tree, index, depth, longest, blockSize) {
  const blocks = tree.blocks[index];
  const onHost = blocks - tree.on_device[index];
  const state = tree.on_device[index] === 0 ? "host"
    : ["cached", "held", "shared"][Math.min(2, tree.holders[index])];
  const bar = element("i", { className: `run ${state}`, "aria-hidden": "true" });
  bar.style.width = `${Math.max(3, 40 * (blocks / longest))}%`;
  const hits = tree.hits[index];
  const text = `${blocks * blockSize} tokens, ${hits} ${hits === 1 ? "hit" : "hits"}`
    + (onHost ? `, ${onHost} of ${blocks} blocks in host memory` : "");
  const item = element("li", { "aria-level": String(depth + 1), role: "listitem" }, bar,
    element("span", {}, text));
  item.style.paddingLeft = `${depth * 1.1}rem`;
  return item;
}
