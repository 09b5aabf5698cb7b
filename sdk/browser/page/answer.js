/** One answer on the page: gathers what its stream gives and paints it at most once per frame. */

import { Chart, ms } from "/chart.js";
import { tokenSpans } from "/tokens.js";

const NOTES = { cancelled: "Stopped", length: "Cut at the token limit", content_filter: "Withheld" };

export function make(name, className = "", text = "") {
  const element = document.createElement(name);
  element.className = className;
  element.textContent = text;
  return element;
}

export function button(text, label, act) {
  const element = make("button", "link", text);
  element.type = "button";
  element.title = label;
  element.addEventListener("click", act);
  return element;
}

export class Answer {
  text = "";
  tokens = 0;
  earlier = 0;
  #pending = [];
  #frame = 0;
  #first;
  #note = "Waiting…";
  #values = new Map();

  /** @param {{logprobs: boolean, chart: boolean}} display @param {(change: () => void) => void} paint keeps the end in view */
  constructor(display, paint) {
    this.display = display;
    this.follow = paint;
    this.begun = performance.now();
    this.element = make("article", "assistant");
    this.element.setAttribute("aria-label", "Answer");
    this.body = make("div", "text");
    this.values = make("dl", "values");
    this.values.hidden = true;
    this.bar = make("progress");
    this.bar.hidden = true;
    this.bar.setAttribute("aria-label", "Prompt read");
    this.chart = new Chart();
    this.meta = make("span", "meta");
    this.actions = make("span", "actions");
    const foot = make("footer");
    foot.append(this.meta, this.actions);
    this.element.append(this.body, this.values, this.bar);
    if (display.chart) this.element.append(this.chart.element);
    this.element.append(foot);
  }

  /** It is being written: the reader may stop it. `text`, so many `tokens`, is what an earlier page showed of it. */
  begin(text, tokens, stop) {
    this.element.setAttribute("aria-busy", "true");
    this.text = text;
    this.tokens = tokens;
    this.earlier = tokens;
    this.body.append(text);
    this.actions.replaceChildren(button("Stop", "Stop this answer", stop));
    this.#schedule();
  }

  /** @param {import("../types.d.ts").Event} event */
  add(event) {
    if (event.type === "progress") this.#progress(event);
    else if (event.type === "value") this.#values.set(event.path, event.value);
    else if (event.type === "delta") {
      const now = performance.now();
      this.#first ??= now;
      this.tokens += event.n;
      this.chart.add(now, event.n);
      if (event.channel !== "reasoning") this.text += event.text;
      this.#pending.push(event);
    } else return;
    this.#schedule();
  }

  finish(done, actions) {
    this.#paint();
    const note = done ? NOTES[done.finish_reason] : this.#note;
    this.#end(this.#figures(note, done?.timing), actions);
    const { queue_ms: queue = 0, prefill_ms: prefill, itl_ms: between } = done?.timing ?? {};
    const facts = [
      `${done?.usage.prompt_tokens ?? "?"} prompt tokens, ${done?.usage.cached_tokens ?? 0} of them cached`,
      `waited ${ms(queue)}`,
      prefill !== undefined && `prompt read in ${ms(prefill)}`,
      between && `between tokens: median ${ms(between.p50)}, 99th percentile ${ms(between.p99)}, longest ${ms(between.max)}`,
    ];
    if (done) this.meta.title = facts.filter(Boolean).join("\n");
  }

  fail(error, actions) {
    this.#paint();
    this.#end(this.tokens ? this.#figures("Incomplete") : "", actions);
    const line = make("p", "problem", `${error.message} `);
    line.setAttribute("role", "alert");
    line.append(make("code", "", [error.code ?? error.name, error.param].filter(Boolean).join(" · ")));
    this.follow(() => this.body.after(line));
  }

  /** One of an earlier visit. */
  restore({ content, note = "" }, actions) {
    this.text = content;
    this.body.textContent = content;
    this.#end(note, actions);
  }

  get figures() {
    return this.meta.textContent;
  }

  #end(figures, actions) {
    this.element.removeAttribute("aria-busy");
    this.meta.textContent = figures;
    this.bar.hidden = true;
    this.actions.replaceChildren(...actions);
  }

  #progress({ phase, queue_position: position, prompt_tokens: all, prefilled_tokens: read }) {
    this.#note = phase === "queued" ? (position ? `Waiting, ${position} before you…` : "Waiting…") : "Reading…";
    if (phase !== "prefill" || !all) return;
    this.#note = `Reading ${all} tokens…`;
    this.bar.hidden = false;
    this.bar.max = all;
    this.bar.value = read ?? 0;
  }

  #schedule() {
    this.#frame ||= requestAnimationFrame(() => this.#paint());
  }

  #paint() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.follow(() => {
      for (const event of this.#pending.splice(0)) this.#show(event);
      this.meta.textContent = this.#first === undefined ? this.#note : this.#figures();
      this.bar.hidden ||= this.#first !== undefined;
      if (this.display.chart) this.chart.paint();
      this.#showValues();
    });
  }

  #show({ channel, text, logprobs }) {
    if (channel === "reasoning") append(this.#reasoning(), text);
    else if (this.display.logprobs && logprobs) {
      if (!this.body.classList.contains("shaded")) {
        this.body.classList.add("shaded");
        this.body.tabIndex = 0;
        this.body.setAttribute("role", "group");
        this.body.setAttribute("aria-label", "Answer; the arrow keys go from token to token");
      }
      this.body.append(...tokenSpans(text, logprobs));
    } else append(this.body, text);
  }

  #reasoning() {
    if (!this.thoughts) {
      const box = make("details", "reasoning");
      this.thoughts = make("div");
      box.append(make("summary", "", "Thoughts"), this.thoughts);
      this.body.before(box);
    }
    return this.thoughts;
  }

  /** Whole values as they are complete; the parts of an object or a list are shown, not it again. */
  #showValues() {
    if (this.#values.size === this.values.childElementCount / 2) return;
    this.values.hidden = false;
    const shown = [...this.#values].slice(this.values.childElementCount / 2);
    for (const [path, value] of shown)
      this.values.append(make("dt", "", path || "/"), make("dd", "", JSON.stringify(value)));
  }

  #figures(note, timing) {
    const seconds = (performance.now() - this.#first) / 1000;
    const fresh = this.tokens - this.earlier;
    const rate = timing?.tokens_per_s ?? (fresh > 1 && seconds > 0.1 ? (fresh - 1) / seconds : undefined);
    const ttft = timing?.ttft_ms ?? (this.earlier ? undefined : this.#first - this.begun);
    const count = `${this.tokens} token${this.tokens === 1 ? "" : "s"}`;
    const first = ttft >= 0 && `first token after ${ms(ttft)}`;
    return [note, count, rate && `${rate.toFixed(1)} tokens/s`, first].filter(Boolean).join(" · ");
  }
}

function append(element, text) {
  if (element.lastChild?.nodeType === Node.TEXT_NODE) element.lastChild.appendData(text);
  else element.append(text);
}
