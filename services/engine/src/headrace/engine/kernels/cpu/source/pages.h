// What both kinds of KV pages share. Included once per instruction set, after its simd header and linear.h.

namespace hr {
namespace HR_ISA {
namespace {

inline int clamp(int x, int least, int most) { return x < least ? least : x > most ? most : x; }

inline uint8_t *page_of(const AttentionLayer &layer, const SliceRows &slice, int page, int kv_head) {
  const size_t block = static_cast<size_t>(slice.table[page / layer.pages_per_block]);
  const size_t index = block * layer.pages_per_block + page % layer.pages_per_block;
  return layer.cache + (index * layer.kv_heads + kv_head) * layer.page_bytes;
}

// One head, normalised if the model does that, and rotated: pairs are the two halves (the NeoX order).
inline void rotate(const AttentionLayer &layer, int row, int head, float *out) {
  const int half = layer.head_dim / 2;
  const float *x = layer.qkv + row * layer.qkv_stride + static_cast<size_t>(head) * layer.head_dim;
  const float *cosines = layer.cosines + static_cast<size_t>(row) * half;
  const float *sines = layer.sines + static_cast<size_t>(row) * half;
  float normed[kMostHeadDim];
  if (layer.head_norms != nullptr) {
    const float *weights = layer.head_norms + static_cast<size_t>(head) * layer.head_dim;
    float squares = 0;
    for (int d = 0; d < layer.head_dim; d++) squares += x[d] * x[d];
    const float factor = 1.0f / sqrtf(squares / static_cast<float>(layer.head_dim) + layer.eps);
    for (int d = 0; d < layer.head_dim; d++) normed[d] = x[d] * factor * weights[d];
    x = normed;
  }
  for (int d = 0; d < half; d++) {
    out[d] = x[d] * cosines[d] - x[d + half] * sines[d];
    out[d + half] = x[d + half] * cosines[d] + x[d] * sines[d];
  }
}

// Rows of one tile: their queries, the positions first[r] to last[r] - 1 that each sees, and where its output goes.
struct QueryTile {
  int rows;
  const uint32_t *queries[kQueryRows];  // as the pages want them
  float query_scale[kQueryRows];        // of bytes
  int32_t query_sum[kQueryRows];        // of bytes
  int first[kQueryRows], last[kQueryRows];
  float *out[kQueryRows];
};

// What R rows give each token of a page: those from[r] to to[r] - 1, all below `most`; the others weigh nothing.
template <int R>
struct PageWeights {
  F32 of[R];
  int from[R], to[R], most;
};

// What one row has seen so far: the largest score, the sum of the weights relative to it.
struct Softmax {
  float largest, total;
};

}  // namespace
}  // namespace HR_ISA
}  // namespace hr
