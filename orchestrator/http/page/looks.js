"use strict";
/* How heads look: a colour of their kind (Okabe and Ito's, and a few of Paul Tol's), and a mark. */

const FAMILIES = {
  plain: "#7F7F7F", hf: "#B8A05A", bigram: "#999933", lookup: "#56B4E9", lm: "#009E73",
  dflash: "#666633", jetspec: "#225522", dspark: "#332288",
  eagle3: "#E69F00", specblock: "#0072B2", route: "#D55E00", merge: "#AA4499", auto: "#000000",
};
const UNKNOWN = ["#009E73", "#D55E00", "#56B4E9", "#882255", "#E69F00", "#0072B2"];
const MARKS = ["●", "■", "▲", "◆"];

/** The colour of each head: of its kind, such as of `specblock` for `specblock-code`, else one that no kind of these has. */
function coloursOf(names) {
  const families = names.map((name) => name.split(/[^a-z0-9]/)[0]);
  const taken = new Set(families.map((family) => FAMILIES[family]));
  const free = UNKNOWN.filter((colour) => !taken.has(colour));
  const others = new Map();
  return families.map((family) => {
    if (Object.hasOwn(FAMILIES, family)) return FAMILIES[family];
    if (!others.has(family)) others.set(family, (free.length ? free : UNKNOWN)[others.size % (free.length || 6)]);
    return others.get(family);
  });
}

const known = []; // heads in the order in which they were met

/** The class of a head: `.h0` to `.h7` have its colour in --head, and a line of their own. */
function classOf(name) {
  if (!known.includes(name)) {
    known.push(name);
    coloursOf(known).forEach((colour, at) => document.documentElement.style.setProperty(`--head-${at}`, colour));
  }
  return `h${known.indexOf(name) % 8}`;
}

function markOf(name) {
  classOf(name);
  return MARKS[known.indexOf(name) % MARKS.length];
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

/** What the colours of the text and of the trees mean. */
function legendOf(heads) {
  const entry = (name) =>
    make("li", {}, make("span", { class: `mark ${classOf(name)}`, "aria-hidden": "true" }, markOf(name)),
      make("span", { class: `drafted ${classOf(name)}` }, name));
  return [make("li", {}, make("span", { class: "target" }, "target")), ...heads.map(entry)];
}
