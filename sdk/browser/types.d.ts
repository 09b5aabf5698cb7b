/** What `client.js` takes and gives: the words of the protocol streamengine.v1, in TypeScript. */

export interface Message {
  role: "system" | "developer" | "user" | "assistant" | "tool";
  content?: unknown;
  [more: string]: unknown;
}

/** How a stream is shown to one reader; never changes what is generated. */
export interface Delivery {
  /** Tokens that come within so many milliseconds leave together. 25 unless given. */
  coalesce_ms?: number;
  coalesce_tokens?: number;
  /** Tokens that may be under way before the reader has taken them. 256 unless given; 0 is no limit. */
  window?: number;
  on_disconnect?: "linger" | "cancel";
  /** How long the server goes on without a reader. */
  linger_s?: number;
  token_ids?: boolean;
  /** With a JSON `response_format`: an event for each value as soon as it is complete. */
  values?: boolean;
  pad?: number;
}

/** Exactly one of `messages`, `prompt` (plain text, no template) and `token_ids`. */
export interface Request {
  messages?: Message[];
  prompt?: string;
  token_ids?: number[];
  model?: string;
  /** Idempotency key, 8 to 128 characters: a repeat shows the stream that the first one began. Random unless given. */
  key?: string;
  max_tokens?: number;
  min_tokens?: number;
  temperature?: number;
  top_p?: number;
  top_k?: number;
  min_p?: number;
  typical_p?: number;
  frequency_penalty?: number;
  presence_penalty?: number;
  repetition_penalty?: number;
  seed?: number;
  stop?: string[];
  stop_token_ids?: number[];
  include_stop_str_in_output?: boolean;
  ignore_eos?: boolean;
  bad_words?: (string | number[])[];
  allowed_token_ids?: number[];
  logprobs?: boolean;
  top_logprobs?: number;
  logit_bias?: Record<string, number>;
  response_format?: { type: string; [more: string]: unknown };
  tools?: unknown[];
  tool_choice?: unknown;
  chat_template_kwargs?: Record<string, unknown>;
  priority?: number;
  timeouts?: { queue_s?: number; total_s?: number };
  metadata?: Record<string, string>;
  delivery?: Delivery;
}

/** Where a stream is to go on: `{stream, seq: 0}` shows all of it. Plain JSON, to be kept across a reload. */
export interface Position {
  stream: string;
  /** The last token that was taken. */
  seq: number;
  /** Length and CRC-32 of the text so far, in UTF-8. Without them the end cannot be held against the checksum. */
  bytes?: number;
  crc32?: number;
}

export interface Logprob {
  token: number;
  logprob: number;
  /** What the token writes, or `b64` where that is a part of a character. */
  text?: string;
  b64?: string;
  top?: Logprob[];
}

export interface Accepted {
  type: "accepted";
  stream: string;
  after: number;
  model?: string;
  created?: number;
  replay?: boolean;
}

export interface Progress {
  type: "progress";
  phase: "queued" | "prefill" | "decode" | "tool";
  queue_position?: number;
  prompt_tokens?: number;
  prefilled_tokens?: number;
  cached_tokens?: number;
}

/** `n` tokens that end at `seq`. */
export interface Delta {
  type: "delta";
  seq: number;
  n: number;
  text: string;
  channel?: "text" | "reasoning" | "tool";
  call?: { index: number; id?: string; name?: string };
  tokens?: number[];
  logprobs?: Logprob[];
}

/** The value at `path`, a JSON Pointer, is complete. */
export interface Value {
  type: "value";
  seq: number;
  path: string;
  value: unknown;
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  total_tokens: number;
  cached_tokens?: number;
  reasoning_tokens?: number;
}

/** Milliseconds on the server's clock. */
export interface Timing {
  total_ms?: number;
  queue_ms?: number;
  prefill_ms?: number;
  ttft_ms?: number;
  decode_ms?: number;
  tokens_per_s?: number;
  itl_ms?: { p50: number; p99: number; max: number };
  /** Tokens of the answer that another server had made. */
  continued_tokens?: number;
}

/** The last event of a stream that did not fail. */
export interface Done {
  type: "done";
  seq: number;
  stream?: string;
  finish_reason: "stop" | "length" | "tool_calls" | "content_filter" | "cancelled";
  cause?: "client" | "disconnect" | "timeout" | "shutdown" | "operator";
  stop_sequence?: string;
  usage: Usage;
  timing?: Timing;
  check: { bytes: number; crc32: number };
  delivery?: { frames: number; max_lag: number; attaches: number };
}

export type Event = Accepted | Progress | Delta | Value | Done;

export interface Hello {
  protocol: string;
  epoch: string;
  auth: "ok" | "required" | "none";
  models?: string[];
  features?: string[];
  server?: { name: string; version: string };
  limits: { max_message_bytes: number; max_streams: number; heartbeat_s: number; [more: string]: number };
}

/** All that was read of a stream. */
export interface Result {
  text: string;
  reasoning: string;
  done: Done;
  /** How often another server went on with the answer. */
  continued: number;
}

export interface Options {
  /** Its abort cancels the stream and is thrown. */
  signal?: AbortSignal;
  delivery?: Delivery;
}

/** What the server said of a failure. */
export interface Refusal {
  status?: number;
  /** The field of the request that is meant. */
  param?: string;
  retryable?: boolean;
  retry_after_ms?: number;
  usage?: Usage;
  [more: string]: unknown;
}

/** One answer, event by event; leaving the loop cancels it on the server. */
export interface TokenStream extends AsyncIterableIterator<Event> {
  /** Up to where this reader has taken it; `stream` is "" until the server, or the next one, has accepted. Live. */
  readonly position: Readonly<Position>;
  /** Ask the server to stop; `Done` with `finish_reason: "cancelled"` still comes. */
  cancel(): void;
  /** Take all that is left and give the whole. */
  result(): Promise<Result>;
  /** The same, the text only. */
  text(): Promise<string>;
}

/** `idle` is without a socket, `waiting` is between two attempts to get one back. */
export type State = "idle" | "connecting" | "open" | "waiting";
