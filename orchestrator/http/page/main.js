"use strict";
/* The page: its views, the playground and the comparison. */

const text = new TokenText($("text"), $("token"), (step) => step && player.go(step - 1));
const player = new Player(text);
const meter = new Meter($("meter"));
const blank = new Trace();
let shown = blank;
let model = null;

/** Draw what the shown trace has grown by. */
const drawAnswer = eachFrame(() => {
  text.append();
  player.grew();
  meter.show(shown);
  const heads = legendHeads(shown);
  if ($("legend").childElementCount !== heads.length + 1) $("legend").replaceChildren(...legendOf(heads));
});

const legendHeads = (...traces) => [...new Set(traces.flatMap(({ heads }) => heads))];

/** source: where a trace that was not generated now is from. */
function showTrace(trace, source = "") {
  shown = trace;
  $("source").textContent = source;
  text.show(trace);
  player.show(trace);
  $("legend").replaceChildren();
  $("save").disabled = !trace.events.length;
  showTurns();
  drawAnswer();
}

/** Show a trace from a file at the step that took most tokens. */
function showSaved(trace, source) {
  const { prompt, messages = [] } = trace.asked;
  const question = String(prompt ?? messages.at(-1)?.content ?? "").trim();
  showTrace(trace, `${source}${question && `: “${question}”`}`);
  const taken = trace.steps.map((step) => step.taken);
  player.go(taken.indexOf(Math.max(...taken)));
}

// --- playground ---

const turns = []; // of the conversation, as bodies have them
let answered = null; // the trace of its last answer
const modelOf = () => ({ name: model?.model.name ?? "", dtype: model?.dtype ?? "" });

onSubmit($("ask"), $("ask-error"), async (signal) => {
  const form = $("ask");
  const { prompt, kind, policy } = form.elements;
  const chat = kind.value === "chat";
  const messages = [...turns, { role: "user", content: prompt.value }];
  const asked = chat ? { messages } : { prompt: prompt.value };
  const trace = new Trace({ ...asked, ...bodyOf(form), policy: policy.value }, modelOf().name);
  showTrace(trace);
  try {
    await generate(trace, chat ? "trace/chat/completions" : "trace/completions", drawAnswer, signal);
  } finally {
    drawAnswer();
    $("save").disabled = !trace.started;
  }
  if (chat) {
    turns.splice(0, Infinity, ...messages, { role: "assistant", content: trace.tokens.map((token) => token.text).join("") });
    answered = trace;
    prompt.value = "";
    showTurns();
  }
});

/** The conversation so far, but for an answer that is shown below. */
function showTurns() {
  const above = shown === answered ? turns.slice(0, -1) : turns;
  $("turns").replaceChildren(...above.map(({ role, content }) => make("li", { class: role }, content)));
  $("ask").elements.anew.hidden = !turns.length;
}

$("ask").elements.anew.onclick = $("ask").elements.kind.onchange = () => {
  turns.length = 0;
  answered = null;
  showTurns();
};

$("save").onclick = () => {
  const link = make("a", { download: "trace.json" });
  link.href = URL.createObjectURL(new Blob([JSON.stringify(shown)], { type: "application/json" }));
  link.click();
  URL.revokeObjectURL(link.href);
};

$("open").onchange = async ({ target }) => {
  const [file] = target.files;
  target.value = ""; // the same file can be opened again
  if (!file) return;
  try {
    showSaved(Trace.read(await file.text()), file.name);
    $("ask-error").textContent = "";
  } catch (failure) {
    $("ask-error").textContent = failure.message;
  }
};

// --- side by side ---

class Lane {
  constructor(element) {
    this.policy = element.querySelector("select");
    this.text = new TokenText(element.querySelector(".text"), element.querySelector(".detail"));
    this.meter = new Meter(element.querySelector(".meter"));
    this.draw = eachFrame(() => {
      this.text.append();
      this.meter.show(this.trace);
    });
  }

  begin(asked) {
    this.trace = new Trace({ ...asked, policy: this.policy.value }, modelOf().name);
    this.text.show(this.trace);
    this.draw();
  }

  async run(signal) {
    await generate(this.trace, "trace/completions", this.draw, signal);
    this.draw();
  }
}

const lanes = [...document.querySelectorAll(".lane")].map((element) => new Lane(element));

onSubmit($("race"), $("race-error"), async (signal) => {
  const form = $("race");
  $("verdict").textContent = "";
  for (const lane of lanes) lane.begin({ prompt: form.elements.prompt.value, ...bodyOf(form) });
  if (form.elements.turns.checked) {
    for (const lane of lanes) await lane.run(signal);
  } else {
    await Promise.all(lanes.map((lane) => lane.run(signal)));
  }
  $("race-legend").replaceChildren(...legendOf(legendHeads(...lanes.map(({ trace }) => trace))));
  $("verdict").textContent = verdictOn(lanes[0].trace, lanes[1].trace, form.elements.turns.checked);
});

/** Whether two answers are the same, token by token, and if so what the second one took; alone: neither ran beside the other. */
function verdictOn(first, second, alone) {
  const count = Math.max(first.tokens.length, second.tokens.length);
  const differs = Array.from({ length: count }, (_, at) => first.tokens[at]?.id !== second.tokens[at]?.id).indexOf(true);
  if (differs < 0) {
    const [before, after] = [first, second].map(({ finished }) => finished.timings.decode_ns);
    const faster = alone && after > 0 ? `, ${(before / after).toFixed(1)} times as fast` : "";
    const forwards = `${plural(second.steps.length, "forward")} instead of ${first.steps.length}`;
    return `identical: ${count} of ${count} tokens. ${second.asked.policy}: ${forwards}${faster}`;
  }
  const rounding = modelOf().dtype === "float32" ? "" : ` In ${modelOf().dtype} the answers are the same within rounding only.`;
  return `different from token ${differs + 1} on: ${differs} of ${count} tokens are identical.${rounding}`;
}

// --- views ---

const VIEWS = ["playground", "compare"];
const viewNow = () => VIEWS.find((name) => `#${name}` === location.hash) ?? VIEWS[0];

function showView() {
  const now = viewNow();
  for (const name of VIEWS) $(name).hidden = name !== now;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${now}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  scrollTo(0, 0);
}

addEventListener("hashchange", showView);

// --- what is served ---

async function learnModel() {
  if (!served) {
    $("model").textContent = "opened from a file: it shows saved traces";
    for (const control of document.querySelectorAll(".ask .main")) control.disabled = true;
    return;
  }
  model = await (await call("model")).json();
  const { name, policies, default_policy: usual, has_chat_template: chats, heads } = model.model;
  $("model").textContent = `${name} · ${model.dtype}`;
  heads.forEach(classOf);
  const options = (chosen) => policies.map((policy) => {
    const option = make("option", { value: policy }, policy);
    option.selected = policy === chosen;
    return option;
  });
  $("ask").elements.policy.replaceChildren(...options(usual));
  lanes[0].policy.replaceChildren(...options("plain"));
  lanes[1].policy.replaceChildren(...options(usual));
  $("ask").elements.kind.options[1].disabled = !chats;
}

async function begin() {
  for (const error of document.querySelectorAll(".error")) error.textContent = "";
  try {
    await learnModel();
  } catch (failure) {
    $("served-error").textContent = failure.message;
  }
  if (shown === blank) showSaved(Trace.read(JSON.stringify(EXAMPLE)), "A saved answer of the demo's models");
}

$("access").addEventListener("submit", (event) => {
  event.preventDefault();
  accessToken = event.target.elements.token.value;
  begin();
});

showView();
begin();
