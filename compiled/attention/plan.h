// What the kernel is given, and how it is cut into items for the threads. Knows nothing of numbers.

#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace {

using simd::kLanes;

constexpr int kBlock = 64;         // keys packed at once: they stay in the first-level cache while they are used
constexpr int kSplit = 1024;       // keys whose partial result another thread may compute
constexpr int kQueryVectors = 48;  // query tokens x query heads of a block, which share one packing of keys

// A unit of work: a block of one row's query tokens, for one KV head with all its query heads.
struct Item {
  int32_t row, head;      // KV head
  int32_t token, tokens;  // the block's first query token in the step, and how many
  int32_t first, keys;    // keys first .. keys - 1 are seen: the first one by its first token, the last by its last
  int32_t slot;           // place of its first split among all splits
};

// What is constant over a step, with the caller's tables; strides count elements. Mirrored in Python.
struct Problem {
  int64_t dtype;  // 0 float32, 1 bfloat16, 2 float16
  int64_t heads, kv_heads, head_dim, page_size;
  int64_t page_stride, slot_stride, head_stride;
  double scale;
  int64_t window;  // keys that a token sees, itself included; 0: all
  int64_t rows, threads;
  const int32_t *qo_indptr, *kv_indptr, *kv_indices, *kv_last_page_len;

  int64_t group() const { return heads / kv_heads; }
  int64_t block_tokens() const { return std::max<int64_t>(1, kQueryVectors / group()); }
  int64_t block_vectors() const { return block_tokens() * group(); }
  int64_t padded_dim() const { return (head_dim + kLanes - 1) / kLanes * kLanes; }
  int64_t row_tokens(int64_t r) const { return qo_indptr[r + 1] - qo_indptr[r]; }
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
  const void *q, *k, *v;
  void *out, *k_cache, *v_cache;
  int64_t tokens;  // of q and out: those after the last row's are padding
  int64_t q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head;
};

// Splits begin at absolute multiples of kSplit.
inline int64_t first_split(const Item& item) { return item.first / kSplit; }
inline int64_t splits_of(const Item& item) { return (item.keys + kSplit - 1) / kSplit - first_split(item); }
inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// The running softmax of a block's query vectors.
struct State {
  float* max;  // [vectors] in units of log2
  float* sum;  // [vectors] of the weights
  float* out;  // [vectors, padded D] not yet divided by the sum

  State(char* memory, int64_t vectors) {
    max = reinterpret_cast<float*>(memory);
    sum = reinterpret_cast<float*>(memory + aligned(vectors * sizeof(float)));
    out = reinterpret_cast<float*>(memory + 2 * aligned(vectors * sizeof(float)));
  }
  static int64_t bytes(const Problem& p) {
    const int64_t vectors = p.block_vectors();
    return 2 * aligned(vectors * sizeof(float)) + aligned(vectors * p.padded_dim() * sizeof(float));
  }
};

// Where everything lies in the caller's workspace.
struct Layout {
  int64_t items = 0, slots = 0;
  bool fan_out;  // too few items for the threads: splits become work of their own
  int64_t scratch, states, item_list, total;

  explicit Layout(const Problem& p) {
    for (int64_t r = 0; r < p.rows; r++)
      p.each_item(r, [&](const Item& item) { items++, slots += splits_of(item); });
    fan_out = p.threads > 1 && items < 4 * p.threads && slots > items;
    const int64_t vectors = p.block_vectors(), d = p.padded_dim();
    scratch = aligned(sizeof(uint32_t) * (vectors * d + 2 * kBlock * d + vectors * kBlock)) +
              aligned(sizeof(float) * vectors) + 2 * State::bytes(p);
    states = p.threads * scratch;
    item_list = states + (fan_out ? slots * State::bytes(p) : 0);
    total = item_list + items * int64_t(sizeof(Item));
  }
};

}  // namespace
