"use strict";
/* A trace: the events of one answer, as coppice.v1.GenerateResponse has them, and what the views ask of it. */

const FORMAT = "coppice-trace-1";
const DRAFT = 2; // TOKEN_ORIGIN_DRAFT
const NO_HEAD = -1, UNION = -2;

class Trace {
  constructor(asked = {}, model = "") {
    Object.assign(this, { asked, model, events: [], heads: [], tokens: [], steps: [], started: null, finished: null });
    this.taken = 0; // tokens of all steps
    this.lost = false; // whether a head's tree has lost the routing to another one
  }

  /** Take in the next event. */
  add(event) {
    this.events.push(event);
    if (event.started) {
      this.started = event.started;
      this.heads = event.started.heads;
    } else if (event.chunk) {
      this.#commit(event.chunk);
    } else if (event.finished) {
      this.finished = event.finished;
    }
  }

  #commit({ ids, origins, pieces, log_probs: logProbs, tree, others = [] }) {
    const last = ids.length - 1;
    const wanted = last >= 0 && origins[last] !== DRAFT ? { id: ids[last], text: pieces[last] } : null;
    if (tree) {
      this.steps.push({ tree, others, wanted, first: this.tokens.length, taken: ids.length });
      this.taken += ids.length;
      this.lost ||= others.length > 0;
    }
    ids.forEach((id, at) => {
      const drafted = origins[at] === DRAFT;
      const heads = drafted && tree ? this.ownersOf(tree, tree.accepted[at]) : [];
      this.tokens.push({ id, text: pieces[at], drafted, heads, logProb: logProbs[at], step: this.steps.length });
    });
  }

  /** The names of the heads that drafted a node, the one whose tree it is before others. */
  ownersOf(tree, node) {
    const bits = BigInt(tree.owners[node - 1] ?? 0);
    const numbers = this.heads.map((_, at) => at).filter((at) => (bits >> BigInt(at)) & 1n);
    numbers.sort((a, b) => (b === tree.routed) - (a === tree.routed));
    return numbers.map((at) => this.heads[at]);
  }

  /** What a head drafted in a step that verified another one's tree; otherwise the tree that was verified. */
  treeOf(at, head) {
    const { tree, others } = this.steps[at];
    return others.find(({ routed }) => this.heads[routed] === head) ?? tree;
  }

  /** Whose tree a step verified, or whose the shown one is. */
  routeOf({ tree }, shown = tree) {
    if (shown !== tree) return `the tree of ${this.heads[shown.routed]}, which was not verified`;
    if (tree.routed >= 0) return `the tree of ${this.heads[tree.routed]}`;
    const all = this.heads.join(" and ");
    return tree.routed === UNION ? `the union of the trees of ${all}, where a token of two heads stands twice` : "no draft";
  }

  /** What the target said where the path through a step's tree ends; null when nobody asked it for more. */
  wantedOf(at, shown) {
    const { tree, wanted } = this.steps[at];
    const node = tree.accepted[shown.accepted.length];
    if (node) return { id: tree.tokens[node - 1], text: tree.pieces[node - 1] };
    if (shown.accepted.length > tree.accepted.length) return null;
    return wanted && { id: wanted.id, text: this.steps[at + 1]?.tree.root_piece || wanted.text };
  }

  /** What became of a node: its fate in a word, and for people. */
  fateOf(at, node, tree) {
    const verified = tree === this.steps[at].tree;
    if (tree.accepted.includes(node)) return ["accepted", verified ? "accepted" : "right: the target said it too"];
    if (tree.cut.includes(node)) return ["cut", "left out by the verifier"];
    const depth = tree.accepted.indexOf(tree.parents[node - 1]);
    if (depth < 0 && tree.parents[node - 1]) return ["rejected", "never reached: the path left the tree before it"];
    const taken = tree.accepted[depth + 1];
    const wanted = taken ? { id: tree.tokens[taken - 1], text: tree.pieces[taken - 1] } : this.wantedOf(at, tree);
    return ["rejected", wanted ? `rejected: the target wanted ${labelOf(wanted)}` : "never reached: the step ended before it"];
  }

  /** Mean tokens of a step. */
  get tau() {
    return this.steps.length ? this.taken / this.steps.length : 0;
  }

  toJSON() {
    return { format: FORMAT, model: this.model, asked: this.asked, events: this.events };
  }

  /** The trace in a file. Throws an Error that says what is wrong with it. */
  static read(text) {
    let told;
    try {
      told = JSON.parse(text);
      if (told.format !== FORMAT) throw new Error(`its format is not ${FORMAT}`);
      const trace = new Trace(told.asked ?? {}, String(told.model ?? ""));
      for (const event of told.events) {
        if (event.chunk) checkChunk(event.chunk);
        trace.add(event);
      }
      if (!trace.started) throw new Error("it does not begin with `started`");
      return trace;
    } catch (error) {
      throw new Error(`This file is not a trace: ${error.message}.`);
    }
  }
}

/** Throw an Error unless the lists of a chunk belong together. */
function checkChunk({ ids, origins, pieces, log_probs: logProbs, tree, others = [] }) {
  const fit = (lists, count) => lists.every((list) => Array.isArray(list) && list.length === count);
  if (!fit([origins, pieces, logProbs], ids.length)) throw new Error("a chunk's lists differ in length");
  for (const one of tree ? [tree, ...others] : []) checkTree(one, fit);
}

function checkTree(tree, fit) {
  const count = tree.tokens.length;
  if (!fit([tree.parents, tree.log_probs, tree.forwards, tree.pieces, tree.owners], count)) {
    throw new Error("a tree's lists differ in length");
  }
  const below = tree.parents.every((parent, at) => Number.isInteger(parent) && parent >= 0 && parent <= at);
  const inside = [...tree.accepted, ...tree.cut].every((node) => node >= 1 && node <= count);
  if (!below || !inside) throw new Error("a tree names nodes that it does not have");
}

const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

/** A token as it can be shown on one line. */
function labelOf({ id, text }) {
  return text ? JSON.stringify(text).slice(1, -1).replaceAll('\\"', '"').replaceAll(" ", "␣") : `#${id}`;
}

/** What the drafter gives a node behind its parent, from 0 to 1. */
function chanceOf(tree, node) {
  const parent = tree.parents[node - 1];
  return Math.exp(Math.min(0, tree.log_probs[node - 1] - (parent ? tree.log_probs[parent - 1] : 0)));
}
