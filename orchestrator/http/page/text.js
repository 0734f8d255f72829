"use strict";
/* An answer's text: a span for each token, appended as tokens come and never drawn anew. */

const LONG_BLOCK = 200; // tokens, before a new line of text begins a block of its own: browsers lay out one block at a time

class TokenText {
  /** panel: the element that scrolls; detail: the line that describes a token; onPick: called with a token's step. */
  constructor(panel, detail, onPick = () => {}) {
    Object.assign(this, { panel, detail, onPick });
    panel.addEventListener("pointerover", (event) => this.#describe(this.#numberOf(event)));
    panel.addEventListener("click", (event) => this.#pick(this.#numberOf(event)));
    panel.addEventListener("keydown", (event) => this.#key(event));
    this.show(new Trace());
  }

  /** Show another trace. */
  show(trace) {
    this.trace = trace;
    this.spans = [];
    this.marked = [];
    this.at = -1;
    this.detail.textContent = "";
    this.panel.replaceChildren();
    this.#begin();
    this.append();
  }

  /** Add what the trace has grown by. */
  append() {
    const { panel, trace } = this;
    if (this.spans.length === trace.tokens.length) return;
    const follows = panel.scrollHeight - panel.scrollTop - panel.clientHeight < 40;
    while (this.spans.length < trace.tokens.length) this.#add(trace.tokens[this.spans.length]);
    if (follows) panel.scrollTop = panel.scrollHeight;
  }

  /** Mark the tokens of a step. */
  mark(step) {
    for (const span of this.marked) span.classList.remove("now");
    this.marked = step ? this.spans.slice(step.first, step.first + step.taken) : [];
    for (const span of this.marked) span.classList.add("now");
  }

  #begin() {
    this.block = this.panel.appendChild(make("div"));
    this.inBlock = 0;
  }

  #add(token) {
    const number = this.spans.length;
    const look = token.drafted ? `drafted ${token.heads.length ? classOf(token.heads[0]) : ""}` : "target";
    const span = (text) => this.block.appendChild(make("span", { class: look, "data-at": number }, text));
    const line = this.inBlock >= LONG_BLOCK ? token.text.lastIndexOf("\n") + 1 : 0;
    this.spans.push(span(line ? token.text.slice(0, line) : token.text));
    if (line) {
      this.#begin();
      if (line < token.text.length) span(token.text.slice(line));
    }
    this.inBlock += 1;
  }

  #numberOf(event) {
    return Number(event.target.dataset?.at ?? -1);
  }

  #describe(number) {
    if (number < 0) return;
    this.spans[this.at]?.classList.remove("at");
    this.spans[number].classList.add("at");
    this.at = number;
    const { text, id, drafted, heads, logProb, step } = this.trace.tokens[number];
    const origin = drafted ? `drafted by ${heads.join(", ") || "a head"}` : "from the target";
    const chance = logProb === undefined ? "" : ` · log-prob ${logProb.toFixed(3)}`;
    const line = `${labelOf({ id, text })} · ${origin}${chance} · ${step ? `step ${step}` : "prefill"}`;
    this.detail.textContent = line;
    this.spans[number].title = line;
  }

  #pick(number) {
    if (number >= 0) this.onPick(this.trace.tokens[number].step);
  }

  #key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Enter") this.#pick(this.at);
    if (!by || !this.spans.length) return;
    event.preventDefault();
    this.#describe(Math.max(0, Math.min(this.spans.length - 1, this.at + by)));
    this.spans[this.at].scrollIntoView({ block: "nearest" });
  }
}
