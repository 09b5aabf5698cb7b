// What the kernel is given, and how it is cut into works for the threads. Knows nothing of numbers.

#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace {

using simd::kLanes;
using simd::kTileRows;

constexpr int kBlock = 64;         // keys packed at once: they stay in the first-level cache while they are used
constexpr int kSplit = 512;        // keys whose partial result another thread may compute
constexpr int kQueryVectors = 96;  // query tokens x query heads of an item, which share one packing of keys

// A block of one row's query tokens, for one KV head with all its query heads.
struct Item {
  int32_t row, head;      // KV head
  int32_t token, tokens;  // the block's first query token in the step, and how many
  int32_t first, keys;    // keys first .. keys - 1 are seen: the first one by its first token, the last by its last
  int32_t slot;           // place of its first split among all splits

  // Splits begin at absolute multiples of kSplit.
  int64_t first_split() const { return first / kSplit; }
  int64_t splits() const { return (keys + kSplit - 1) / kSplit - first_split(); }
};

// What a thread does at once: consecutive splits of an item.
struct Work {
  const Item* item;
  int64_t split, splits;

  int64_t begin() const { return std::max<int64_t>(item->first / kBlock * kBlock, split * kSplit); }
  int64_t end(int64_t after) const { return std::min<int64_t>(item->keys, (split + after) * kSplit); }
};

// What is constant over a step, with the caller's tables; strides count elements. Mirrored in Python.
struct Problem {
  int64_t dtype;  // 0 float32, 1 bfloat16, 2 float16
  int64_t heads, kv_heads, key_dim, value_dim, page_size;
  int64_t key_page, key_slot, key_head, value_page, value_slot, value_head;  // strides of the cache
  double scale, soft_cap;                                                    // soft_cap 0: none
  int64_t window;  // keys that a token sees, itself included; 0: all
  int64_t rows, threads;
  const int32_t *qo_indptr, *kv_indptr, *kv_indices, *kv_last_page_len;

  int64_t group() const { return heads / kv_heads; }
  int64_t block_tokens() const { return std::max<int64_t>(1, kQueryVectors / group()); }
  int64_t padded_key() const { return (key_dim + kLanes - 1) / kLanes * kLanes; }
  int64_t padded_value() const { return (value_dim + kLanes - 1) / kLanes * kLanes; }
  int64_t row_keys(int64_t r) const {
    return int64_t(kv_indptr[r + 1] - kv_indptr[r] - 1) * page_size + kv_last_page_len[r];
  }
  int64_t position(int64_t r, int64_t token) const { return row_keys(r) - (qo_indptr[r + 1] - token); }

  // The first position that the token at `position` sees.
  int64_t first_seen(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }

  // Calls visit(Item) for each of a row's items; places are not given yet.
  template <class Visit>
  void each_item(int64_t r, Visit visit) const {
    for (int64_t token = qo_indptr[r]; token < qo_indptr[r + 1]; token += block_tokens()) {
      const int64_t tokens = std::min(block_tokens(), qo_indptr[r + 1] - token);
      const int64_t first = first_seen(position(r, token)), keys = position(r, token + tokens - 1) + 1;
      for (int64_t head = 0; head < kv_heads; head++)
        visit(Item{int32_t(r), int32_t(head), int32_t(token), int32_t(tokens), int32_t(first), int32_t(keys), 0});
    }
  }
};

// One layer's tensors. Mirrored in Python.
struct Operands {
  const void *q, *k, *v, *sinks;  // sinks [H] or null
  void *out, *key_cache, *value_cache;
  int64_t tokens;  // of q and out: those after the last row's are padding
  int64_t q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head;
};

inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// The running softmax of an item's query vectors.
struct State {
  float* max;  // [vectors] of the scores, before the factor that makes them exponents of 2
  float* sum;  // [vectors, kLanes] of the weights, to be added up
  float* out;  // [vectors, padded value] not yet divided by the sum

  State(char* memory, int64_t vectors) {
    max = reinterpret_cast<float*>(memory);
    sum = max + aligned(vectors * sizeof(float)) / sizeof(float);
    out = sum + vectors * kLanes;
  }
  static int64_t bytes(int64_t vectors, int64_t columns) {
    return aligned(vectors * sizeof(float)) + aligned(vectors * (kLanes + columns) * sizeof(float));
  }
};

// Where everything lies in the caller's workspace, and what there is to do.
struct Layout {
  int64_t items = 0, slots = 0;
  int64_t vectors = 0;  // of the largest item
  bool fan_out;  // a work is one split, because items are too few or too unlike for the threads
  int64_t grab;  // works that a thread takes at once: all heads of a query block, which lie beside each other
  int64_t state, scratch;  // bytes of one
  int64_t states, item_list, total;

  explicit Layout(const Problem& p) {
    int64_t keys = 0, longest = 0;
    for (int64_t r = 0; r < p.rows; r++)
      p.each_item(r, [&](const Item& item) {
        items++, slots += item.splits(), keys += item.keys - item.first;
        vectors = std::max<int64_t>(vectors, item.tokens * p.group());
        longest = std::max<int64_t>(longest, item.keys - item.first);
      });
    fan_out = p.threads > 1 && slots > items && longest * p.threads * 4 > keys;
    grab = fan_out || items < 8 * p.threads * p.kv_heads ? 1 : p.kv_heads;
    const int64_t key = p.padded_key(), value = p.padded_value();
    state = State::bytes(vectors, value);
    scratch = aligned(sizeof(uint32_t) * (vectors * key + kBlock * (key + value + kTileRows))) + 2 * state;
    states = p.threads * scratch;
    item_list = states + (fan_out ? slots * state : 0);
    total = item_list + items * int64_t(sizeof(Item));
  }

  State state_of(int64_t slot, char* workspace) const { return {workspace + states + slot * state, vectors}; }
  int64_t works() const { return fan_out ? slots : items; }

  Work work(const Item* list, int64_t number) const {
    if (!fan_out) return {list + number, list[number].first_split(), list[number].splits()};
    const auto before = [](int64_t slot, const Item& item) { return slot < item.slot; };
    const Item* item = std::upper_bound(list, list + items, number, before) - 1;
    return {item, item->first_split() + number - item->slot, 1};
  }
};

}  // namespace
