/** The settings: what they ask of the server, whether they can be asked, and how the page looks. */

import { loadSettings, saveSettings } from "/store.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "max_tokens", "seed", "top_p", "top_k", "min_p"];
const PENALTIES = ["repetition_penalty", "frequency_penalty", "presence_penalty"];
const THEMES = ["auto", "light", "dark"];
const TOP_LOGPROBS = 5;
const EXAMPLE = {
  type: "object",
  properties: { title: { type: "string" }, steps: { type: "array", items: { type: "string" }, maxItems: 5 } },
  required: ["title", "steps"],
  additionalProperties: false,
};

export class Settings extends EventTarget {
  #form = $("settings");
  #theme = "auto";
  /** What is wrong with the schema, or "". */
  #fault = "";

  constructor() {
    super();
    $("schema").value = JSON.stringify(EXAMPLE, null, 2);
    this.#restore(loadSettings());
    this.#form.addEventListener("input", () => this.#changed());
    this.#form.addEventListener("submit", (event) => event.preventDefault());
    $("defaults").addEventListener("click", () => {
      this.#form.reset();
      $("schema").value = JSON.stringify(EXAMPLE, null, 2);
      this.#changed();
    });
    this.#show();
  }

  /** Why nothing can be sent, or "". */
  get problem() {
    const wrong = [...this.#form.elements].find((field) => field.willValidate && !field.validity.valid);
    if (wrong) return `${wrong.labels[0].textContent.trim()}: ${wrong.validationMessage}`;
    return this.#usesSchema ? this.#fault : "";
  }

  /** Fields of the request, but for messages. @returns {Partial<import("../types.d.ts").Request>} */
  get request() {
    const request = {};
    for (const name of [...NUMBERS, ...PENALTIES]) {
      const value = this.#form.elements[name].valueAsNumber;
      if (!Number.isNaN(value)) request[name] = value;
    }
    const stop = this.#form.elements.stop.value.split("\n").filter(Boolean);
    if (stop.length) request.stop = stop;
    if (this.display.logprobs) Object.assign(request, { logprobs: true, top_logprobs: TOP_LOGPROBS });
    if (this.#usesSchema) {
      const schema = { name: "answer", schema: JSON.parse($("schema").value), strict: true };
      request.response_format = { type: "json_schema", json_schema: schema };
      request.delivery = { values: true };
    }
    return request;
  }

  get system() {
    return this.#form.elements.system.value.trim();
  }

  get display() {
    return { logprobs: $("logprobs").checked, chart: $("chart").checked };
  }

  /** In a few words, what is not as usual. */
  get active() {
    return [this.#usesSchema && "JSON schema", this.system && "system prompt"].filter(Boolean).join(", ");
  }

  nextTheme() {
    this.#theme = THEMES[(THEMES.indexOf(this.#theme) + 1) % THEMES.length];
    this.#changed();
  }

  get #usesSchema() {
    return $("use-schema").checked;
  }

  #changed() {
    this.#show();
    const values = [...this.#form.elements].filter((field) => field.name);
    const kept = values.map((field) => [field.name, field.type === "checkbox" ? field.checked : field.value]);
    saveSettings({ ...Object.fromEntries(kept), theme: this.#theme });
    this.dispatchEvent(new Event("change"));
  }

  #restore({ theme, ...values }) {
    if (THEMES.includes(theme)) this.#theme = theme;
    for (const [name, value] of Object.entries(values)) {
      const field = this.#form.elements[name];
      if (field) field[field.type === "checkbox" ? "checked" : "value"] = value;
    }
  }

  #show() {
    this.#fault = faultOf($("schema").value);
    $("schema-state").textContent = this.#fault || "This is JSON, and an object. The server decides whether it can follow it.";
    $("schema-state").classList.toggle("wrong", Boolean(this.#fault));
    $("schema").setAttribute("aria-invalid", String(Boolean(this.#fault)));
    $("temperature-value").textContent = $("temperature").valueAsNumber.toFixed(1);
    $("legend").hidden = !$("logprobs").checked;
    document.documentElement.dataset.theme = this.#theme;
    $("theme").setAttribute("aria-label", `Theme: ${this.#theme}`);
  }
}

function faultOf(text) {
  try {
    const schema = JSON.parse(text);
    const object = typeof schema === "object" && schema !== null && !Array.isArray(schema);
    return object ? "" : "A schema is a JSON object.";
  } catch (error) {
    return error.message;
  }
}

/** A side that is open beside the chat, or above it where there is little room. */
export class Side {
  #element;
  #control;

  constructor(id) {
    this.#element = $(id);
    this.#control = $(`show-${id}`);
    this.#set(matchMedia("(min-width: 1100px)").matches);
    this.#control.addEventListener("click", () => this.toggle());
    for (const close of document.querySelectorAll(`[data-close="${id}"]`)) close.addEventListener("click", () => this.toggle());
  }

  get covers() {
    return !this.#element.hidden && matchMedia("(max-width: 1099px)").matches;
  }

  toggle() {
    if (this.#element.contains(document.activeElement)) this.#control.focus();
    this.#set(this.#element.hidden);
    if (this.covers) this.#element.querySelector("button").focus();
  }

  #set(open) {
    this.#element.hidden = !open;
    this.#control.setAttribute("aria-expanded", String(open));
  }
}
