/**
 * A `ChatTransport` for the Vercel AI SDK: `useChat` over token streams that survive a lost connection and a reload.
 *
 *     const transport = new StreamEngineTransport(new StreamEngine("https://…"), { max_tokens: 500 });
 *     const chat = useChat({ transport, resume: true });
 *
 * @import {ChatTransport, FinishReason, UIMessage, UIMessageChunk} from "ai"
 * @import {StreamEngine} from "./client.js"
 * @import {Delta, Done, Event, Message, Request, TokenStream} from "./types.d.ts"
 */

/** @type {Record<string, FinishReason>} */
const REASONS = { stop: "stop", length: "length", tool_calls: "tool-calls", content_filter: "content-filter" };
const GONE = ["stream_not_found", "stream_lost", "resume_gap"];

export class StreamEngineTransport {
  /** Shown again from its beginning, a resumed answer stays one part, and its end is held against the checksum. */
  resumeStreamIsReplay = true;
  #client;
  #request;
  #storage;

  /**
   * @param {StreamEngine} client
   * @param {Partial<Request>} [request] what every request has beside its messages
   * @param {Pick<Storage, "getItem"|"setItem"|"removeItem">} [storage] where running streams are remembered
   */
  constructor(client, request = {}, storage = globalThis.sessionStorage) {
    this.#client = client;
    this.#request = request;
    this.#storage = storage;
  }

  /** @type {ChatTransport<UIMessage>["sendMessages"]} */
  async sendMessages({ chatId, messages, abortSignal, body, headers }) {
    if (headers && [...new Headers(headers)].length) throw new TypeError("a WebSocket has no headers of its own");
    const request = { ...this.#request, ...body, messages: messages.flatMap(toMessages) };
    return this.#chunks(chatId, this.#client.stream(request, { signal: abortSignal }));
  }

  /** @type {ChatTransport<UIMessage>["reconnectToStream"]} */
  async reconnectToStream({ chatId, abortSignal }) {
    const known = this.#storage?.getItem(slot(chatId));
    if (!known) return null;
    const stream = this.#client.resume({ stream: known, seq: 0 }, { signal: abortSignal });
    try {
      const first = await stream.next();
      return this.#chunks(chatId, stream, first.done ? [] : [first.value]);
    } catch (error) {
      if (!GONE.includes(/** @type {any} */ (error).code)) throw error;
      this.#storage?.removeItem(slot(chatId));
      return null;
    }
  }

  /** Cancels what is open. */
  close() {
    this.#client.close();
  }

  /**
   * @param {string} chatId
   * @param {TokenStream} stream
   * @param {Event[]} [begun] what was taken of it
   * @returns {ReadableStream<UIMessageChunk>}
   */
  #chunks(chatId, stream, begun = []) {
    const parts = new Parts();
    const end = () => this.#storage?.removeItem(slot(chatId));
    /** @param {Event} event */
    const chunks = (event) => {
      if (event.type === "accepted") this.#storage?.setItem(slot(chatId), event.stream);
      if (event.type === "done") end();
      return parts.of(event);
    };
    return new ReadableStream({
      async pull(controller) {
        try {
          // A pull that gives nothing is not repeated, so this goes on until there is something.
          for (let given = 0; !given; ) {
            const next = begun.length ? { done: false, value: begun.shift() } : await stream.next();
            if (next.done) return controller.close();
            for (const chunk of chunks(/** @type {Event} */ (next.value))) {
              controller.enqueue(chunk);
              given++;
            }
          }
        } catch (error) {
          end();
          // Aborting is not a failure of the answer: it ends as a fetch would.
          if (/** @type {any} */ (error).name !== "StreamEngineError") return controller.error(error);
          controller.enqueue({ type: "error", errorText: /** @type {Error} */ (error).message });
          controller.close();
        }
      },
      async cancel() {
        end();
        await stream.return?.();
      },
    });
  }
}

/** The parts of one answer: each begins and ends, and no two are open at once. */
class Parts {
  #begun = false;
  #count = 0;
  /** @type {{kind: string, id: string, name: string, text: string}|undefined} */
  #open;

  /** @param {Event} event @returns {UIMessageChunk[]} */
  of(event) {
    if (event.type === "accepted" && !event.after && !this.#begun) {
      this.#begun = true; // another server may begin it again
      return [{ type: "start", messageId: event.stream }, { type: "start-step" }];
    }
    if (event.type === "delta" && event.text) return this.#delta(event);
    return event.type === "done" ? this.#done(event) : [];
  }

  /** @param {Delta} delta @returns {UIMessageChunk[]} */
  #delta({ text, channel = "text", call }) {
    const kind = call ? `tool ${call.index}` : channel;
    /** @type {UIMessageChunk[]} */
    const chunks = [];
    if (this.#open?.kind !== kind) {
      chunks.push(...this.#close());
      const id = call?.id ?? `${kind.replace(" ", "-")}-${this.#count++}`;
      this.#open = { kind, id, name: call?.name ?? "", text: "" };
      if (call) chunks.push({ type: "tool-input-start", toolCallId: id, toolName: this.#open.name });
      else chunks.push({ type: channel === "reasoning" ? "reasoning-start" : "text-start", id });
    }
    const { id } = this.#open;
    this.#open.text += text;
    if (call) chunks.push({ type: "tool-input-delta", toolCallId: id, inputTextDelta: text });
    else chunks.push({ type: channel === "reasoning" ? "reasoning-delta" : "text-delta", id, delta: text });
    return chunks;
  }

  /** @returns {UIMessageChunk[]} */
  #close() {
    if (!this.#open) return [];
    const { kind, id, name, text } = this.#open;
    this.#open = undefined;
    if (kind === "text") return [{ type: "text-end", id }];
    if (kind === "reasoning") return [{ type: "reasoning-end", id }];
    try {
      return [{ type: "tool-input-available", toolCallId: id, toolName: name, input: JSON.parse(text) }];
    } catch (error) {
      const errorText = `the arguments are not JSON: ${/** @type {Error} */ (error).message}`;
      return [{ type: "tool-input-error", toolCallId: id, toolName: name, input: text, errorText }];
    }
  }

  /** @param {Done} done @returns {UIMessageChunk[]} */
  #done({ finish_reason: reason, usage, timing }) {
    const finishReason = REASONS[reason] ?? "other";
    return [...this.#close(), { type: "finish-step" }, { type: "finish", finishReason, messageMetadata: { usage, timing } }];
  }
}

/** @param {string} chatId */
const slot = (chatId) => `streamengine.${chatId}`;

/**
 * In the form of chat completions; what tools gave follows the message that called them.
 * @param {UIMessage} message
 * @returns {Message[]}
 */
function toMessages({ role, parts }) {
  const text = parts.map((part) => (part.type === "text" ? part.text : "")).join("");
  const calls = /** @type {any[]} */ (parts.filter(({ type }) => type.startsWith("tool-") || type === "dynamic-tool"));
  const unknown = parts.find(({ type }) => type === "file" || type.startsWith("data-"));
  if (unknown) throw new TypeError(`a part of type ${unknown.type} cannot be sent to a text model`);
  if (!calls.length) return [{ role, content: text }];
  const named = calls.map((part) => ({ ...part, name: part.toolName ?? part.type.slice("tool-".length) }));
  const tool_calls = named.map(({ toolCallId: id, name, input }) => ({
    id,
    type: "function",
    function: { name, arguments: JSON.stringify(input) },
  }));
  const results = named.filter(({ state }) => state.startsWith("output-"));
  return [
    { role, content: text, tool_calls },
    ...results.map(({ toolCallId, output, errorText }) => ({
      role: /** @type {const} */ ("tool"),
      tool_call_id: toolCallId,
      content: errorText ?? (typeof output === "string" ? output : JSON.stringify(output)),
    })),
  ];
}
