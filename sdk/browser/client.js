/**
 * Token streams from a streamengine server: one socket, many streams, no build step.
 *
 *     const client = new StreamEngine();
 *     for await (const event of client.stream({ prompt: "Once upon a time" }))
 *       if (event.type === "delta") document.body.append(event.text);
 *
 * Leaving the loop, `stream.cancel()` or an AbortSignal stops the work on the server too.
 *
 * @typedef {{type: "accepted", stream: string, model?: string}} Accepted
 * @typedef {{type: "progress", phase: "queued"|"prefill"|"decode"|"tool", queue_position?: number,
 *   prompt_tokens?: number, prefilled_tokens?: number}} Progress
 * @typedef {{type: "delta", seq: number, n: number, text: string, tokens?: number[]}} Delta
 * @typedef {{type: "done", seq: number, finish_reason: string, cause?: string, stop_sequence?: string,
 *   usage: {prompt_tokens: number, completion_tokens: number, total_tokens: number},
 *   timing?: {ttft_ms?: number, total_ms?: number, tokens_per_s?: number}}} Done
 * @typedef {{messages?: {role: string, content: string}[], prompt?: string, token_ids?: number[],
 *   max_tokens?: number, temperature?: number, top_p?: number, top_k?: number, min_p?: number, seed?: number,
 *   stop?: string[], timeouts?: object, delivery?: object}} Request exactly one of the first three
 */

const PROTOCOL = "streamengine.v1";
const EVENTS = new Set(["accepted", "progress", "delta", "done"]);
const END = { done: true, value: undefined };

/** `code` is the server's, `connection_lost`, `protocol_error` or `message_too_large`. */
export class StreamEngineError extends Error {
  constructor(code, message, { param, status, retryable = false } = {}) {
    super(message);
    Object.assign(this, { name: "StreamEngineError", code, param, status, retryable });
  }
}

export class StreamEngine {
  #url;
  #connection;
  #count = 0;

  /** @param {string|URL} [url] the page's own by default */
  constructor(url = globalThis.location?.origin) {
    this.#url = new URL(url);
    this.#url.protocol = this.#url.protocol.replace("http", "ws");
    if (this.#url.pathname === "/") this.#url.pathname = "/v1/stream";
  }

  /**
   * The last event is `Done`; a failure is thrown.
   * @param {Request} request
   * @param {{signal?: AbortSignal}} [options]
   * @returns {Stream}
   */
  stream(request, { signal } = {}) {
    signal?.throwIfAborted();
    if (!this.#connection?.usable) this.#connection = new Connection(this.#url);
    const delivery = { coalesce_ms: 25, ...request.delivery };
    return new Stream(this.#connection, { ...request, delivery, type: "generate", id: `r${++this.#count}` }, signal);
  }

  close() {
    this.#connection?.close();
  }
}

/** @implements {AsyncIterableIterator<Accepted|Progress|Delta|Done>} */
class Stream {
  #connection;
  #id;
  #queue = [];
  #waiting = [];
  #ended = false;
  #error;
  #seq = 0;
  #bytes = 0;
  #crc = 0;
  #signal;
  #abort = () => this.#stop(this.#signal.reason);

  constructor(connection, request, signal) {
    this.#connection = connection;
    this.#id = request.id;
    this.#signal = signal;
    connection.open(this, request);
    signal?.addEventListener("abort", this.#abort);
  }

  [Symbol.asyncIterator]() {
    return this;
  }

  async next() {
    const value = this.#queue.shift();
    if (value) return { done: false, value };
    if (!this.#ended) return new Promise((resolve, reject) => this.#waiting.push({ resolve, reject }));
    const error = this.#error;
    this.#error = undefined;
    if (error) throw error;
    return END;
  }

  /** What `break` calls: cancel, and wait for nothing. */
  async return(value) {
    this.#stop();
    return { done: true, value };
  }

  /** Ask the server to stop; `Done` with finish_reason "cancelled" still comes. */
  cancel() {
    if (!this.#ended) this.#connection.send({ type: "cancel", id: this.#id });
  }

  push(event) {
    if (event.type === "delta") event.n ??= 1;
    const fault = this.#check(event);
    if (fault) return this.#stop(new StreamEngineError("protocol_error", fault));
    const last = this.#queue.at(-1);
    if (event.type === "delta" && last?.type === "delta") {
      // A slow loop gets larger deltas, not more.
      last.seq = event.seq;
      last.n += event.n;
      last.text += event.text;
      last.tokens?.push(...event.tokens);
    } else if (this.#waiting.length) this.#waiting.shift().resolve({ done: false, value: event });
    else this.#queue.push(event);
    if (event.type === "done") this.end();
  }

  end(error) {
    if (this.#ended) return;
    this.#ended = true;
    this.#error = error;
    this.#signal?.removeEventListener("abort", this.#abort);
    this.#connection.forget(this.#id);
    if (this.#waiting.length) this.#error = undefined;
    for (const { resolve, reject } of this.#waiting.splice(0)) error ? reject(error) : resolve(END);
  }

  #stop(error) {
    this.cancel();
    this.#queue = [];
    this.end(error);
  }

  #check(event) {
    if (event.type === "delta") {
      if (event.seq - event.n !== this.#seq) return `${event.n} tokens to ${event.seq} came after ${this.#seq}`;
      this.#seq = event.seq;
      const bytes = new TextEncoder().encode(event.text);
      this.#bytes += bytes.length;
      this.#crc = crc32(bytes, this.#crc);
    } else if (event.type === "done") {
      if (event.seq !== this.#seq + 1) return `the end is ${event.seq}, after token ${this.#seq}`;
      if (event.check.bytes !== this.#bytes || event.check.crc32 !== this.#crc) return "text was lost";
    }
  }
}

class Connection {
  #socket;
  #streams = new Map();
  #unsent = [];
  #limits = { max_message_bytes: Infinity };
  #timer;
  usable = true;

  constructor(url) {
    this.#socket = new WebSocket(url, PROTOCOL);
    this.#socket.onopen = () => this.#unsent.splice(0).forEach((text) => this.#socket.send(text));
    this.#socket.onmessage = ({ data }) => this.#receive(JSON.parse(data));
    this.#socket.onclose = ({ code, reason }) => this.#lost(`connection closed: ${code} ${reason}`);
  }

  open(stream, request) {
    const bytes = new Blob([JSON.stringify(request)]).size;
    const most = this.#limits.max_message_bytes;
    if (bytes > most) throw new StreamEngineError("message_too_large", `${bytes} bytes, at most ${most}`);
    this.#streams.set(request.id, stream);
    this.send(request);
  }

  send(message) {
    const text = JSON.stringify(message);
    if (this.#socket.readyState === WebSocket.CONNECTING) this.#unsent.push(text);
    else if (this.#socket.readyState === WebSocket.OPEN) this.#socket.send(text);
  }

  forget(id) {
    this.#streams.delete(id);
  }

  close() {
    this.#socket.close(1000);
    this.#lost("closed here");
  }

  #receive(message) {
    if (message.type === "hello") this.#limits = message.limits;
    if (message.type === "goaway") this.usable = false;
    this.#watch();
    if (message.type === "error") {
      const error = new StreamEngineError(message.code, message.message, message);
      if (message.fatal) this.#lost(message.message, error);
      this.#streams.get(message.id ?? message.ref)?.end(error);
    } else if (EVENTS.has(message.type)) this.#streams.get(message.id)?.push(message);
  }

  /** The server says something every heartbeat_s: much longer silence is death. */
  #watch() {
    clearTimeout(this.#timer);
    const wait = 2500 * this.#limits.heartbeat_s;
    const due = Date.now() + wait;
    // A timer that fires late was asleep with its tab, and so were the messages.
    const check = () => (Date.now() > due + wait / 2 ? this.#watch() : this.#lost("silence"));
    this.#timer = setTimeout(check, wait);
  }

  #lost(reason, error = new StreamEngineError("connection_lost", reason, { retryable: true })) {
    clearTimeout(this.#timer);
    this.usable = false;
    this.#socket.close();
    for (const stream of [...this.#streams.values()]) stream.end(error);
  }
}

const TABLE = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let bit = 0; bit < 8; bit++) n = n & 1 ? (n >>> 1) ^ 0xedb88320 : n >>> 1;
  return n;
});

function crc32(bytes, crc) {
  crc = ~crc;
  for (const byte of bytes) crc = TABLE[(crc ^ byte) & 255] ^ (crc >>> 8);
  return ~crc >>> 0;
}
