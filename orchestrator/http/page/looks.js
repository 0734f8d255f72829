"use strict";
/* How heads look: each has a hue, a line and a mark of its own, in the order in which they are met. */

const MARKS = ["●", "■", "▲", "◆"];
const known = []; // heads in that order

/** The class of a head, `.h0` to `.h7`; heads beyond eight share a hue and differ by their mark. */
function classOf(name) {
  if (!known.includes(name)) known.push(name);
  return `h${known.indexOf(name) % 8}`;
}

function markOf(name) {
  classOf(name);
  const at = known.indexOf(name);
  return MARKS[(at + Math.floor(at / 8)) % MARKS.length];
}

// --- the document ---

const $ = (id) => document.getElementById(id);

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children); // strings become text nodes
  return element;
}

const make = (tag, attributes = {}, ...children) => build(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) =>
  build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

/** A function that calls another one once in the next frame, however often it is called itself. */
function eachFrame(work) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      work();
    });
  };
}

/** Whose the tokens of a text are. */
function legendOf(heads) {
  const entry = (name) =>
    make("li", {}, make("span", { class: `mark ${classOf(name)}`, "aria-hidden": "true" }, markOf(name)),
      make("span", { class: `drafted ${classOf(name)}` }, name));
  const own = heads.length ? "not underlined: the target's own; drafted by:" : "all tokens are the target's own";
  return [make("li", {}, own), ...heads.map(entry)];
}
