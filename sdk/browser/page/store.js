/**
 * What this browser keeps: conversations and settings in localStorage, open streams and the key for this tab only.
 *
 * A conversation has a key of its own, so that two tabs do not overwrite each other's.
 *
 * @typedef {{role: "user"|"assistant", content: string, note?: string}} Turn
 * @typedef {{prompt: string, temperature: string, turns: Turn[]}} Column
 * @typedef {{id: string, title: string, updated: number, columns: Column[]}} Conversation
 * @typedef {{conversation: string, column: number, position: import("../types.d.ts").Position, text: string}} OpenStream
 */

const PREFIX = "conversation.";
const MOST = 200;

function read(storage, key, otherwise) {
  try {
    return JSON.parse(storage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** Whether there was room. Without any the page works on, and remembers less. */
function write(storage, key, value) {
  try {
    storage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/** @returns {Column} */
export const newColumn = () => ({ prompt: "", temperature: "", turns: [] });

/** @returns {Conversation} */
export function newConversation() {
  const id = crypto.getRandomValues(new Uint32Array(2)).join("-");
  return { id, title: "New chat", updated: Date.now(), columns: [newColumn()] };
}

/** Newest first. @returns {Conversation[]} */
export function conversations() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  const found = keys.map((key) => read(localStorage, key, null)).filter((found) => found?.columns?.length);
  return found.sort((a, b) => b.updated - a.updated);
}

/** @param {string} id @returns {Conversation|null} */
export const loadConversation = (id) => read(localStorage, PREFIX + id, null);

/**
 * An empty one is not worth keeping; the oldest make room for new ones.
 * @param {Conversation} conversation
 * @param {boolean} [touched] it comes first in the list
 */
export function saveConversation(conversation, touched = false) {
  const first = conversation.columns.flatMap((column) => column.turns)[0];
  if (!first) return removeConversation(conversation.id);
  conversation.title = first.content.trim().split("\n")[0].slice(0, 80);
  if (touched) conversation.updated = Date.now();
  const others = conversations().filter(({ id }) => id !== conversation.id);
  while (others.length >= MOST) removeConversation(others.pop().id);
  while (!write(localStorage, PREFIX + conversation.id, conversation) && others.length) removeConversation(others.pop().id);
}

/** @param {string} id */
export const removeConversation = (id) => localStorage.removeItem(PREFIX + id);

export const loadSettings = () => read(localStorage, "settings", {});
export const saveSettings = (settings) => write(localStorage, "settings", settings);

/** @returns {OpenStream[]} */
export const loadStreams = () => read(sessionStorage, "streams", []);
/** @param {OpenStream[]} streams */
export const saveStreams = (streams) => write(sessionStorage, "streams", streams);

/** The conversation that this tab shows. */
export const loadCurrent = () => read(sessionStorage, "current", "");
export const saveCurrent = (id) => write(sessionStorage, "current", id);

export const loadKey = () => read(sessionStorage, "key", "");
export const saveKey = (key) => write(sessionStorage, "key", key);
