export class StreamEngineTransport {
    /**
     * @param {StreamEngine} client
     * @param {Partial<Request>} [request] what every request has beside its messages
     * @param {Pick<Storage, "getItem"|"setItem"|"removeItem">} [storage] where running streams are remembered
     */
    constructor(client: StreamEngine, request?: Partial<Request>, storage?: Pick<Storage, "getItem" | "setItem" | "removeItem">);
    /** Shown again from its beginning, a resumed answer stays one part, and its end is held against the checksum. */
    resumeStreamIsReplay: boolean;
    sendMessages(options: {
        trigger: "submit-message" | "regenerate-message";
        chatId: string;
        messageId: string | undefined;
        messages: UIMessage<any, import("ai").UIDataTypes, import("ai").UITools>[];
        abortSignal: AbortSignal | undefined;
    } & import("ai").ChatRequestOptions): Promise<ReadableStream<UIMessageChunk>>;
    reconnectToStream(options: {
        chatId: string;
        abortSignal?: AbortSignal;
    } & import("ai").ChatRequestOptions): Promise<ReadableStream<UIMessageChunk> | null>;
    /** Cancels what is open. */
    close(): void;
    #private;
}
import type { UIMessage } from "ai";
import type { UIMessageChunk } from "ai";
import type { StreamEngine } from "./client.js";
import type { Request } from "./types.d.ts";
