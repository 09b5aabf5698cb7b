/** One column: a conversation's turns, the answer that is being written, and what starts and stops it. */

import { Answer, button, make } from "/answer.js";

const NEAR_END_PX = 60;

/**
 * What a column needs of the page.
 * @typedef {object} Host
 * @property {(column: Column) => import("../types.d.ts").TokenStream} start asks for an answer to the column's turns
 * @property {() => {logprobs: boolean, chart: boolean}} display
 * @property {(column: Column) => void} changed its turns, or whether it is busy
 * @property {(column: Column) => void} remove
 */

export class Column {
  /** @type {import("../types.d.ts").TokenStream|null} */ stream = null;
  /** @type {Answer|null} */ answer = null;
  #stopping = false;

  /** @param {import("./store.js").Column} data @param {string} conversation @param {Host} host */
  constructor(data, conversation, host) {
    this.data = data;
    this.conversation = conversation;
    this.host = host;
    this.element = make("section", "column");
    this.scroll = make("div", "scroll");
    this.log = make("div", "log");
    this.log.setAttribute("role", "log");
    this.log.setAttribute("aria-live", "polite");
    this.scroll.append(this.log);
    this.element.append(this.#head(), this.scroll);
    this.name(0, 1);
    for (const turn of data.turns) this.#restore(turn);
  }

  /** Where it stands among how many. */
  name(index, count) {
    const letter = "ABCD"[index];
    this.letter.textContent = letter;
    this.head.hidden = count === 1;
    this.element.setAttribute("aria-label", count === 1 ? "Chat" : `Column ${letter}`);
    this.log.setAttribute("aria-label", count === 1 ? "Conversation" : `Conversation ${letter}`);
  }

  /** Whether it has something to ask, with `shared` for all columns. */
  wants(shared) {
    return Boolean((this.head.hidden ? "" : this.data.prompt.trim()) || shared);
  }

  ask(shared) {
    const question = (this.head.hidden ? "" : this.data.prompt.trim()) || shared;
    const { turns } = this.data;
    // A question without an answer would put two of the user's turns in a row, which templates refuse.
    if (turns.at(-1)?.role === "user") turns.pop();
    turns.push({ role: "user", content: question });
    this.#addQuestion(question);
    this.#run();
  }

  /** The last answer once more. */
  again() {
    const { turns } = this.data;
    if (this.stream || !turns.length) return;
    if (turns.at(-1).role === "assistant") turns.pop();
    this.answer?.element.remove();
    this.#run();
  }

  /** What was being written when the page was left. @param {import("./store.js").OpenStream} open */
  resume({ text, position }, stream) {
    this.#run(stream, text, position.seq);
  }

  /** The second time without waiting for the server. */
  stop() {
    if (this.#stopping) this.stream?.return?.();
    this.#stopping = true;
    this.stream?.cancel();
  }

  scrollToEnd() {
    this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  async #run(stream, text = "", tokens = 0) {
    const answer = this.#addAnswer();
    this.#stopping = false;
    answer.begin(text, tokens, () => this.stop());
    this.scrollToEnd();
    try {
      this.stream = stream ?? this.host.start(this);
      this.host.changed(this);
      let done;
      for await (const event of this.stream) {
        if (event.type === "accepted") this.host.changed(this);
        if (event.type === "done") done = event;
        else answer.add(event);
      }
      answer.finish(done, this.#actions(answer));
    } catch (error) {
      answer.fail(error, this.#actions(answer));
      this.failure = error;
    }
    this.stream = null;
    if (answer.text) this.data.turns.push({ role: "assistant", content: answer.text, note: answer.figures });
    this.host.changed(this);
    this.failure = undefined;
  }

  #restore(turn) {
    if (turn.role === "user") this.#addQuestion(turn.content);
    else {
      const answer = this.#addAnswer();
      answer.restore(turn, this.#actions(answer));
    }
  }

  /** For a question that the page was left with. */
  restoreUnanswered() {
    const answer = this.#addAnswer();
    answer.restore({ content: "", note: "No answer" }, this.#actions(answer));
  }

  #addQuestion(text) {
    this.scroll.querySelector(".welcome")?.remove();
    const article = make("article", "user");
    article.setAttribute("aria-label", "You");
    article.append(make("div", "text", text));
    this.log.append(article);
  }

  #addAnswer() {
    this.answer?.element.querySelector(".again")?.remove();
    this.answer = new Answer(this.host.display(), (change) => this.#keepEnd(change));
    this.log.append(this.answer.element);
    return this.answer;
  }

  #keepEnd(change) {
    const { scrollHeight, scrollTop, clientHeight } = this.scroll;
    const follow = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    change();
    if (follow) this.scrollToEnd();
  }

  #actions(answer) {
    const again = button("Again", "Write this answer again (Alt+R)", () => this.again());
    again.classList.add("again");
    return answer.text ? [button("Copy", "Copy this answer", (event) => copy(answer, event.target)), again] : [again];
  }

  #head() {
    this.head = make("header", "column-head");
    this.letter = make("span", "letter");
    const prompt = make("textarea", "own");
    prompt.rows = 1;
    prompt.placeholder = "Its own prompt (optional)";
    prompt.setAttribute("aria-label", "Prompt of this column");
    prompt.value = this.data.prompt;
    prompt.addEventListener("input", () => {
      this.data.prompt = prompt.value;
      this.host.changed(this);
    });
    const temperature = make("input", "own");
    Object.assign(temperature, { type: "number", min: "0", max: "2", step: "0.1", placeholder: "temperature", value: this.data.temperature });
    temperature.setAttribute("aria-label", "Temperature of this column");
    temperature.title = "Temperature of this column; empty: as in the settings";
    temperature.addEventListener("input", () => (this.data.temperature = temperature.validity.valid ? temperature.value : ""));
    const close = button("✕", "Remove this column", () => this.host.remove(this));
    close.setAttribute("aria-label", "Remove this column");
    this.head.append(this.letter, temperature, close, prompt);
    return this.head;
  }
}

/** Without permission (or without TLS) the text is selected, ready for the keyboard. */
async function copy(answer, control) {
  try {
    await navigator.clipboard.writeText(answer.text);
    control.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(answer.body);
    control.textContent = "Selected";
  }
}
