/**
 * Token streams from a streamengine server: many on one socket, and they outlive it, and the server. No build step.
 *
 *     for await (const event of new StreamEngine().stream({ prompt: "Once upon a time" }))
 *       if (event.type === "delta") document.body.append(event.text);
 *
 * Leaving the loop, `stream.cancel()` or an AbortSignal stops the work on the server too.
 *
 * @import {Hello, Options, Position, Refusal, Request, Result, State, TokenStream} from "./types.d.ts"
 */

const EVENTS = ["accepted", "progress", "delta", "value", "done"];
const COME_BACK = [1001, 1005, 1006, 1011, 1012, 1013];
const WAKING = ["visibilitychange", "online", "pageshow"];
const GIVE_UP_MS = 60_000;
const CUT_MS = 5_000;

/** `code` is the server's, or `connection_lost`, `stream_lost`, `protocol_error`, `message_too_large`. */
export class StreamEngineError extends Error {
  /** What was read of the stream. @type {Omit<Result, "done">|undefined} */ partial;

  /** @param {string} code @param {string} message @param {Refusal} [details] */
  constructor(code, message, details = {}) {
    super(message);
    this.name = "StreamEngineError";
    this.code = code;
    this.param = details.param;
    this.retryable = details.retryable ?? false;
    this.details = details;
  }
}

/** Fires `state` when its state has changed. */
export class StreamEngine extends EventTarget {
  /** @type {State} */ state = "idle";
  /** @type {Hello|undefined} */ hello;
  #link;
  #continuations;
  #count = 0;

  /**
   * @param {string|URL} [url] the page's own by default
   * @param {{token?: string, continuations?: number}} [options] an API key, and how often another server may continue
   *   an answer whose server is gone: 3 times unless given, 0 ends it in `stream_lost`
   */
  constructor(url = globalThis.location?.origin, { token, continuations = 3 } = {}) {
    super();
    this.#continuations = continuations;
    const address = new URL(url);
    address.protocol = address.protocol.replace("http", "ws");
    if (address.pathname === "/") address.pathname = "/v1/stream";
    this.#link = openLink(address, token, (state, hello = this.hello) => {
      Object.assign(this, { state, hello });
      this.dispatchEvent(new Event("state"));
    });
  }

  /**
   * The last event is `Done`; a failure is thrown.
   * @param {Request} request @param {Options} [options] @returns {TokenStream}
   */
  stream(request, options) {
    const wishes = { delivery: request.delivery, ...options };
    return this.#start({ stream: "", seq: 0 }, wishes, { ...request, key: request.key ?? randomKey() });
  }

  /**
   * Go on with a stream that another page or client began.
   * @param {Position} position @param {Options} [options] @returns {TokenStream}
   */
  resume(position, options) {
    return this.#start(position, options);
  }

  /** Cancels what is open. */
  close() {
    this.#link.close();
  }

  /** @param {Position} position @param {Options} [options] @param {Request} [request] */
  #start(position, { signal, delivery } = {}, request) {
    signal?.throwIfAborted();
    const left = request ? this.#continuations : 0; // nothing else can be asked of another server
    return openStream(this.#link, `r${++this.#count}`, position, delivery, signal, request, left);
  }
}

/**
 * One stream, whichever connection shows it. `at` is what its reader has taken, `seq` what has come. `continuations` is
 * how often the rest may still be asked of another server.
 */
function openStream(link, id, position, wishes, signal, request, continuations) {
  const delivery = { coalesce_ms: 25, window: 256, ...wishes };
  const showsIds = delivery.token_ids;
  if (continuations > 0) {
    // Any server goes on with these as the first one would have. Its own seed has more digits than a number here.
    delivery.token_ids = true;
    request.seed ??= crc32(new TextEncoder().encode(request.key), 0);
  }
  const at = position.seq ? { ...position } : { ...position, bytes: 0, crc32: 0 };
  /** @type {any} */ const whole = { text: "", reasoning: "", continued: 0 };
  const queue = [];
  const tokens = [];
  const paths = new Set();
  let seq, acked, connection, epoch, ended, error, cancelled, wake;
  let cut, patience; // the end that a shutdown made, until another server takes it or the time is over

  /** Ask `to` to show it. */
  function open(to) {
    const { hello } = (connection = to);
    const gone = at.stream && (epoch ??= hello.epoch) !== hello.epoch;
    if (gone && !leaveServer()) return end(fault("stream_lost", "the server has restarted"));
    if (!cut) rewind();
    acked = seq;
    const ask = at.stream ? { type: "attach", stream: at.stream, after: seq } : { ...request, type: "generate" };
    const text = JSON.stringify({ ...ask, id, delivery });
    // No server takes them, and what is no JSON at all has no id to be answered by.
    if (/[^\\](\\\\)*\\ud[89a-f]/.test(text)) return end(fault("invalid_request", "half a character (a lone surrogate)"));
    const most = hello.limits.max_message_bytes;
    if (new Blob([text]).size > most) return end(fault("message_too_large", `more than ${most} bytes`));
    connection.streams.set(id, stream);
    connection.taken.add(id);
    connection.send(text);
    if (cancelled) cancel();
  }

  /** Forget what was not taken: it comes again, but for what an earlier server brought. */
  function rewind() {
    seq = Math.max(at.seq, request?.continues?.length ?? 0);
    while (queue.length && !(queue.at(-1).seq <= seq)) queue.pop();
    tokens.splice(seq);
  }

  /** Make it a request for the rest of the answer; or for all of it, if nothing was seen. Can that be? */
  function leaveServer() {
    if (seq && tokens.length === seq && continuations > 0 && !cancelled) {
      continuations--;
      request = { ...request, continues: [...tokens], key: randomKey() };
    } else if (!request || request.continues || (cut ? seq : at.seq)) return false;
    at.stream = "";
    return true;
  }

  function receive(event) {
    const { type } = event;
    if (type === "delta") event.n ??= 1;
    const after = { accepted: event.after, delta: event.seq - event.n, done: event.seq - 1 }[type] ?? seq;
    if (after !== seq) return stop(fault("protocol_error", `${type} goes on after ${after}, not ${seq}`));
    if (type === "accepted") {
      if (event.stream !== at.stream) {
        cut = clearTimeout(patience);
        if (request?.continues) whole.continued++;
      }
      at.stream = event.stream;
      epoch = connection.hello.epoch;
    } else if (type === "delta") {
      seq = event.seq;
      for (const token of event.tokens ?? []) tokens.push(token);
      if (!showsIds) delete event.tokens;
    } else if (type === "progress" && queue.at(-1)?.type === type) queue.pop();
    else if (type === "done" && event.cause === "shutdown" && continuations > 0 && !cancelled) {
      if (!cut) patience = setTimeout(cancel, CUT_MS);
      cut = event; // its connection ends next
      return;
    }
    queue.push(event);
    type === "done" ? end() : wake?.();
  }

  function take(event) {
    const { type, text, channel = "text", check } = event;
    if (type === "delta") {
      const bytes = new TextEncoder().encode(text);
      at.seq = event.seq;
      at.bytes += bytes.length;
      at.crc32 = crc32(bytes, at.crc32);
      whole[channel] += text;
      if (at.seq - acked >= delivery.window / 2) say("ack", { seq: (acked = at.seq) });
    } else if (type === "done") {
      if (at.bytes >= 0 && (check.bytes !== at.bytes || check.crc32 !== at.crc32))
        return void (error = fault("protocol_error", "text was lost"));
      whole.done = event;
    } else if (type === "value") {
      if (paths.has(event.path)) return; // as it may come again with its delta
      paths.add(event.path);
    }
    return event;
  }

  /** An error that is not the stream's own end leaves it running, to be asked for again. */
  function refuse(why) {
    const { code, details } = why;
    link.forget(stream);
    if (code === "stream_not_found" && at.stream && leaveServer()) return open(connection);
    const again = details.retryable && at.stream && (!details.stream || code === "slow_consumer");
    again ? setTimeout(() => ended || link.show(stream), details.retry_after_ms ?? 1000) : end(why);
  }

  /** One that was cut ends so: that became of it, and `why` is only why no other server went on. */
  function end(why) {
    if (cut) queue.push(cut);
    error = cut ? undefined : why;
    cut = clearTimeout(patience);
    ended = true;
    signal?.removeEventListener("abort", abort);
    link.forget(stream);
    wake?.();
  }

  function cancel() {
    say("cancel", (cancelled = true));
    if (cut) end();
  }

  function stop(why) {
    if (ended) return;
    cut = clearTimeout(patience);
    cancel();
    queue.length = 0;
    end(why);
  }

  async function* events() {
    while (queue.length || !ended)
      if (queue.length) {
        const event = take(queue.shift());
        if (event) yield event;
      } else await new Promise((resolve) => (wake = resolve));
    if (error instanceof StreamEngineError) // which other streams may share
      throw Object.assign(fault(error.code, error.message, error.details), { partial: whole });
    if (error) throw error;
  }

  async function result() {
    for await (const _ of stream);
    return whole;
  }

  const say = (type, more) => connection?.send(JSON.stringify({ type, id, ...more }));
  const abort = () => stop(signal.reason);
  const text = async () => (await result()).text;
  const leave = async (value) => (stop(undefined), { done: true, value }); // what `break` calls
  const inner = { id, position: at, open, receive, refuse, end };
  const stream = Object.assign(events(), inner, { cancel, result, text, return: leave });
  signal?.addEventListener("abort", abort);
  link.show(stream);
  return stream;
}

/** One socket for all that is new, and the next one for the streams of those that were lost. */
function openLink(address, token, report) {
  const protocols = ["streamengine.v1"];
  if (token) protocols.push(`streamengine.auth.${base64url(token)}`);
  const connections = new Set();
  const waiting = new Set();
  let current, retry;
  let tries = 0;
  let good = 0;

  function connect() {
    retry = clearTimeout(retry);
    const socket = new WebSocket(address, protocols);
    const streams = new Map();
    const send = (text) => socket.readyState === 1 && socket.send(text);
    const taken = new Set(); // ids of what the server has open, with those that were left here before it said so
    const hello = /** @type {Hello|undefined} */ (undefined);
    const connection = (current = { streams, taken, send, end, probe, hello });
    let timer, due;

    function receive(message) {
      const { type, id, ref } = message;
      const stream = streams.get(id ?? ref);
      if (id && (type === "done" || type === "error") && taken.delete(id)) flush();
      if (type === "batch") message.events.forEach(receive);
      else if (type === "hello") {
        connection.hello = message;
        send('{"type":"init","client":"client.js","batch":true}');
        tries = 0;
        good = Date.now();
        report("open", message);
        flush();
      } else if (type === "goaway") leave(connection) && waiting.size && !retry && connect();
      else if (type === "error") {
        const error = fault(message.code, message.message, message);
        if (message.fatal) end(error);
        else if (id || !stream?.position.stream) stream?.refuse(error);
      } else if (EVENTS.includes(type)) stream?.receive(message);
    }

    /** The server says something every heartbeat_s: much longer silence is death. */
    function watch(ms = 2500 * (connection.hello?.limits.heartbeat_s ?? 4)) {
      clearTimeout(timer);
      due = Date.now() + ms;
      timer = setTimeout(end, ms, fault("connection_lost", "silence"), true);
    }

    /** Whoever slept may have lost it without knowing. */
    function probe() {
      send('{"type":"ping"}');
      watch(due < Date.now() ? 0 : 4000);
    }

    /** A socket that is closed without a code leaves its streams running. */
    function end(error, again, code) {
      clearTimeout(timer);
      socket.onmessage = socket.onclose = null;
      socket.close(code);
      connections.delete(connection);
      const orphans = [...streams.values(), ...(leave(connection) ? waiting : [])];
      for (const stream of orphans) again && Date.now() < good + GIVE_UP_MS ? waiting.add(stream) : stream.end(error);
      if (!current && waiting.size) retry ??= setTimeout(connect, Math.random() * Math.min(8000, 250 * 2 ** tries++));
      current ? flush() : report(retry ? "waiting" : "idle");
    }

    report("connecting");
    connections.add(connection);
    socket.onclose = ({ code, reason }) => end(fault("connection_lost", `${code} ${reason}`), COME_BACK.includes(code));
    socket.onmessage = ({ data }) => {
      watch();
      receive(JSON.parse(data));
    };
    watch();
  }

  /** Those that wait go out, as many at once as the server takes. */
  function flush() {
    for (const stream of waiting) {
      if (!current?.hello || current.taken.size >= current.hello.limits.max_streams) return;
      waiting.delete(stream);
      stream.open(current);
    }
  }

  function leave(connection) {
    if (connection !== current) return false;
    current = undefined;
    return true;
  }

  function show(stream) {
    waiting.add(stream);
    good = Date.now();
    if (!current && !retry) connect();
    flush();
  }

  function wake() {
    if (globalThis.document?.hidden) return;
    retry ? connect() : current?.probe();
  }

  for (const type of WAKING) globalThis.addEventListener?.(type, wake);
  return {
    show,
    forget(stream) {
      waiting.delete(stream);
      for (const { streams } of connections) streams.delete(stream.id);
    },
    close() {
      for (const type of WAKING) globalThis.removeEventListener?.(type, wake);
      const error = fault("connection_lost", "closed here");
      for (const connection of connections) connection.end(error, false, 1000);
      for (const stream of waiting) stream.end(error);
      retry = clearTimeout(retry);
    },
  };
}

const fault = (code, message, details) => new StreamEngineError(code, message, details);
const randomKey = () => crypto.getRandomValues(new Uint32Array(4)).join("-");

const SAFE = { "+": "-", "/": "_", "=": "" };
const base64url = (text) =>
  btoa(String.fromCharCode(...new TextEncoder().encode(text))).replace(/[+/=]/g, (character) => SAFE[character]);

const TABLE = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let bit = 0; bit < 8; bit++) n = n & 1 ? (n >>> 1) ^ 0xedb88320 : n >>> 1;
  return n;
});

function crc32(bytes, crc) {
  crc = ~crc;
  for (const byte of bytes) crc = TABLE[(crc ^ byte) & 255] ^ (crc >>> 8);
  return ~crc >>> 0;
}
