"use strict";
/* The tree of a step, from left to right: the accepted path is the straight line on top, what was rejected hangs below. */

const ROW = 27, CHAR = 7.3, GAP = 30, LONGEST = 14;
const SMALLEST = 0.75; // to which a wide tree is scaled before it scrolls

/** Where each node stands: its depth and its line. Node 0 is the root; the last one, if any, what the target wanted. */
function arrange(tree, wanted) {
  const below = Array.from({ length: tree.tokens.length + 2 }, () => []);
  const taken = new Set(tree.accepted);
  tree.parents.forEach((parent, at) => below[parent].push(at + 1));
  for (const nodes of below) {
    nodes.sort((a, b) => taken.has(b) - taken.has(a) || tree.log_probs[b - 1] - tree.log_probs[a - 1]);
  }
  if (wanted) below[tree.accepted.at(-1) ?? 0].unshift(tree.tokens.length + 1);
  const places = new Map();
  let line = 0;
  const place = (node, depth, parent) => {
    places.set(node, { depth, line, parent, children: below[node] });
    below[node].forEach((child, nth) => {
      line += nth > 0;
      place(child, depth + 1, node);
    });
  };
  place(0, 0, null);
  return { places, lines: line + 1 };
}

const shorten = (text) => (text.length > LONGEST ? `${text.slice(0, LONGEST - 1)}…` : text);
/** About how wide a text is in the tree's font: signs of East Asia are twice as wide as letters. */
const widthOf = (text) => [...text].reduce((sum, sign) => sum + (sign.codePointAt(0) > 0x2e7f ? 2 : 1), 0) * CHAR;

class TreeView {
  /** figure: holds the picture and has the focus; detail: the line that describes a node. */
  constructor(figure, detail) {
    Object.assign(this, { figure, detail, at: 0, nodes: new Map(), scores: false });
    figure.addEventListener("pointerover", (event) => {
      const node = event.target.closest("[data-node]");
      if (node) this.#describe(Number(node.dataset.node));
    });
    figure.addEventListener("keydown", (event) => this.#key(event));
  }

  clear() {
    this.figure.replaceChildren();
    this.figure.style.minHeight = "";
    this.detail.textContent = "";
    this.nodes = new Map();
  }

  /** Draw the tree of step `number` (from 0) of a trace. grow: let nodes appear in the order in which they were made.
   * head: whose tree is drawn when it lost the routing. */
  show(trace, number, grow, head = "") {
    const tree = trace.treeOf(number, head);
    Object.assign(this, { trace, number, tree, at: 0 });
    const wanted = trace.wantedOf(number, tree);
    const { places, lines } = arrange(tree, wanted);
    this.places = places;
    const shown = [...places].map(([node, place]) => this.#look(tree, wanted, node, place));
    const widths = [];
    for (const { depth, width } of shown) widths[depth] = Math.max(widths[depth] ?? 0, width);
    const lefts = widths.map((_, depth) => widths.slice(0, depth).reduce((sum, width) => sum + width + GAP, 2));
    for (const one of shown) Object.assign(one, { x: lefts[one.depth], y: one.line * ROW + ROW / 2 + 1 });
    const [width, height] = [lefts.at(-1) + widths.at(-1) + 2, lines * ROW + 2];
    const size = { width, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", class: grow ? "grow" : "" };
    this.nodes = new Map(shown.map((one) => [one.node, this.#node(one)]));
    const marks = this.scores ? shown.filter(({ chance }) => chance !== undefined).map((one) => this.#score(one)) : [];
    const picture = draw("svg", size, ...this.#edges(shown), ...this.nodes.values(), ...marks);
    picture.style.minWidth = `${SMALLEST * width}px`;
    this.figure.replaceChildren(picture);
    this.figure.style.minHeight = `${this.figure.offsetHeight}px`; // what is below stays where it is while steps are played
    this.figure.setAttribute("aria-label", this.summary);
  }

  /** The step in one sentence. */
  get summary() {
    const { tree } = this;
    const path = tree.accepted.map((node) => labelOf({ id: tree.tokens[node - 1], text: tree.pieces[node - 1] }));
    const wanted = this.trace.wantedOf(this.number, tree);
    const cut = tree.cut.length ? `, ${tree.cut.length} left out by the verifier` : "";
    const step = this.trace.steps[this.number];
    return (
      `Step ${this.number + 1}: ${this.trace.routeOf(step, tree)}, ` +
      `${plural(tree.tokens.length, "node")}${cut}, ${path.length} ${tree === step.tree ? "accepted" : "right"}${path.length ? `: ${path.join(" ")}` : ""}` +
      `${wanted ? `; then the target said ${labelOf(wanted)}` : ""}.`
    );
  }

  #look(tree, wanted, node, { depth, line, parent }) {
    const last = node > tree.tokens.length;
    if (!node || last) {
      const full = labelOf(last ? wanted : { id: tree.root, text: tree.root_piece });
      const text = shorten(full);
      return { node, depth, line, parent, text, owners: [], fate: "target", made: last ? 99 : 0, width: widthOf(text) + 18 };
    }
    const text = shorten(labelOf({ id: tree.tokens[node - 1], text: tree.pieces[node - 1] }));
    const owners = this.trace.ownersOf(tree, node);
    const [fate] = this.trace.fateOf(this.number, node, tree);
    const width = widthOf(text) + 20 + owners.length * 11;
    return { node, depth, line, parent, text, owners, fate, width, made: tree.forwards[node - 1], chance: chanceOf(tree, node) };
  }

  #node({ node, x, y, width, text, owners, fate, made }) {
    const marks = owners.map((name) => draw("tspan", { class: `mark ${classOf(name)}` }, markOf(name)));
    const look = `node ${fate} ${owners.length ? classOf(owners[0]) : ""}`;
    const box = draw("rect", { x, y: y - 10, width, height: 20, rx: 6 });
    const label = draw("text", { x: x + 8, y: y + 4 }, ...marks, draw("tspan", { dx: marks.length ? 4 : 0 }, text));
    const group = draw("g", { class: look, "data-node": node }, box, label);
    group.style.setProperty("--made", Math.min(made, 12));
    return group;
  }

  /** All edges that look the same are one path. An edge goes down beside its parent and then to the right. */
  #edges(shown) {
    const at = new Map(shown.map((one) => [one.node, one]));
    const paths = { rejected: "", cut: "", accepted: "" };
    for (const one of shown) {
      if (one.parent === null) continue;
      const { x, y, width } = at.get(one.parent);
      const turn = x + width + 8;
      const down = one.y === y ? "" : `H${turn}V${one.y - 6}Q${turn} ${one.y} ${turn + 6} ${one.y}`;
      paths[one.fate === "target" ? "accepted" : one.fate] += `M${x + width} ${y}${down}H${one.x}`;
    }
    return Object.entries(paths).map(([fate, d]) => draw("path", { class: `edge ${fate}`, d }));
  }

  #score({ x, y, chance }) {
    return draw("text", { class: "score", x: x - 4, y: y - 3 }, `${Math.round(chance * 100)}`);
  }

  #describe(node) {
    const { tree } = this;
    this.nodes.get(this.at)?.classList.remove("at");
    this.nodes.get(node)?.classList.add("at");
    this.at = node;
    if (!node) {
      this.detail.textContent = `${labelOf({ id: tree.root, text: tree.root_piece })} · the root: the target's own token`;
    } else if (node > tree.tokens.length) {
      this.detail.textContent = `${labelOf(this.trace.wantedOf(this.number, tree))} · what the target said behind the path`;
    } else {
      const told = { id: tree.tokens[node - 1], text: tree.pieces[node - 1] };
      const chance = `${(chanceOf(tree, node) * 100).toFixed(1)}% behind its parent, log-score ${tree.log_probs[node - 1].toFixed(2)}`;
      const owners = this.trace.ownersOf(tree, node).join(", ");
      const [, fate] = this.trace.fateOf(this.number, node, tree);
      this.detail.textContent =
        `${labelOf(told)} · id ${told.id} · ${owners}, forward ${tree.forwards[node - 1]} · ${chance} · ${fate}`;
    }
  }

  #key(event) {
    if (!this.nodes.size || !event.key.startsWith("Arrow")) return;
    event.preventDefault();
    const { parent, children } = this.places.get(this.at);
    const beside = parent === null ? [0] : this.places.get(parent).children;
    const to = {
      ArrowLeft: parent,
      ArrowRight: children[0],
      ArrowUp: beside[beside.indexOf(this.at) - 1],
      ArrowDown: beside[beside.indexOf(this.at) + 1],
    }[event.key];
    if (to === undefined || to === null) return;
    this.#describe(to);
    this.nodes.get(to).scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}

/** How many tokens each step took: a bar each, or each few steps, and the mean so far. */
class CurveView {
  constructor(figure, onPick) {
    this.figure = figure;
    this.bars = draw("path", { class: "bars" });
    this.mean = draw("path", { class: "mean" });
    this.cursor = draw("path", { class: "cursor" });
    this.scale = make("span", { class: "scale" });
    const picture = draw("svg", { viewBox: "0 0 600 60", preserveAspectRatio: "none" }, this.bars, this.mean, this.cursor);
    picture.setAttribute("aria-hidden", "true");
    figure.replaceChildren(picture, this.scale);
    picture.addEventListener("click", (event) => {
      const { left, width } = picture.getBoundingClientRect();
      onPick(Math.floor(((event.clientX - left) / width) * this.count));
    });
  }

  show({ steps, tau }, number) {
    this.count = steps.length;
    const most = steps.reduce((best, { taken }) => Math.max(best, taken), 1);
    const wide = 600 / Math.max(24, steps.length);
    const group = Math.max(1, Math.round(1.5 / wide)); // steps of a bar
    const height = (value) => 58 - (value / most) * 54;
    let [bars, mean, sum] = ["", "", 0];
    for (let first = 0; first < steps.length; first += group) {
      const some = steps.slice(first, first + group);
      const taken = some.reduce((total, step) => total + step.taken, 0);
      sum += taken;
      const [left, right] = [first * wide, (first + some.length) * wide];
      bars += `M${left.toFixed(1)} 60V${height(taken / some.length).toFixed(1)}H${(right - Math.min(1, wide / 5)).toFixed(1)}V60Z`;
      mean += `${mean ? "L" : "M"}${((left + right) / 2).toFixed(1)} ${height(sum / (first + some.length)).toFixed(1)}`;
    }
    this.bars.setAttribute("d", bars);
    this.mean.setAttribute("d", mean);
    this.cursor.setAttribute("d", steps.length ? `M${(number + 0.5) * wide} 0V60` : "");
    this.scale.textContent = steps.length ? `at most ${plural(most, "token")} a step, ${tau.toFixed(2)} on average` : "";
  }
}
