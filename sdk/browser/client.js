/**
 * Token streams from a streamengine server: many on one socket, and they outlive it. No build step.
 *
 *     const client = new StreamEngine();
 *     for await (const event of client.stream({ prompt: "Once upon a time" }))
 *       if (event.type === "delta") document.body.append(event.text);
 *
 * Leaving the loop, `stream.cancel()` or an AbortSignal stops the work on the server too.
 *
 * @import {Delivery, Hello, Options, Position, Refusal, Request, State, TokenStream} from "./types.d.ts"
 */

const PROTOCOL = "streamengine.v1";
const EVENTS = new Set(["accepted", "progress", "delta", "value", "done"]);
/** After these close codes another socket may fare better. */
const COME_BACK = new Set([1001, 1005, 1006, 1011, 1012, 1013]);

/** `code` is the server's, or `connection_lost`, `stream_lost`, `protocol_error`, `message_too_large`. */
export class StreamEngineError extends Error {
  name = "StreamEngineError";

  /** @param {string} code @param {string} message @param {Refusal} [details] */
  constructor(code, message, details = {}) {
    super(message);
    this.code = code;
    this.param = details.param;
    this.retryable = details.retryable ?? false;
    this.details = details;
  }
}

/** Fires `state` when its state has changed. */
export class StreamEngine extends EventTarget {
  /** @type {State} */ state = "idle";
  /** What the server said of itself. @type {Hello|undefined} */ hello;
  /** @internal */ _protocols = [PROTOCOL];
  #count = 0;
  #current;
  #lost = new Set();
  #tries = 0;
  #since;
  #retry;
  #wake = () => (document.hidden ? 0 : this.#retry ? this.#connect() : this.#current?.probe());

  /** @param {string|URL} [url] the page's own by default @param {{token?: string}} [options] an API key */
  constructor(url = globalThis.location?.origin, { token } = {}) {
    super();
    this._url = new URL(url);
    this._url.protocol = this._url.protocol.replace("http", "ws");
    if (this._url.pathname === "/") this._url.pathname = "/v1/stream";
    if (token) this._protocols.push(`streamengine.auth.${base64url(token)}`);
    for (const type of WAKE) globalThis.addEventListener?.(type, this.#wake);
  }

  /**
   * The last event is `Done`; a failure is thrown.
   * @param {Request} request @param {Options} [options] @returns {TokenStream}
   */
  stream(request, options) {
    const key = crypto.getRandomValues(new Uint32Array(4)).join("-");
    return this.#start({ key, ...request }, { ...options, delivery: request.delivery });
  }

  /**
   * Go on with a stream that another page or client began.
   * @param {Position} position @param {Options} [options] @returns {TokenStream}
   */
  resume(position, options) {
    return this.#start(undefined, options, position);
  }

  /** Cancels what is open. */
  close() {
    for (const type of WAKE) globalThis.removeEventListener?.(type, this.#wake);
    this.#fail(lost("closed here"));
    this.#current?.close(1000)
  }
}
