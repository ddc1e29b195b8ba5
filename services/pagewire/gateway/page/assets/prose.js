// Text of a model as elements: paragraphs, headings, lists, code. `leaf(from, to)` makes the nodes
// of a part of the text, so that the caller may mark its tokens.

import { element } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)$/;
const HEADING = /^(#{1,6}) +/;
const ITEM = /^(\s*)([-*+]|\d{1,3}[.)]) +/;
const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*/g;

/** The blocks of a text. */
export function prose(text, leaf) {
  const blocks = document.createDocumentFragment();
  const lines = linesOf(text);
  for (let index = 0; index < lines.length;) {
    const line = lines[index];
    const fence = FENCE.exec(line.text);
    if (fence) {
      index = addCode(blocks, text, lines, index, fence, leaf);
    } else if (HEADING.test(line.text)) {
      const [mark] = HEADING.exec(line.text);
      blocks.append(inline(element("h4"), text, line.from + mark.length, line.to, leaf));
      index += 1;
    } else if (ITEM.test(line.text)) {
      index = addList(blocks, text, lines, index, leaf);
    } else if (line.text.trim() === "") {
      index += 1;
    } else {
      let last = index;
      while (last + 1 < lines.length && isPlain(lines[last + 1].text)) last += 1;
      blocks.append(inline(element("p"), text, line.from, lines[last].to, leaf));
      index = last + 1;
    }
  }
  return blocks;
}

function isPlain(line) {
  return line.trim() !== "" && !FENCE.test(line) && !HEADING.test(line) && !ITEM.test(line);
}

function linesOf(text) {
  let from = 0;
  return text.split("\n").map((line) => {
    const found = { text: line, from, to: from + line.length };
    from = found.to + 1;
    return found;
  });
}

function addCode(blocks, text, lines, index, [, mark, language], leaf) {
  let end = index + 1;
  while (end < lines.length && !lines[end].text.trim().startsWith(mark)) end += 1;
  const code = element("code");
  if (end > index + 1) code.append(...leaf(lines[index + 1].from, lines[end - 1].to));
  const name = language.trim() || "code";
  blocks.append(element("pre", { tabIndex: 0, role: "group", "aria-label": name }, code));
  return end + 1;
}

function addList(blocks, text, lines, index, leaf) {
  const ordered = /\d/.test(ITEM.exec(lines[index].text)[2]);
  const list = element(ordered ? "ol" : "ul");
  if (ordered) list.start = Number.parseInt(ITEM.exec(lines[index].text)[2], 10);
  while (index < lines.length) {
    const item = ITEM.exec(lines[index].text);
    if (!item || /\d/.test(item[2]) !== ordered) break;
    const { from, to } = lines[index];
    const made = inline(element("li"), text, from + item[0].length, to, leaf);
    if (item[1].length > 1) made.className = "nested";
    list.append(made);
    index += 1;
  }
  blocks.append(list);
  return index;
}

function inline(parent, text, from, to, leaf) {
  let at = from;
  for (const match of text.slice(from, to).matchAll(INLINE)) {
    const begin = from + match.index;
    const width = match[1] === undefined ? 2 : 1;
    const end = begin + match[0].length;
    parent.append(...leaf(at, begin));
    const tag = match[1] === undefined ? "strong" : "code";
    parent.append(element(tag, {}, ...leaf(begin + width, end - width)));
    at = end;
  }
  parent.append(...leaf(at, to));
  return parent;
}
