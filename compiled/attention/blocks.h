// Blocks of a row's keys and values: where they lie in the pages, on their way from memory, and packed.

#pragma once

#include "formats.h"
#include "plan.h"

namespace {

using namespace simd;

// Consecutive keys of a row and their values. What may not be read, because its page may be somebody else's by now or
// because it is not there, is a repetition of the nearest that may: the pointers are whole vectors of them.
template <class Element>
struct Block {
  int64_t first, keys;
  const Element *key[kBlock], *value[kBlock];

  // The block at `first` of an item, empty from `end` on.
  void find(const Problem& p, const Operands& o, const Item& item, int64_t at, int64_t end) {
    const int32_t* pages = p.kv_indices + p.kv_indptr[item.row];
    const Element* head_key = static_cast<const Element*>(o.key_cache) + item.head * p.key_head;
    const Element* head_value = static_cast<const Element*>(o.value_cache) + item.head * p.value_head;
    int64_t position = std::max<int64_t>(at, item.first), j = position - at;
    first = at;
    keys = std::clamp<int64_t>(end - at, 0, kBlock);
    if (keys == 0) return;
    const int64_t unseen = j;
    while (j < keys) {
      const int64_t page = pages[position / p.page_size], slot = position % p.page_size;
      const int64_t run = std::min(p.page_size - slot, keys - j);
      const Element* k = head_key + page * p.key_page + slot * p.key_slot;
      const Element* v = head_value + page * p.value_page + slot * p.value_slot;
      for (int64_t i = 0; i < run; i++) key[j + i] = k + i * p.key_slot, value[j + i] = v + i * p.value_slot;
      j += run, position += run;
    }
    for (int64_t i = 0; i < unseen; i++) key[i] = key[unseen], value[i] = value[unseen];
    for (; j % kLanes; j++) key[j] = key[keys - 1], value[j] = value[keys - 1];
  }
};

// Only to the second-level cache: prefetches into the first hold back this block's own loads (half the speed).
inline void prefetch(const void* from, int64_t bytes) {
  for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(static_cast<const char*>(from) + byte, 0, 2);
}

// Keys [kBlock] x [dim] as words [dim words, kBlock]. Of `next` the same keys are fetched.
template <class Format, class Element = typename Format::Element>
void pack_keys(const Block<Element>& block, const Block<Element>& next, int64_t dim, uint32_t* to) {
  constexpr int64_t width = kLanes * Format::kPack;
  for (int64_t j = 0; j < block.keys; j += kLanes) {
    for (int64_t i = j; i < std::min(j + kLanes, next.keys); i++) prefetch(next.key[i], dim * sizeof(Element));
    for (int64_t d = 0; d < dim; d += width) {
      Words square[kLanes];
      if (dim - d >= width) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) square[i] = Format::key_words(block.key[j + i] + d);
      } else {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) square[i] = Format::key_words(block.key[j + i] + d, dim - d);
      }
      transpose(square);
      uint32_t* column = to + d / Format::kPack * kBlock + j;
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++) store(column + i * kBlock, square[i]);
    }
  }
}

// Values [kBlock] x [dim] as words [kBlock / kPack, padded dim].
template <class Format, class Element = typename Format::Element>
void pack_values(const Block<Element>& block, const Block<Element>& next, int64_t dim, uint32_t* to, int64_t stride) {
  constexpr int64_t kPack = Format::kPack;
  const int64_t whole = dim / kLanes * kLanes;
  for (int64_t j = 0; j < block.keys; j += kPack, to += stride) {
    for (int64_t i = j; i < std::min(j + kPack, next.keys); i++) prefetch(next.value[i], dim * sizeof(Element));
    const Element *even = block.value[j], *odd = block.value[j + kPack - 1];
    for (int64_t d = 0; d < whole; d += kLanes) store(to + d, Format::value_words(even + d, odd + d));
    if (whole < dim) store(to + whole, Format::value_words(even + whole, odd + whole, dim - whole));
  }
}

// Values as the right operand of a product without being packed, for where few rows read them. Whole vectors only.
template <class Format>
struct Unpacked {
  using Element = typename Format::Element;
  const Block<Element>&block, &next;
  int64_t column;

  Unpacked at(int64_t vector) const { return {block, next, column + vector * kLanes}; }
  Words words(int64_t i, int j) const {
    constexpr int64_t kPack = Format::kPack, in_line = 64 / (kLanes * int64_t(sizeof(Element)));
    const int64_t d = column + j * kLanes;
    if (j % in_line == 0)
      for (int64_t n = i * kPack; n < std::min((i + 1) * kPack, next.keys); n++) prefetch(next.value[n] + d, 64);
    return Format::value_words(block.value[i * kPack] + d, block.value[i * kPack + kPack - 1] + d);
  }
};

}  // namespace
