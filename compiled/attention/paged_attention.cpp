// Causal attention over a paged KV cache: flash-style, one pass over the keys with a running softmax.
//
// An item of work walks its keys in blocks of kBlock that begin at absolute multiples of kBlock, and in splits of
// kSplit keys that are merged in order. Both cuts depend on positions alone, so a token's result has the
// same bits whatever its batch mates, its query block, the number of threads and who ran the splits.
//
// Called through three plain C functions: the caller owns all memory and has checked all arguments.
// Legend: H query heads, K KV heads, D head size, S page size; strides count elements.

#include <algorithm>
#include <cmath>
#include <omp.h>

#include "plan.h"
#include "product.h"

namespace {

using namespace simd;

// Consecutive keys of a row: where each lies in a layer's view, in elements.
struct Block {
  int64_t first, keys;
  int64_t offsets[kBlock];
};

// One thread's work on one item: the packed operands and the walk over the keys.
template <class Format>
class Worker {
  using Element = typename Format::Element;
  static constexpr int kPack = Format::kPack;

 public:
  Worker(const Problem& problem, const Operands& operands, char* scratch)
      : p_(problem), o_(operands), vectors_(problem.block_vectors()), dim_(problem.padded_dim()) {
    queries_ = reinterpret_cast<uint32_t*>(scratch);
    keys_ = queries_ + vectors_ * dim_;
    values_ = keys_ + kBlock * dim_;
    scores_ = values_ + kBlock * dim_;
    rescale_ = reinterpret_cast<float*>(scratch + aligned(sizeof(uint32_t) * (vectors_ * dim_ + 2 * kBlock * dim_ +
                                                                              vectors_ * kBlock)));
    char* states = reinterpret_cast<char*>(rescale_) + aligned(sizeof(float) * vectors_);
    whole_ = State(states, vectors_);
    part_ = State(states + State::bytes(p_), vectors_);
    factor_ = float(p_.scale * M_LOG2E);
  }

  // All splits of an item, one after the other, into the output.
  void attend(const Item& item) {
    pack_queries(item);
    walk(item, 0, whole_);
    for (int64_t s = 1; s < splits_of(item); s++) {
      walk(item, s, part_);
      merge(item, whole_, part_);
    }
    write(item, whole_);
  }

  // One split of an item, counted from its first, into a state of its own.
  void attend_split(const Item& item, int64_t split, State state) {
    pack_queries(item);
    walk(item, split, state);
  }

  void merge_splits(const Item& item, char* states) {
    const State whole(states + item.slot * State::bytes(p_), vectors_);
    for (int64_t s = 1; s < splits_of(item); s++)
      merge(item, whole, State(states + (item.slot + s) * State::bytes(p_), vectors_));
    write(item, whole);
  }

 private:
  // Query vectors are ordered by token, then query head within the group.
  int64_t count(const Item& item) const { return item.tokens * p_.group(); }

  int64_t offset(const Item& item, int64_t vector, int64_t token_stride, int64_t head_stride) const {
    const int64_t token = item.token + vector / p_.group(), head = item.head * p_.group() + vector % p_.group();
    return token * token_stride + head * head_stride;
  }

  // Loads where only `elements` are there to be read: the rest are zero.
  static Words key_words(const Element* from, int64_t elements) {
    if (elements >= kLanes * kPack) return Format::key_words(from);
    Element edge[kLanes * kPack] = {};
    std::memcpy(edge, from, elements * sizeof(Element));
    return Format::key_words(edge);
  }

  static Words value_edge(const Element* even, const Element* odd, int64_t elements) {
    Element edges[2][kLanes] = {};
    const int64_t bytes = std::min<int64_t>(elements, kLanes) * sizeof(Element);
    std::memcpy(edges[0], even, bytes);
    if (odd) std::memcpy(edges[1], odd, bytes);
    return Format::value_words(edges[0], edges[1]);
  }

  void pack_queries(const Item& item) {
    for (int64_t m = 0; m < count(item); m++) {
      const Element* from = static_cast<const Element*>(o_.q) + offset(item, m, o_.q_token, o_.q_head);
      for (int64_t d = 0; d < p_.head_dim; d += kLanes * kPack)
        store(queries_ + m * dim_ + d / kPack, key_words(from + d, p_.head_dim - d));
    }
  }

  // The block of keys at `first`, empty from `end` on. What lies before the item's first key is never read, for its
  // page may be somebody else's by now: that key stands in, and is masked.
  void find(const Item& item, int64_t first, int64_t end, Block& block) const {
    const int32_t* pages = p_.kv_indices + p_.kv_indptr[item.row];
    const int64_t begin = std::max<int64_t>(first, item.first), unseen = begin - first;
    int64_t page = begin / p_.page_size, slot = begin % p_.page_size;
    block.first = first;
    block.keys = std::clamp<int64_t>(end - first, 0, kBlock);
    for (int64_t j = 0; j < block.keys; j++) {
      block.offsets[j] = pages[page] * p_.page_stride + slot * p_.slot_stride + item.head * p_.head_stride;
      if (j >= unseen && ++slot == p_.page_size) slot = 0, page++;
    }
  }

  // Keys as [words, kBlock]: whole vectors of keys, zeros after the last. Members go to locals first, because
  // the compiler must assume that a store changes them.
  void pack_keys(const Block& block, const Block& next) {
    const Element* keys = static_cast<const Element*>(o_.k_cache);
    const int64_t dim = p_.head_dim;
    for (int64_t j = 0; j < block.keys; j += kLanes) {
      const int64_t* offsets = block.offsets + j;
      const int64_t present = std::min<int64_t>(kLanes, block.keys - j);
      prefetch(keys, next, j, kLanes);
      for (int64_t d = 0; d < dim; d += kLanes * kPack) {
        Words square[kLanes] = {};
        if (present == kLanes && dim - d >= kLanes * kPack) {
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; i++) square[i] = Format::key_words(keys + offsets[i] + d);
        } else {
          for (int i = 0; i < present; i++) square[i] = key_words(keys + offsets[i] + d, dim - d);
        }
        transpose(square);
        uint32_t* to = keys_ + d / kPack * kBlock + j;
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) store(to + i * kBlock, square[i]);
      }
    }
  }

  // Values as [keys / kPack rounded up, padded D].
  void pack_values(const Block& block, const Block& next) {
    const Element* values = static_cast<const Element*>(o_.v_cache);
    const int64_t dim = p_.head_dim, whole = dim / kLanes * kLanes;
    uint32_t* to = values_;
    for (int64_t j = 0; j < block.keys; j += kPack, to += dim_) {
      prefetch(values, next, j, kPack);
      const Element* even = values + block.offsets[j];
      if (j + kPack > block.keys) {
        for (int64_t d = 0; d < dim; d += kLanes) store(to + d, value_edge(even + d, nullptr, dim - d));
        break;
      }
      const Element* odd = values + block.offsets[j + kPack - 1];
      for (int64_t d = 0; d < whole; d += kLanes) store(to + d, Format::value_words(even + d, odd + d));
      if (whole < dim) store(to + whole, value_edge(even + whole, odd + whole, dim - whole));
    }
  }

  // The block after this one, on its way from memory while this one is worked on. Only to the second-level cache:
  // prefetches into the first hold back this block's own loads (measured: half the speed).
  void prefetch(const Element* cache, const Block& next, int64_t from, int64_t n) const {
    const int64_t bytes = p_.head_dim * int64_t(sizeof(Element));
    for (int64_t j = from; j < std::min(from + n, next.keys); j++) {
      const char* head = reinterpret_cast<const char*>(cache + next.offsets[j]);
      for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(head + byte, 0, 2);
    }
  }

  // One query vector's scores in a block become weights, in place; keys before the `unseen`-th and from the
  // `visible`-th on are masked. Returns the new maximum and sets the weights' sum.
  float weigh(uint32_t* scores, int64_t n, int64_t unseen, int64_t visible, float old_max, float* sum) {
    const int64_t whole = std::min(visible, n) / kLanes * kLanes;
    Floats values[kBlock / kLanes], top = splat(old_max);
    for (int64_t j = 0; j < n; j += kLanes) {
      Floats s = load<Floats>(scores + j) * factor_;
      if (j >= whole) s = keep_first(s, int(visible - j), -INFINITY);
      if (j < unseen) s = drop_first(s, int(unseen - j), -INFINITY);
      values[j / kLanes] = s;
      top = max(top, s);
    }
    const float new_max = reduce_max(top);
    const Floats base = splat(new_max == -INFINITY ? 0.0f : new_max);  // all masked: weights are 0, not NaN
    Floats total{};
    for (int64_t j = 0; j < n; j += kLanes) {
      const Floats weights = exp2(values[j / kLanes] - base);
      total += weights;
      Format::store_weights(scores + j / kPack, weights);
    }
    *sum = reduce_sum(total);
    return new_max;
  }

  // The softmax over one split's keys.
  void walk(const Item& item, int64_t split, State state) {
    const int64_t vectors = count(item);
    std::fill_n(state.max, vectors, -INFINITY);
    std::fill_n(state.sum, vectors, 0.0f);
    std::fill_n(state.out, vectors * dim_, 0.0f);
    split += first_split(item);
    const int64_t begin = std::max<int64_t>(item.first / kBlock * kBlock, split * kSplit);
    const int64_t end = std::min<int64_t>(item.keys, (split + 1) * kSplit);
    Block blocks[2];
    find(item, begin, end, blocks[0]);
    for (int current = 0; blocks[current].keys > 0; current ^= 1) {
      find(item, blocks[current].first + kBlock, end, blocks[current ^ 1]);
      absorb(item, blocks[current], blocks[current ^ 1], state);
    }
  }

  // One block of keys and values joins the running softmax.
  void absorb(const Item& item, const Block& block, const Block& next, State state) {
    const int64_t vectors = count(item), n = block.keys, position = p_.position(item.row, item.token);
    pack_keys(block, next);
    multiply<Format>(vectors, (n + kLanes - 1) / kLanes, queries_, dim_, keys_, kBlock, p_.head_dim / kPack,
                     reinterpret_cast<float*>(scores_), kBlock, nullptr);
    pack_values(block, next);
    for (int64_t m = 0; m < vectors; m++) {
      const int64_t last = position + m / p_.group(), unseen = p_.first_seen(last) - block.first;
      const int64_t visible = last + 1 - block.first;
      float sum;
      const float old_max = state.max[m], new_max = weigh(scores_ + m * kBlock, n, unseen, visible, old_max, &sum);
      rescale_[m] = new_max == -INFINITY ? 0.0f : simd::exp2(splat(old_max - new_max))[0];
      state.max[m] = new_max;
      state.sum[m] = state.sum[m] * rescale_[m] + sum;
    }
    multiply<Format>(vectors, dim_ / kLanes, scores_, kBlock, values_, dim_, (n + kPack - 1) / kPack, state.out, dim_,
                     rescale_);
  }

  void merge(const Item& item, State into, State from) const {
    for (int64_t m = 0; m < count(item); m++) {
      const float top = std::max(into.max[m], from.max[m]);
      const float a = simd::exp2(splat(into.max[m] - top))[0], b = simd::exp2(splat(from.max[m] - top))[0];
      for (int64_t d = 0; d < dim_; d++)
        into.out[m * dim_ + d] = into.out[m * dim_ + d] * a + from.out[m * dim_ + d] * b;
      into.sum[m] = into.sum[m] * a + from.sum[m] * b;
      into.max[m] = top;
    }
  }

  void write(const Item& item, State state) const {
    for (int64_t m = 0; m < count(item); m++) {
      Element* to = static_cast<Element*>(o_.out) + offset(item, m, o_.out_token, o_.out_head);
      for (int64_t d = 0; d < dim_; d += kLanes) {
        Element vector[kLanes];
        Format::store(vector, load<Floats>(state.out + m * dim_ + d) / state.sum[m]);
        std::memcpy(to + d, vector, std::min<int64_t>(kLanes, p_.head_dim - d) * sizeof(Element));
      }
    }
  }

  const Problem& p_;
  const Operands& o_;
  const int64_t vectors_, dim_;
  uint32_t *queries_, *keys_, *values_, *scores_;
  float *rescale_, factor_;
  State whole_{nullptr, 0}, part_{nullptr, 0};
};

// The step's own keys and values go to their slots: a row's tokens are the last positions of its keys.
template <class Format>
void append(const Problem& p, const Operands& o, int64_t row, int64_t token) {
  using Element = typename Format::Element;
  const int64_t position = p.position(row, token);
  const int64_t page = p.kv_indices[p.kv_indptr[row] + position / p.page_size];
  const int64_t offset = page * p.page_stride + position % p.page_size * p.slot_stride;
  for (int64_t h = 0; h < p.kv_heads; h++) {
    std::memcpy(static_cast<Element*>(o.k_cache) + offset + h * p.head_stride,
                static_cast<const Element*>(o.k) + token * o.k_token + h * o.k_head, p.head_dim * sizeof(Element));
    std::memcpy(static_cast<Element*>(o.v_cache) + offset + h * p.head_stride,
                static_cast<const Element*>(o.v) + token * o.v_token + h * o.v_head, p.head_dim * sizeof(Element));
  }
}

template <class Format>
void clear(const Problem& p, const Operands& o, int64_t token) {
  using Element = typename Format::Element;
  for (int64_t h = 0; h < p.heads; h++)
    std::fill_n(static_cast<Element*>(o.out) + token * o.out_token + h * o.out_head, p.head_dim, Element(0));
}

template <class Format>
void run(const Problem& p, const Operands& o, char* workspace) {
  const Layout layout(p);
  const Item* items = reinterpret_cast<const Item*>(workspace + layout.item_list);
  char* states = workspace + layout.states;
  const int64_t real = p.qo_indptr[p.rows];
#pragma omp parallel num_threads(int(p.threads))
  {
#pragma omp for schedule(dynamic, 16) nowait
    for (int64_t token = real; token < o.tokens; token++) clear<Format>(p, o, token);
#pragma omp for schedule(static)
    for (int64_t token = 0; token < real; token++) {
      const int32_t* next = std::upper_bound(p.qo_indptr, p.qo_indptr + p.rows + 1, int32_t(token));
      append<Format>(p, o, next - p.qo_indptr - 1, token);
    }
    Worker<Format> worker(p, o, workspace + omp_get_thread_num() * layout.scratch);
    if (!layout.fan_out) {
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < layout.items; i++) worker.attend(items[i]);
    } else {
#pragma omp for schedule(dynamic, 1)
      for (int64_t slot = 0; slot < layout.slots; slot++) {
        const Item* item = items + layout.items - 1;
        while (item->slot > slot) item--;
        State state(states + slot * State::bytes(p), p.block_vectors());
        worker.attend_split(*item, slot - item->slot, state);
      }
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < layout.items; i++) worker.merge_splits(items[i], states);
    }
  }
}

}  // namespace

extern "C" {

// Bytes of workspace for a plan: any that is at least as large and aligned to 64 bytes will do.
int64_t paged_attention_workspace(const Problem* problem) { return Layout(*problem).total; }

// Once a step, into the workspace that the runs of the step are given: the items, largest first.
void paged_attention_plan(const Problem* problem, void* workspace) {
  const Problem& p = *problem;
  const Layout layout(p);
  Item* items = reinterpret_cast<Item*>(static_cast<char*>(workspace) + layout.item_list);
  Item* item = items;
  for (int64_t r = 0; r < p.rows; r++) p.each_item(r, [&](const Item& next) { *item++ = next; });
  std::stable_sort(items, item, [](const Item& a, const Item& b) { return a.keys - a.first > b.keys - b.first; });
  int32_t slot = 0;
  for (item = items; item < items + layout.items; item++) {
    item->slot = slot;
    slot += int32_t(splits_of(*item));
  }
}

// One layer: appends the step's keys and values to the cache, then attends.
void paged_attention_run(const Problem* problem, const Operands* operands, void* workspace) {
  char* memory = static_cast<char*>(workspace);
  if (problem->dtype == 0) return run<Float32>(*problem, *operands, memory);
  if (problem->dtype == 1) return run<BFloat16>(*problem, *operands, memory);
  run<Float16>(*problem, *operands, memory);
}
}
