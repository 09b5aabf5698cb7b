/** The built-in chat page. Text reaches the document through text nodes only. */

import { StreamEngine } from "/client.js";

const $ = (id) => document.getElementById(id);
const client = new StreamEngine();
const READY_POLL_MS = 500;
const NEAR_END_PX = 40;

/** @type {{role: "user"|"assistant", content: string}[]} */
let history = [];
/** The answer being written, if there is one. */
let current = null;
let ready = false;

// readiness

async function watchReadiness() {
  for (;;) {
    const state = await readiness();
    ready = state.status === "ready";
    $("status").dataset.state = state.status;
    $("status-text").textContent = ready ? await modelName() : describe(state);
    $("loading").hidden = state.status !== "starting";
    if (state.total > 0) $("loading").value = state.done / state.total;
    else $("loading").removeAttribute("value");
    updateButtons();
    if (ready) return;
    await new Promise((wake) => setTimeout(wake, READY_POLL_MS));
  }
}

async function readiness() {
  try {
    return await (await fetch("/ready")).json();
  } catch {
    return { status: "unreachable" };
  }
}

async function modelName() {
  const answer = await fetch("/v1/models");
  return answer.ok ? (await answer.json()).data[0].id : "ready";
}

function describe({ status, phase, done, total }) {
  if (status === "starting") {
    const share = total > 0 ? ` ${Math.floor((100 * done) / total)} %` : "";
    return phase ? `Starting: ${phase}${share}` : "Starting…";
  }
  return { draining: "Shutting down", failed: "The engine has failed", unreachable: "Server not reachable" }[status] ?? status;
}

// conversation

function addMessage(role, label) {
  const article = document.createElement("article");
  article.className = role;
  article.setAttribute("aria-label", label);
  const text = document.createElement("div");
  text.className = "text";
  article.append(text);
  $("log").append(article);
  return { article, text };
}

function addLine(article, className, content) {
  const line = document.createElement("div");
  line.className = className;
  line.textContent = content;
  article.append(line);
  return line;
}

const atEnd = () => $("scroll").scrollHeight - $("scroll").scrollTop - $("scroll").clientHeight < NEAR_END_PX;
const scrollToEnd = () => ($("scroll").scrollTop = $("scroll").scrollHeight);

/** One answer on the page: gathers text and paints it at most once per frame. */
class Answer {
  constructor() {
    const { article, text } = addMessage("assistant", "Answer");
    this.article = article;
    this.node = text.appendChild(new Text());
    this.meta = addLine(article, "meta", "Waiting…");
    article.setAttribute("aria-busy", "true");
    this.begun = performance.now();
    this.first = undefined;
    this.tokens = 0;
    this.text = "";
    this.unpainted = "";
    this.frame = 0;
  }

  add({ type, text, n, phase, queue_position: position }) {
    if (type === "progress") {
      this.note = phase === "prefill" ? "Reading…" : position ? `Waiting, ${position} before you…` : "Waiting…";
    } else if (type === "delta") {
      this.first ??= performance.now();
      this.tokens += n;
      this.text += text;
      this.unpainted += text;
    }
    this.frame ||= requestAnimationFrame(() => this.paint());
  }

  paint() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const follow = atEnd();
    this.node.appendData(this.unpainted);
    this.unpainted = "";
    this.meta.textContent = this.first === undefined ? (this.note ?? "Waiting…") : this.figures(this.rate());
    if (follow) scrollToEnd();
  }

  rate() {
    const seconds = (performance.now() - this.first) / 1000;
    return this.tokens > 1 && seconds > 0.1 ? (this.tokens - 1) / seconds : undefined;
  }

  figures(rate, note) {
    const ttft = this.first === undefined ? undefined : `first token after ${Math.round(this.first - this.begun)} ms`;
    const count = `${this.tokens} token${this.tokens === 1 ? "" : "s"}`;
    return [note, count, rate && `${rate.toFixed(1)} tokens/s`, ttft].filter(Boolean).join(" · ");
  }

  finish(done) {
    this.paint();
    const note = { cancelled: "Stopped", length: "Cut at the token limit" }[done?.finish_reason];
    this.meta.textContent = this.figures(done?.timing?.tokens_per_s ?? this.rate(), note);
    this.article.removeAttribute("aria-busy");
  }

  fail(error) {
    this.finish();
    this.meta.hidden = this.tokens === 0;
    const line = addLine(this.article, "problem", `${error.message} `);
    line.setAttribute("role", "alert");
    line.append(Object.assign(document.createElement("code"), { textContent: error.code ?? error.name }));
    scrollToEnd();
  }
}

async function ask(question) {
  $("welcome").hidden = true;
  addMessage("user", "You").text.textContent = question;
  history.push({ role: "user", content: question });
  const conversation = history;
  const answer = new Answer();
  scrollToEnd();
  try {
    current = client.stream({
      messages: conversation,
      temperature: $("temperature").valueAsNumber,
      max_tokens: $("max-tokens").valueAsNumber,
    });
    updateButtons();
    for await (const event of current) {
      if (event.type === "done") answer.finish(event);
      else answer.add(event);
    }
  } catch (error) {
    answer.fail(error);
    if (error.code === "connection_lost") {
      ready = false;
      watchReadiness();
    }
  }
  // A question without an answer would put two of the user's turns in a row, which templates refuse.
  if (answer.text) conversation.push({ role: "assistant", content: answer.text });
  else conversation.pop();
  current = null;
  updateButtons();
}

// controls

function updateButtons() {
  $("send").hidden = current !== null;
  $("stop").hidden = current === null;
  $("send").disabled = !ready || !$("input").value.trim() || !$("max-tokens").validity.valid;
  $("reset").hidden = $("log").childElementCount === 0 || current !== null;
}

function fitInput() {
  const follow = atEnd();
  $("input").style.height = "auto";
  $("input").style.height = `${$("input").scrollHeight}px`;
  if (follow) scrollToEnd();
  updateButtons();
}

function send() {
  updateButtons();
  if (current !== null || $("send").disabled) return;
  const question = $("input").value.trim();
  $("input").value = "";
  fitInput();
  ask(question);
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("input").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") current?.cancel();
});
$("stop").addEventListener("click", () => {
  current?.cancel();
  $("input").focus();
});
$("reset").addEventListener("click", () => {
  history = [];
  $("log").replaceChildren();
  $("welcome").hidden = false;
  updateButtons();
  $("input").focus();
});
for (const idea of document.querySelectorAll(".idea"))
  idea.addEventListener("click", () => {
    $("input").value = idea.textContent;
    fitInput();
    $("input").focus();
  });
$("input").addEventListener("input", fitInput);
$("temperature").addEventListener("input", () => {
  $("temperature-value").textContent = $("temperature").valueAsNumber.toFixed(1);
});
$("max-tokens").addEventListener("input", updateButtons);

watchReadiness();
