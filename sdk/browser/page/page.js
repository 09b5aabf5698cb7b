/** The built-in page: one client, the conversations, and what is around them. Text becomes text nodes only. */

import { button, make } from "/answer.js";
import { Column } from "/chat.js";
import { StreamEngine } from "/client.js";
import { Settings, Side } from "/panels.js";
import * as store from "/store.js";
import { watchTokens } from "/tokens.js";

const $ = (id) => document.getElementById(id);
const READY_POLL_MS = 500;
const MOST_COLUMNS = 4;

const settings = new Settings();
const sides = { history: new Side("history"), panel: new Side("panel") };
/** @type {StreamEngine} */
let client;
let ready = false;
let watching = false;

/**
 * Conversations on the page: the one that is shown, and others where something is still being written.
 * @type {Map<string, {conversation: store.Conversation, columns: Column[]}>}
 */
const views = new Map();
let shown;

const busy = (view) => view.columns.some((column) => column.stream);
const everyColumn = () => [...views.values()].flatMap((view) => view.columns);

// the server

function connect() {
  client?.close();
  client = new StreamEngine(location.origin, { token: store.loadKey() || undefined });
  client.addEventListener("state", showConnection);
}

async function watchReadiness() {
  if (watching) return;
  watching = true;
  for (;;) {
    const state = await readiness();
    ready = state.status === "ready";
    setStatus(state.status, ready ? ((await modelName()) ?? "Key needed") : describe(state));
    $("loading").hidden = state.status !== "starting";
    if (state.total > 0) $("loading").value = state.done / state.total;
    else $("loading").removeAttribute("value");
    updateControls();
    if (ready) break;
    await new Promise((wake) => setTimeout(wake, READY_POLL_MS));
  }
  watching = false;
}

async function readiness() {
  try {
    return await (await fetch("/ready")).json();
  } catch {
    return { status: "unreachable" };
  }
}

async function modelName() {
  const key = store.loadKey();
  const answer = await fetch("/v1/models", key ? { headers: { authorization: `Bearer ${key}` } } : {});
  if (answer.status === 401) askKey(key ? "The server does not know this key." : "");
  return answer.ok ? (await answer.json()).data[0].id : undefined;
}

function describe({ status, phase, done, total }) {
  if (status === "starting") {
    const share = total > 0 ? ` ${Math.floor((100 * done) / total)} %` : "";
    return phase ? `Starting: ${phase}${share}` : "Starting…";
  }
  return { draining: "Shutting down", failed: "The engine has failed", unreachable: "Server not reachable" }[status] ?? status;
}

function setStatus(state, text) {
  $("status").dataset.state = state;
  $("status-text").textContent = text;
}

function showConnection() {
  const lost = client.state === "waiting";
  $("notice").hidden = !lost;
  $("notice").textContent = lost ? "The connection was lost. What is being written goes on as soon as it is back." : "";
  if (lost) {
    setStatus("reconnecting", "Reconnecting…");
    for (const column of everyColumn()) column.answer?.chart.skip();
  } else if (client.state === "open" && client.hello) setStatus("ready", client.hello.models?.[0] ?? "ready");
}

function askKey(problem) {
  $("change-key").hidden = false;
  $("key-problem").hidden = !problem;
  $("key-problem").textContent = problem;
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

// conversations

/** @type {import("./chat.js").Host} */
const host = {
  start(column) {
    const messages = column.data.turns.map(({ role, content }) => ({ role, content }));
    if (settings.system) messages.unshift({ role: "system", content: settings.system });
    const own = column.data.temperature === "" ? {} : { temperature: Number(column.data.temperature) };
    const request = { ...settings.request, ...own, messages };
    column.values = Boolean(request.delivery?.values);
    return client.stream(request);
  },
  display: () => settings.display,
  changed(column) {
    const view = views.get(column.conversation);
    if (!view) return;
    store.saveConversation(view.conversation, true);
    saveStreams();
    if (view !== shown && !busy(view)) views.delete(view.conversation.id);
    if (column.failure?.code === "unauthorized") askKey("The server does not know this key.");
    if (column.failure?.code === "connection_lost") watchReadiness();
    listConversations();
    updateControls();
  },
  remove(column) {
    column.stream?.return();
    shown.columns.splice(shown.columns.indexOf(column), 1);
    arrange();
  },
};

function open(conversation) {
  if (!views.has(conversation.id)) {
    const columns = conversation.columns.map((data) => new Column(data, conversation.id, host));
    views.set(conversation.id, { conversation, columns });
  }
  return views.get(conversation.id);
}

function show(conversation) {
  if (shown && !busy(shown)) views.delete(shown.conversation.id);
  shown = open(conversation);
  store.saveCurrent(conversation.id);
  arrange();
  for (const column of shown.columns) column.scrollToEnd();
  $("input").focus();
}

/** The columns of the conversation, as they are now. */
function arrange() {
  const { conversation, columns } = shown;
  conversation.columns = columns.map(({ data }) => data);
  columns.forEach((column, index) => column.name(index, columns.length));
  $("columns").replaceChildren(...columns.map(({ element }) => element));
  $("columns").dataset.count = String(columns.length);
  $("input").placeholder = columns.length > 1 ? "Message all columns" : "Message the model";
  document.querySelector(".welcome")?.remove();
  if (columns.length === 1 && !conversation.columns[0].turns.length) welcome(columns[0]);
  store.saveConversation(conversation);
  listConversations();
  updateControls();
}

function welcome(column) {
  const section = $("welcome").content.cloneNode(true);
  for (const idea of section.querySelectorAll(".idea"))
    idea.addEventListener("click", () => {
      $("input").value = idea.textContent;
      fitInput();
      $("input").focus();
    });
  column.scroll.prepend(section);
}

function addColumn() {
  if (shown.columns.length >= MOST_COLUMNS) return;
  shown.columns.push(new Column(store.newColumn(), shown.conversation.id, host));
  arrange();
}

function listConversations() {
  $("conversations").replaceChildren(
    ...store.conversations().map((conversation) => {
      const item = document.createElement("li");
      const choose = button(conversation.title, conversation.title, () => choice(() => show(views.get(conversation.id)?.conversation ?? conversation)));
      choose.className = "conversation";
      if (conversation.id === shown.conversation.id) choose.setAttribute("aria-current", "true");
      const view = views.get(conversation.id);
      if (view && busy(view)) item.append(make("span", "running", "●"));
      const remove = button("✕", "Delete", () => {
        if (remove.textContent === "Sure?") return forget(conversation.id);
        remove.textContent = "Sure?";
      });
      remove.setAttribute("aria-label", `Delete ${conversation.title}`);
      remove.addEventListener("blur", () => (remove.textContent = "✕"));
      item.append(choose, remove);
      return item;
    }),
  );
}

/** Where the list covers the chat, a choice closes it. */
function choice(act) {
  if (sides.history.covers) sides.history.toggle();
  act();
}

function forget(id) {
  const view = views.get(id);
  views.delete(id);
  for (const column of view?.columns ?? []) column.stream?.return();
  store.removeConversation(id);
  saveStreams();
  if (id === shown.conversation.id) show(store.conversations()[0] ?? store.newConversation());
  else listConversations();
}

// a reload goes on where the page was left

function saveStreams() {
  const streams = [...views.values()].flatMap(({ conversation, columns }) =>
    columns.flatMap(({ stream, answer, values = false }, column) =>
      stream?.position.stream
        ? [{ conversation: conversation.id, column, values, position: { ...stream.position }, text: answer.text }]
        : [],
    ),
  );
  store.saveStreams(streams);
}

function restore() {
  const streams = store.loadStreams();
  show(store.loadConversation(store.loadCurrent()) ?? store.newConversation());
  for (const saved of streams) {
    const conversation = store.loadConversation(saved.conversation);
    const column = conversation && open(views.get(saved.conversation)?.conversation ?? conversation).columns[saved.column];
    if (!column) continue;
    column.values = saved.values;
    column.resume(saved, client.resume(saved.position, saved.values ? { delivery: { values: true } } : {}));
  }
  for (const column of everyColumn())
    if (!column.stream && column.data.turns.at(-1)?.role === "user") column.restoreUnanswered();
}

// controls

function updateControls() {
  if (!shown) return;
  const question = $("input").value.trim();
  const running = busy(shown);
  const { problem } = settings;
  $("send").hidden = running;
  $("stop").hidden = !running;
  $("send").disabled = !ready || Boolean(problem) || !shown.columns.some((column) => column.wants(question));
  $("send").title = problem || "Send (Enter)";
  $("active").textContent = problem || settings.active;
  $("active").classList.toggle("wrong", Boolean(problem));
  $("add-column").disabled = shown.columns.length >= MOST_COLUMNS;
}

function fitInput() {
  $("input").style.height = "auto";
  $("input").style.height = `${$("input").scrollHeight}px`;
  updateControls();
}

function send() {
  updateControls();
  if (busy(shown) || $("send").disabled) return;
  const question = $("input").value.trim();
  $("input").value = "";
  fitInput();
  for (const column of shown.columns) if (column.wants(question)) column.ask(question);
}

const stopAll = () => shown.columns.forEach((column) => column.stop());
const newChat = () => choice(() => show(store.newConversation()));

const SHORTCUTS = {
  KeyN: newChat,
  KeyR: () => shown.columns.forEach((column) => column.again()),
  KeyC: addColumn,
  KeyH: () => sides.history.toggle(),
  KeyP: () => sides.panel.toggle(),
  KeyT: () => settings.nextTheme(),
};

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("key-dialog").open) {
    const covering = Object.values(sides).find((side) => side.covers);
    if (covering) covering.toggle();
    else stopAll();
  }
  const shortcut = event.altKey && !event.ctrlKey && !event.metaKey && SHORTCUTS[event.code];
  if (!shortcut || $("key-dialog").open) return;
  event.preventDefault();
  shortcut();
});
document.addEventListener("keydown", (event) => {
  const sends = event.target === $("input") || event.target.matches?.(".column-head .own");
  if (!sends || event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => {
  stopAll();
  $("input").focus();
});
$("key-form").addEventListener("submit", () => {
  store.saveKey($("key").value.trim());
  $("key").value = "";
  connect();
  watchReadiness();
});
$("change-key").addEventListener("click", () => askKey(""));
$("new").addEventListener("click", newChat);
$("add-column").addEventListener("click", addColumn);
$("theme").addEventListener("click", () => settings.nextTheme());
$("input").addEventListener("input", fitInput);
settings.addEventListener("change", updateControls);
addEventListener("pagehide", saveStreams);

watchTokens($("columns"), $("tip"));
connect();
restore();
watchReadiness();
