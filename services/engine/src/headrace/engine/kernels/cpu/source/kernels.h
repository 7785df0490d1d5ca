// What one instruction set offers to the rest: the same functions, compiled three times from the same text.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "headrace_cpu.h"

namespace hr {

constexpr int kPanel = 16;
constexpr int kPage = 16;
constexpr int kGroup = 64;      // inputs of 8-bit rows that share a scale
constexpr int kHalfGroup = 32;  // inputs of a 4-bit column that share a scale and a least value
// Of a panel of HR_INT4: the nibbles of 64 inputs, then scales and least values of both groups of 32.
constexpr int kNibbleBytes = kGroup / 8 * 64;
constexpr int kNibbleGroupBytes = kNibbleBytes + 4 * kPanel * 2;
constexpr int kMostHeadDim = 256;
// Positions whose scores are one chain of additions. Longer contexts are merged from such ranges, which several tasks can
// share out among themselves.
constexpr int kRange = 512;
// Query rows (tokens times the heads that share a KV head) of one attention task; a task holds them rotated.
constexpr int kQueryRows = 96;

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
inline int pad64(int columns) { return ceil_div(columns, 64) * 64; }

inline size_t panel_bytes(int format, int depth) {
  switch (format) {
    case HR_BF16: return static_cast<size_t>(ceil_div(depth, 2)) * 64;
    case HR_INT8: return static_cast<size_t>(ceil_div(depth, 4)) * 64;
    case HR_INT4: return static_cast<size_t>(ceil_div(depth, kGroup)) * kNibbleGroupBytes;
    default: return static_cast<size_t>(depth) * 64;
  }
}

// Bytes of one page of one KV head. Values are padded to whole registers.
inline size_t page_bytes(int kv_format, int head_dim) {
  const size_t value_dim = ceil_div(head_dim, 16) * 16;
  if (kv_format == HR_KV_INT8) return ceil_div(head_dim, 4) * size_t{64} + value_dim * kPage + 2 * kPage * 2;
  return (head_dim + value_dim) * kPage * 2;
}

// Floats that a row's attention to a range takes, see attention.h.
inline size_t state_size(int value_dim) { return static_cast<size_t>(value_dim) + 16; }

// Activations in the form that a format multiplies: bf16, float, or signed bytes with one scale per group.
struct Rows {
  uint8_t *data;
  size_t stride;        // bytes from row to row
  float *scales;        // of bytes: [rows][groups]
  int32_t *group_sums;  // of bytes: [rows][groups], the sum of each group's bytes
  float *half_sums;     // of bytes: [rows][2 * groups], the sum of what each half group's bytes stand for
  int groups;
};

enum class Finish { kStore, kAdd, kSiluMul };

struct Output {
  Finish finish;
  float *data;  // kSiluMul: half as many columns as the matrix has
  size_t stride;
};

// One layer's attention in one step.
struct AttentionLayer {
  const float *qkv;  // rows of query heads, key heads, value heads
  size_t qkv_stride;
  const float *head_norms;
  float eps;
  const float *cosines;  // [rows][head_dim / 2]
  const float *sines;
  int heads, kv_heads, head_dim, value_dim;  // value_dim: head_dim padded to 16
  int kv_format;
  uint8_t *cache;
  size_t page_bytes;  // of one KV head
  int pages_per_block;
  int window;
  float scale;
  float *out;
  size_t out_stride;
};

// Panels first to last - 1 of a product; `next` is where the same thread most likely goes on, only a hint.
struct Panels {
  int first, last, next;
};

// The rows of one slice: `count` tokens from position `start` on, in rows from `first_row`.
struct SliceRows {
  int first_row, count, start;
  const int32_t *table;
};

struct Kernels {
  const char *name;
  size_t (*row_bytes)(int format, int depth);  // of a row that prepare_row makes
  // One row of `depth` floats, multiplied by its inverse root mean square and by `norm` if that is given.
  void (*prepare_row)(int format, const float *x, const float *norm, float eps, int depth, const Rows &out, int row);
  // Rows first_row to last_row - 1 times some panels, each the same whatever the limits.
  void (*multiply)(const hr_linear &linear, const Rows &rows, int first_row, int last_row, const Panels &panels,
                   const Output &out);
  // Update the likeliest of `count` logits whose first is token `first`; a logit that is not finite sets *best to -1.
  void (*find_likeliest)(const float *logits, int count, int first, float *best_value, int32_t *best);
  void (*store_keys_and_values)(const AttentionLayer &layer, const SliceRows &slice, int kv_head);
  // Attention of the slice's tokens first to last - 1, at most kQueryRows rows with the heads of the group; with `states`,
  // only to the positions of one range: each row's state goes to state_size floats of it.
  void (*attend)(const AttentionLayer &layer, const SliceRows &slice, int kv_head, int first, int last, int range,
                 float *states);
  // The output of the same rows from their states, those of range 0 first; changes them.
  void (*merge)(const AttentionLayer &layer, const SliceRows &slice, int kv_head, int first, int last, int ranges,
                float *states);
};

const Kernels *avx512_kernels();  // null where they cannot be built or this machine cannot run them
const Kernels *avx2_kernels();
const Kernels *portable_kernels();

}  // namespace hr
