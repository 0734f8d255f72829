"use strict";
/* Steps through the trees of a trace: while it grows, and afterwards at any speed, both ways. */

const GROW_BELOW = 4; // steps/s: faster than that a tree is drawn at once

class Player {
  /** text: the answer's TokenText, in which the shown step is marked. */
  constructor(text) {
    this.text = text;
    this.tree = new TreeView($("tree"), $("node"));
    this.curve = new CurveView($("curve"), (number) => this.go(number));
    this.controls = Object.fromEntries([...$("controls").querySelectorAll("[name]")].map((one) => [one.name, one]));
    const { first, back, play, forward, last, at } = this.controls;
    first.onclick = () => this.go(0);
    back.onclick = () => this.go(this.at - 1);
    forward.onclick = () => this.go(this.at + 1);
    last.onclick = () => this.follow();
    play.onclick = () => (this.playing ? this.pause() : this.play());
    at.oninput = () => this.go(Number(at.value) - 1);
    $("scores").onchange = ({ target }) => {
      this.tree.scores = target.checked;
      this.#draw(false);
    };
    this.whose = $("whose");
    this.whose.onchange = () => this.#draw(false);
    this.show(new Trace());
  }

  /** Show another trace, and follow it while it grows. */
  show(trace) {
    Object.assign(this, { trace, at: -1, follows: true });
    this.pause();
    this.tree.clear();
    this.whose.replaceChildren();
    $("route").textContent = "";
    this.grew();
  }

  /** Take in that the trace has more steps. */
  grew() {
    const { steps } = this.trace;
    const before = this.at;
    if (this.follows) this.at = steps.length - 1;
    if (this.at === before) this.#tell();
    else this.#draw(false);
  }

  /** Show one step, and stay there. */
  go(number) {
    this.pause();
    this.#move(number);
  }

  /** Show the latest step, and what comes after it. */
  follow() {
    this.pause();
    this.follows = true;
    this.grew();
  }

  play() {
    if (!this.trace.steps.length) return;
    if (this.at >= this.trace.steps.length - 1) this.#move(0);
    this.playing = true;
    this.controls.play.textContent = "Pause";
    let before = performance.now();
    const tick = (now) => {
      if (!this.playing) return;
      const passed = Math.floor(((now - before) / 1000) * this.speed);
      if (passed) {
        before += (passed / this.speed) * 1000;
        this.#move(this.at + passed);
        if (this.at === this.trace.steps.length - 1 && this.trace.finished) return this.pause();
      }
      requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  }

  pause() {
    this.playing = false;
    this.controls.play.textContent = "Play";
  }

  get speed() {
    return Number(this.controls.speed.value);
  }

  #move(number) {
    const last = this.trace.steps.length - 1;
    if (last < 0) return;
    this.follows = false;
    this.at = Math.max(0, Math.min(last, number));
    this.#draw(!this.playing || this.speed < GROW_BELOW);
  }

  #draw(grow) {
    this.#tell();
    if (this.at < 0) return;
    this.tree.show(this.trace, this.at, grow, this.whose.value);
    this.text.mark(this.trace.steps[this.at]);
  }

  /** Say which step is shown, and of how many. */
  #tell() {
    const { trace, at, controls, whose } = this;
    const count = trace.steps.length;
    this.curve.show(trace, at);
    for (const control of Object.values(controls)) control.disabled = !count && control !== controls.speed;
    if (at < 0) return;
    if (!whose.length) {
      const heads = trace.heads.map((name) => make("option", {}, name));
      whose.append(make("option", { value: "" }, "what was verified"), ...heads);
    }
    whose.parentElement.hidden = !trace.lost;
    const step = trace.steps[at];
    const shown = trace.treeOf(at, whose.value);
    controls.at.max = count;
    controls.at.value = at + 1;
    controls.at.setAttribute("aria-valuetext", `Step ${at + 1} of ${count}, ${plural(step.taken, "token")}`);
    const { draft_ns: drafting, verify_ns: verifying } = step.tree;
    const times = `drafting ${(drafting / 1e6).toFixed(1)} ms, verifying ${(verifying / 1e6).toFixed(1)} ms`;
    const cut = shown.cut.length ? `, ${shown.cut.length} cut` : "";
    $("route").textContent =
      `Step ${at + 1} of ${count}: ${trace.routeOf(step, shown)}, ${plural(shown.tokens.length, "node")}${cut} · ${times}`;
  }
}
