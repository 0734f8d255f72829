"use strict";
/* Questions to the server that the page came from, and the runs of answers. */

const served = location.protocol.startsWith("http");
let accessToken = "";

/** Ask the server. Throws an Error with the server's own words. */
async function call(path, options = {}) {
  const headers = accessToken ? { Authorization: `Bearer ${accessToken}` } : {};
  if (options.body) headers["Content-Type"] = "application/json";
  const response = await fetch(path, { ...options, headers });
  $("access").hidden = response.status !== 401;
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  throw new Error(told?.error?.message ?? `The server answered ${response.status}.`);
}

/** Stream one answer into a trace; `grew` is called when there is more of it. Throws an Error. */
async function generate(trace, path, grew, signal) {
  const response = await call(path, { method: "POST", body: JSON.stringify(trace.asked), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice("data: ".length);
      if (data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      trace.add(event);
    }
    grew();
  }
  if (!trace.finished) throw new Error("The connection ended before the answer did.");
}

/** What a form asks for, as the fields of a request's body; empty ones are left to the server. */
function bodyOf(form) {
  const body = {};
  for (const name of ["temperature", "seed", "budget"]) {
    if (form.elements[name]?.value) body[name] = Number(form.elements[name].value);
  }
  return { ...body, max_tokens: Number(form.elements.tokens.value) };
}

/** A form's run: one at a time, with a button that ends it. `work` gets a signal; errors are shown in `error`. */
function onSubmit(form, error, work) {
  const { stop } = form.elements;
  const go = form.querySelector(".main");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const running = new AbortController();
    stop.onclick = () => running.abort();
    error.textContent = "";
    [go.disabled, stop.hidden] = [true, false];
    try {
      await work(running.signal);
    } catch (failure) {
      if (failure.name !== "AbortError") error.textContent = failure.message;
    } finally {
      [go.disabled, stop.hidden] = [false, true];
    }
  });
}

/** Tokens/s, tau and the number of tokens of an answer, while it runs and when it has ended. */
class Meter {
  constructor(list) {
    const meanings = {
      "tokens/s": "tokens a second, counted from the first one",
      tau: "tokens that one forward of the target commits on average: plain decoding has 1",
      tokens: "tokens of the answer",
    };
    this.values = Object.entries(meanings).map(([name, title]) => {
      const value = make("dd", {}, "–");
      list.append(make("div", { title }, make("dt", {}, name), value));
      return value;
    });
  }

  show(trace) {
    const count = trace.tokens.length;
    if (count <= 1) this.began = performance.now();
    const seconds = trace.finished ? trace.finished.timings.decode_ns / 1e9 : (performance.now() - this.began) / 1000;
    const rate = count > 1 && seconds > 0 ? ((count - 1) / seconds).toFixed(1) : "–";
    const tau = trace.steps.length ? trace.tau.toFixed(2) : "–";
    [rate, tau, String(count)].forEach((text, at) => (this.values[at].textContent = text));
  }
}
