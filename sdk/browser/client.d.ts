/** `code` is the server's, or `connection_lost`, `stream_lost`, `protocol_error`, `message_too_large`. */
export class StreamEngineError extends Error {
    /** @param {string} code @param {string} message @param {Refusal} [details] */
    constructor(code: string, message: string, details?: Refusal);
    /** What was read of the stream. @type {Omit<Result, "done">|undefined} */ partial: Omit<Result, "done"> | undefined;
    code: string;
    param: string | undefined;
    retryable: boolean;
    details: Refusal;
}
/** Fires `state` when its state has changed. */
export class StreamEngine extends EventTarget {
    /**
     * @param {string|URL} [url] the page's own by default
     * @param {{token?: string, continuations?: number}} [options] an API key, and how often another server may continue
     *   an answer whose server is gone: 3 times unless given, 0 ends it in `stream_lost`
     */
    constructor(url?: string | URL, { token, continuations }?: {
        token?: string;
        continuations?: number;
    });
    /** @type {State} */ state: State;
    /** @type {Hello|undefined} */ hello: Hello | undefined;
    /**
     * The last event is `Done`; a failure is thrown.
     * @param {Request} request @param {Options} [options] @returns {TokenStream}
     */
    stream(request: Request, options?: Options): TokenStream;
    /**
     * Go on with a stream that another page or client began.
     * @param {Position} position @param {Options} [options] @returns {TokenStream}
     */
    resume(position: Position, options?: Options): TokenStream;
    /** Cancels what is open. */
    close(): void;
    #private;
}
import type { Result } from "./types.d.ts";
import type { Refusal } from "./types.d.ts";
import type { State } from "./types.d.ts";
import type { Hello } from "./types.d.ts";
import type { Request } from "./types.d.ts";
import type { Options } from "./types.d.ts";
import type { TokenStream } from "./types.d.ts";
import type { Position } from "./types.d.ts";
