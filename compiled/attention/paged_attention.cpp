// Causal attention over a paged KV cache: flash-style, one pass over the keys with a running softmax.
//
// An item walks its keys in blocks of kBlock that begin at absolute multiples of kBlock, and in splits of
// kSplit keys that are merged in order. Both cuts depend on positions alone, so a token's result has the
// same bits whatever its batch mates, its query block, the number of threads and who ran the splits.
//
// Called through three plain C functions: the caller owns all memory and has checked all arguments.
// Legend: H query heads, K KV heads, D head size of keys, E of values, S page size; strides count elements.

#include <atomic>
#include <omp.h>

#include "blocks.h"
#include "product.h"
#include "softmax.h"

namespace {

// One thread's work: the packed operands and the walk over the keys.
template <class Format>
class Worker {
  using Element = typename Format::Element;
  static constexpr int kPack = Format::kPack;

 public:
  Worker(const Problem& problem, const Operands& operands, const Layout& layout, char* scratch)
      : p_(problem), o_(operands), score_(problem), key_words_((problem.key_dim + kPack - 1) / kPack),
        query_stride_(problem.padded_key()), columns_(problem.padded_value()) {
    queries_ = reinterpret_cast<uint32_t*>(scratch);
    keys_ = queries_ + layout.vectors * query_stride_;
    values_ = keys_ + kBlock * query_stride_;
    scores_ = values_ + kBlock * columns_;
    whole_ = State(scratch + layout.scratch - 2 * layout.state, layout.vectors);
    part_ = State(scratch + layout.scratch - layout.state, layout.vectors);
  }

  // Works are attended one after the other: while one is walked, the first block of the next is fetched.
  void begin(const Work& work) { blocks_[current_].find(p_, o_, *work.item, work.begin(), work.end(work.splits)); }

  // All of a work's splits, merged in order, into `state`.
  void attend(const Work& work, const Work* next, State state) {
    const Item& item = *work.item;
    pack_queries(item);
    for (int64_t split = 0; split < work.splits; split++) {
      const State of_split = split ? part_ : state;
      clear(of_split, count(item), columns_);
      for (int64_t following = 0; following < work.end(split + 1); current_ ^= 1) {
        following = blocks_[current_].first + kBlock;
        look_ahead(work, next, following, blocks_[current_ ^ 1]);
        absorb(item, blocks_[current_], blocks_[current_ ^ 1], of_split);
      }
      if (split) merge(score_.factor, count(item), columns_, state, part_);
    }
  }

  void attend(const Work& work, const Work* next) {
    attend(work, next, whole_);
    write(*work.item, whole_);
  }

  void merge_splits(const Item& item, const Layout& layout, char* workspace) {
    const State whole = layout.state_of(item.slot, workspace);
    for (int64_t split = 1; split < item.splits(); split++)
      merge(score_.factor, count(item), columns_, whole, layout.state_of(item.slot + split, workspace));
    write(item, whole);
  }

 private:
  // Query vectors are ordered by token, then query head within the group.
  int64_t count(const Item& item) const { return item.tokens * p_.group(); }
  int64_t head(const Item& item, int64_t vector) const { return item.head * p_.group() + vector % p_.group(); }

  int64_t offset(const Item& item, int64_t vector, int64_t token_stride, int64_t head_stride) const {
    return (item.token + vector / p_.group()) * token_stride + head(item, vector) * head_stride;
  }

  void pack_queries(const Item& item) {
    constexpr int64_t width = kLanes * kPack;
    for (int64_t m = 0; m < count(item); m++) {
      const Element* from = static_cast<const Element*>(o_.q) + offset(item, m, o_.q_token, o_.q_head);
      for (int64_t d = 0; d < p_.key_dim; d += width)
        store(queries_ + m * query_stride_ + d / kPack, Format::key_words(from + d, std::min(width, p_.key_dim - d)));
    }
  }

  void look_ahead(const Work& work, const Work* next, int64_t following, Block<Element>& block) const {
    block.keys = 0;
    if (following < work.end(work.splits))
      block.find(p_, o_, *work.item, following, work.end(work.splits));
    else if (next)
      block.find(p_, o_, *next->item, next->begin(), next->end(next->splits));
  }

  // One block of keys and values joins the running softmax.
  void absorb(const Item& item, const Block<Element>& block, const Block<Element>& next, State state) {
    const int64_t vectors = count(item);
    pack_keys<Format>(block, next, p_.key_dim, keys_);
    if (vectors <= kTileRows && p_.value_dim % kLanes == 0) {
      in_tiles(item, block, state, Unpacked<Format>{block, next, 0}, std::make_integer_sequence<int, kTileRows>());
    } else {
      pack_values<Format>(block, next, p_.value_dim, values_, columns_);
      in_tiles(item, block, state, Packed{values_, columns_}, std::make_integer_sequence<int, kTileRows>());
    }
  }

  template <class Values, int... I>
  void in_tiles(const Item& item, const Block<Element>& block, State state, Values values,
                std::integer_sequence<int, I...>) {
    const int64_t vectors = count(item);
    int64_t m = 0;
    for (; m + kTileRows <= vectors; m += kTileRows) rows<kTileRows>(item, block, state, values, m);
    ((vectors - m == I ? rows<I>(item, block, state, values, m) : void()), ...);
  }

  // R query vectors, from the m-th on, whose products and weights stay in the first-level cache.
  template <int R, class Values>
  void rows(const Item& item, const Block<Element>& block, State state, Values values, int64_t m) {
    if constexpr (R > 0) {
      const int64_t position = p_.position(item.row, item.token) - block.first;  // within the block
      int64_t from[R], to[R];
      for (int r = 0; r < R; r++) {
        const int64_t last = position + (m + r) / p_.group();
        from[r] = p_.window ? std::max<int64_t>(0, last + 1 - p_.window) : 0;
        to[r] = std::min(last + 1, block.keys);
      }
      const int64_t begin = from[0], end = to[R - 1], columns = (end + kLanes - 1) / kLanes;
      if (begin >= end) return;
      multiply<Format, R, true>(columns, queries_ + m * query_stride_, query_stride_, Packed{keys_, kBlock}, 0,
                                key_words_, reinterpret_cast<float*>(scores_), kBlock, nullptr);
      float rescale[R];
      bool same = true;
      for (int r = 0; r < R; r++) {
        uint32_t* scores = scores_ + r * kBlock;
        float *max = state.max + m + r, *sum = state.sum + (m + r) * kLanes;
        rescale[r] = from[r] == 0 && to[r] == kBlock
                         ? weigh<Format, false>(score_, scores, columns, 0, kBlock, max, sum)
                         : weigh<Format, true>(score_, scores, columns, from[r], to[r], max, sum);
        same &= rescale[r] == 1.0f;
      }
      multiply<Format, R, false>(columns_ / kLanes, scores_, kBlock, values, begin / kPack, (end + kPack - 1) / kPack,
                                 state.out + m * columns_, columns_, same ? nullptr : rescale);
    }
  }

  void write(const Item& item, State state) const {
    for (int64_t m = 0; m < count(item); m++) {
      Element* to = static_cast<Element*>(o_.out) + offset(item, m, o_.out_token, o_.out_head);
      float sink = 0.0f;
      if (o_.sinks) sink = Format::load(static_cast<const Element*>(o_.sinks) + head(item, m), 1)[0];
      const float sum = reduce_sum(load<Floats>(state.sum + m * kLanes));
      const float factor = share(score_.factor, state.max[m], sum, o_.sinks ? &sink : nullptr);
      for (int64_t d = 0; d < p_.value_dim; d += kLanes)
        Format::store(to + d, load<Floats>(state.out + m * columns_ + d) * factor, p_.value_dim - d);
    }
  }

  const Problem& p_;
  const Operands& o_;
  const Scores score_;
  const int64_t key_words_, query_stride_, columns_;
  uint32_t *queries_, *keys_, *values_, *scores_;
  State whole_{nullptr, 0}, part_{nullptr, 0};
  Block<Element> blocks_[2];
  int current_ = 0;  // of the two blocks
};

// The step's own keys and values go to their slots: a row's tokens are the last positions of its keys.
template <class Element>
void append(const Problem& p, const Operands& o, int64_t row, int64_t token) {
  const int64_t position = p.position(row, token), slot = position % p.page_size;
  const int64_t page = p.kv_indices[p.kv_indptr[row] + position / p.page_size];
  const Element* k = static_cast<const Element*>(o.k) + token * o.k_token;
  const Element* v = static_cast<const Element*>(o.v) + token * o.v_token;
  Element* keys = static_cast<Element*>(o.key_cache) + page * p.key_page + slot * p.key_slot;
  Element* values = static_cast<Element*>(o.value_cache) + page * p.value_page + slot * p.value_slot;
  for (int64_t h = 0; h < p.kv_heads; h++) {
    std::memcpy(keys + h * p.key_head, k + h * o.k_head, p.key_dim * sizeof(Element));
    std::memcpy(values + h * p.value_head, v + h * o.v_head, p.value_dim * sizeof(Element));
  }
}

template <class Element>
void clear_padding(const Problem& p, const Operands& o, int64_t token) {
  for (int64_t h = 0; h < p.heads; h++)
    std::fill_n(static_cast<Element*>(o.out) + token * o.out_token + h * o.out_head, p.value_dim, Element(0));
}

template <class Format>
void run(const Problem& p, const Operands& o, char* workspace) {
  using Element = typename Format::Element;
  const Layout layout(p);
  const Item* items = reinterpret_cast<const Item*>(workspace + layout.item_list);
  const int64_t real = p.qo_indptr[p.rows], works = layout.works();
  std::atomic<int64_t> taken{0};
#pragma omp parallel num_threads(int(p.threads))
  {
#pragma omp for schedule(static) nowait
    for (int64_t token = real; token < o.tokens; token++) clear_padding<Element>(p, o, token);
#pragma omp for schedule(static)
    for (int64_t token = 0; token < real; token++) {
      const int32_t* next = std::upper_bound(p.qo_indptr, p.qo_indptr + p.rows + 1, int32_t(token));
      append<Element>(p, o, next - p.qo_indptr - 1, token);
    }
    Worker<Format> worker(p, o, layout, workspace + omp_get_thread_num() * layout.scratch);
    int64_t held = 0, last = 0;
    const auto take = [&] {
      if (held == 0) held = layout.grab, last = taken.fetch_add(layout.grab);
      return held--, last++;
    };
    int64_t number = take();
    if (number < works) worker.begin(layout.work(items, number));
    while (number < works) {
      const int64_t following = take();
      const Work work = layout.work(items, number), next = layout.work(items, std::min(following, works - 1));
      const Work* ahead = following < works ? &next : nullptr;
      if (layout.fan_out)
        worker.attend(work, ahead, layout.state_of(number, workspace));
      else
        worker.attend(work, ahead);
      number = following;
    }
    if (layout.fan_out) {
#pragma omp barrier
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < layout.items; i++) worker.merge_splits(items[i], layout, workspace);
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
    slot += int32_t(item->splits());
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
