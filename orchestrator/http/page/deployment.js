"use strict";
/* What the deployment does, looked at once a second while the view is open. */

const LOOK_MS = 1000, WINDOW_MS = 10_000, MOST_LINES = 200;
const FAULTS = {
  coppice_late_drafts_total: "drafts that missed the deadline",
  coppice_bad_drafts_total: "drafts dropped as invalid",
  coppice_heads_benched_total: "times left alone",
  coppice_heads_unfit_total: "replicas that the target cannot use",
  coppice_verifier_sessions_reopened_total: "sessions re-opened on a verifier",
};

class DeploymentView {
  constructor() {
    this.looks = [];
    this.wrong = new Map(); // what was wrong at the latest look, by replica
  }

  /** Look again and again while `isOpen` says so. */
  async watch(isOpen) {
    if (this.watching) return;
    this.watching = true;
    while (isOpen()) {
      try {
        this.#take(await (await call("deployment")).json());
        $("deployment-error").textContent = "";
      } catch (failure) {
        $("deployment-error").textContent = `No answer: ${failure.message}`;
      }
      await new Promise((done) => setTimeout(done, LOOK_MS));
    }
    this.watching = false;
  }

  #take(told) {
    const now = performance.now();
    this.looks.push({ now, told });
    while (now - this.looks[0].now > WINDOW_MS) this.looks.shift();
    this.#figures(told);
    this.#heads(told);
    this.#replicas(told);
    this.#adapter(told.adapter);
    this.#faults(told);
  }

  #value(told, name, head = "") {
    return told.metrics[name]?.[head] ?? 0;
  }

  /** By how much a counter grew in the last seconds; one that began anew meanwhile counts from 0. */
  #grown(name, head = "") {
    const [first, last] = [this.looks[0], this.looks.at(-1)].map(({ told }) => this.#value(told, name, head));
    return last >= first ? last - first : last;
  }

  /** A count of steps, or of what they accepted: of the last seconds, or of all time when these have no steps. */
  #steps(name, head = "") {
    const recent = this.#grown("vllm:inter_token_latency_seconds_count");
    return recent ? this.#grown(name, head) : this.#value(this.looks.at(-1).told, name, head);
  }

  #figures(told) {
    const seconds = (this.looks.at(-1).now - this.looks[0].now) / 1000;
    const steps = this.#steps("vllm:inter_token_latency_seconds_count");
    const accepted = this.#steps("vllm:spec_decode_num_accepted_tokens_total");
    const figures = {
      "tokens/s": seconds ? (this.#grown("vllm:generation_tokens_total") / seconds).toFixed(1) : "–",
      tau: steps ? (1 + accepted / steps).toFixed(2) : "–",
      running: told.model.running,
      waiting: told.waiting,
      "KV in use": percent(told.kv_usage),
    };
    const shown = Object.entries(figures).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(value))));
    $("figures").replaceChildren(...shown);
  }

  #heads({ model, pools }) {
    const steps = this.#steps("vllm:inter_token_latency_seconds_count");
    let left = steps;
    const rows = model.heads.map((name) => {
      const routed = this.#steps("coppice_routed_total", name);
      left -= routed;
      const tau = routed ? (1 + this.#steps("coppice_routed_accepted_tokens_total", name) / routed).toFixed(2) : "–";
      const versions = [...new Set(pools[name].map((replica) => replica.weights_version))].join(", ");
      const label = make("span", {}, make("span", { class: `mark ${classOf(name)}`, "aria-hidden": "true" }, markOf(name)), ` ${name}`);
      return [label, steps ? percent(routed / steps) : "–", tau, versions || "–"];
    });
    if (steps && left > 0) rows.push(["plain or merged", percent(left / steps), "–", "–"]);
    fill($("heads"), ["Head", "Share of steps", "tau", "Version"], rows);
  }

  #replicas({ pools }) {
    const rows = Object.entries(pools).flatMap(([pool, replicas]) =>
      replicas.map((replica) => {
        const kv = replica.kv_tokens ? percent(replica.kv_tokens_used / replica.kv_tokens) : "–";
        const state = replica.wrong || (replica.suspect ? "drafts far below what it was trained to" : "ready");
        const look = state === "ready" ? "well" : "ill";
        return [pool, replica.address, make("span", { class: look }, state), String(replica.sessions), kv];
      }),
    );
    fill($("replicas"), ["Pool", "Address", "State", "Sessions", "KV"], rows);
  }

  #adapter(heads) {
    if (!Array.isArray(heads)) {
      const why = heads ?? "No adapter: this orchestrator's setting orchestrator.adapter names none.";
      fill($("adapter"), [], [[why]]);
      $("decisions").replaceChildren();
      return;
    }
    const rows = heads.map((one) => [
      one.head, one.paused ? `${one.doing}, paused` : one.doing, String(one.version), String(one.queries), String(one.reverts),
    ]);
    fill($("adapter"), ["Head", "Doing", "Version", "Queries", "Reverts"], rows);
    // the latest first, which stays so among those after one query
    const changes = heads.flatMap(({ head, changes: all }) => all.map((change) => ({ head, ...change }))).reverse();
    changes.sort((a, b) => b.query - a.query);
    const lines = changes.slice(0, 12).map(({ head, query, what, version, why }) =>
      make("li", {}, `${head}: ${what}, version ${version}, after query ${query}${why ? ` (${why})` : ""}`),
    );
    $("decisions").replaceChildren(...lines);
  }

  /** Add a line for each fault since the look before; the first look tells all since the start. */
  #faults(told) {
    const before = this.looks.at(-2)?.told;
    for (const [name, words] of Object.entries(FAULTS)) {
      for (const head of Object.keys(told.metrics[name] ?? {})) {
        const more = this.#value(told, name, head) - (before ? this.#value(before, name, head) : 0);
        if (more > 0) this.#log(`${head ? `${head}: ` : ""}${more} ${words}${before ? "" : " since the start"}`);
      }
    }
    for (const { address, wrong } of Object.values(told.pools).flat()) {
      const was = this.wrong.get(address) ?? "";
      if (was !== wrong) this.#log(`${address}: ${wrong || "ready again"}`);
      this.wrong.set(address, wrong);
    }
    if (!$("faults").childElementCount) $("faults").append(make("li", { class: "quiet none" }, "None so far."));
  }

  #log(line) {
    $("faults").querySelector(".none")?.remove();
    $("faults").prepend(make("li", {}, make("time", {}, new Date().toLocaleTimeString()), ` ${line}`));
    while ($("faults").childElementCount > MOST_LINES) $("faults").lastElementChild.remove();
  }
}

const percent = (share) => `${Math.round(share * 100)}%`;

/** Write a table anew: its heads, and its rows of strings and elements. */
function fill(table, heads, rows) {
  const head = make("thead", {}, make("tr", {}, ...heads.map((name) => make("th", { scope: "col" }, name))));
  const lines = rows.map((cells) => make("tr", {}, ...cells.map((cell) => make("td", {}, cell))));
  table.replaceChildren(...(heads.length ? [head] : []), make("tbody", {}, ...lines));
}
