// Paged attention. Included once per instruction set, after its simd header and linear.h.
//
// A task is one KV head of one slice: the query heads that share it are rows beside each other, so its keys and values
// are read once for all of them. Pages are taken in order with a running maximum (Milakov and Gimelshein 2018), every
// row on its own: a row's result does not depend on the rows beside it, nor on how a prompt was cut into chunks.

namespace hr {
namespace HR_ISA {
namespace {

inline uint16_t bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return static_cast<uint16_t>((bits | 0x400000) >> 16);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint32_t bf16_pair(float low, float high) { return bf16(low) | static_cast<uint32_t>(bf16(high)) << 16; }

inline uint16_t *page_of(const AttentionLayer &layer, const SliceRows &slice, int page, int kv_head) {
  const size_t block = static_cast<size_t>(slice.table[page / layer.pages_per_block]);
  const size_t index = block * layer.pages_per_block + page % layer.pages_per_block;
  return layer.cache + (index * layer.kv_heads + kv_head) * layer.page_size;
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

void store_keys_and_values(const AttentionLayer &layer, const SliceRows &slice, int kv_head) {
  float key[kMostHeadDim];
  const int dim = layer.head_dim;
  for (int token = 0; token < slice.count; token++) {
    const int row = slice.first_row + token, position = slice.start + token, place = position % kPage;
    uint16_t *keys = page_of(layer, slice, position / kPage, kv_head);
    rotate(layer, row, layer.heads + kv_head, key);
    for (int d = 0; d < dim; d += 2) {
      const uint32_t pair = bf16_pair(key[d], key[d + 1]);
      memcpy(keys + static_cast<size_t>(d) * kPage + place * 2, &pair, 4);
    }
    const float *value = layer.qkv + row * layer.qkv_stride +
                         static_cast<size_t>(layer.heads + layer.kv_heads + kv_head) * dim;
    uint16_t *values = keys + static_cast<size_t>(dim) * kPage + static_cast<size_t>(place / 2) * layer.value_dim * 2;
    // The even token of a pair clears its neighbour: weights of zero would keep a NaN that an earlier sequence left.
    if (place % 2 == 0) {
      for (int d = 0; d < dim; d++) {
        const uint32_t pair = bf16(value[d]);
        memcpy(values + 2 * d, &pair, 4);
      }
    } else {
      for (int d = 0; d < dim; d++) values[2 * d + 1] = bf16(value[d]);
    }
  }
}

// Rows of one tile: their queries, the positions first[r] to last[r] - 1 that each sees, and where its output goes.
struct QueryTile {
  const uint32_t *queries[kQueryRows];
  int first[kQueryRows], last[kQueryRows];
  float *out[kQueryRows];
};

// What one row has seen so far: the largest score, the sum of the weights relative to it.
struct Softmax {
  float largest, total;
};

// Weights of one page's scores; returns the factor for everything that was summed before.
inline float weigh_page(F32 scores, int from, int to, float scale, Softmax &seen, uint16_t *weights) {
  const F32 x = keep_lanes(mul(scores, broadcast(scale)), from, to, broadcast(-INFINITY));
  const float page_largest = largest(x);
  const float now = page_largest > seen.largest ? page_largest : seen.largest;
  const float factor = now == seen.largest ? 1.0f : expf(seen.largest - now);
  const F32 weight = keep_lanes(exponential(sub(x, broadcast(now))), from, to, zero());
  seen = {now, seen.total * factor + sum(weight)};
  store_bf16(weights, weight);
  return factor;
}

inline int clamp(int x, int least, int most) { return x < least ? least : x > most ? most : x; }

// Vectors is value_dim / 16, or 0 to find it at run time.
template <int Vectors, int R>
void attend_rows(const AttentionLayer &layer, const SliceRows &slice, int kv_head, const QueryTile &tile, int row) {
  constexpr int kMostVectors = Vectors > 0 ? Vectors : kMostHeadDim / 16;
  const int vectors = Vectors > 0 ? Vectors : layer.value_dim / 16;
  F32 sums[R][kMostVectors];
  Softmax seen[R];
  int begin = tile.first[row], end = 0;
  for (int r = 0; r < R; r++) {
    for (int i = 0; i < vectors; i++) sums[r][i] = zero();
    seen[r] = {-INFINITY, 0.0f};
    begin = tile.first[row + r] < begin ? tile.first[row + r] : begin;
    end = tile.last[row + r] > end ? tile.last[row + r] : end;
  }
  const int pairs = layer.head_dim / 2;
  for (int page = begin / kPage; page * kPage < end; page++) {
    const uint16_t *keys = page_of(layer, slice, page, kv_head);
    const uint16_t *values = keys + static_cast<size_t>(layer.head_dim) * kPage;
    // The next page lies anywhere: the hardware does not foresee it.
    const bool more = (page + 1) * kPage < end;
    const uint16_t *next = more ? page_of(layer, slice, page + 1, kv_head) : keys;
    F32 scores[R];
    for (int r = 0; r < R; r++) scores[r] = zero();
    for (int d = 0; d < pairs; d++) {
      if (more) __builtin_prefetch(next + static_cast<size_t>(d) * 2 * kPage);
      const Bf16Pairs key = load_pairs(keys + static_cast<size_t>(d) * 2 * kPage);
      for (int r = 0; r < R; r++) scores[r] = dot_pairs(scores[r], key, broadcast_pair(tile.queries[row + r][d]));
    }
    alignas(64) uint16_t weights[R][kPage];
    int most = 0;
    for (int r = 0; r < R; r++) {
      const int from = clamp(tile.first[row + r] - page * kPage, 0, kPage);
      const int to = clamp(tile.last[row + r] - page * kPage, 0, kPage);
      if (from >= to) {
        memset(weights[r], 0, sizeof weights[r]);
        continue;
      }
      most = to > most ? to : most;
      const float factor = weigh_page(scores[r], from, to, layer.scale, seen[r], weights[r]);
      if (factor != 1.0f) {
        for (int i = 0; i < vectors; i++) sums[r][i] = mul(sums[r][i], broadcast(factor));
      }
    }
    const uint16_t *next_values = next + static_cast<size_t>(layer.head_dim) * kPage;
    for (int t = 0; t < (most + 1) / 2; t++) {
      Bf16Pairs weight[R];
      for (int r = 0; r < R; r++) {
        uint32_t pair;
        memcpy(&pair, weights[r] + 2 * t, 4);
        weight[r] = broadcast_pair(pair);
      }
      for (int i = 0; i < vectors; i++) {
        if (more) __builtin_prefetch(next_values + static_cast<size_t>(t) * layer.value_dim * 2 + i * 32);
        const Bf16Pairs value = load_pairs(values + static_cast<size_t>(t) * layer.value_dim * 2 + i * 32);
        for (int r = 0; r < R; r++) sums[r][i] = dot_pairs(sums[r][i], value, weight[r]);
      }
    }
  }
  for (int r = 0; r < R; r++) {
    const F32 inverse = broadcast(1.0f / seen[r].total);
    for (int i = 0; i < vectors; i++) {
      store_first(tile.out[row + r] + i * 16, mul(sums[r][i], inverse), clamp(layer.head_dim - i * 16, 0, 16));
    }
  }
}

constexpr int rows_at_once(int vectors) {
  return vectors == 0 ? 2 : kAttentionRegisters / vectors > 6 ? 6 : kAttentionRegisters / vectors < 1 ? 1 : kAttentionRegisters / vectors;
}

template <int Vectors, int R = rows_at_once(Vectors)>
void attend_some(const AttentionLayer &layer, const SliceRows &slice, int kv_head, const QueryTile &tile, int row,
                 int count) {
  if constexpr (R > 1) {
    if (count < R) return attend_some<Vectors, R - 1>(layer, slice, kv_head, tile, row, count);
  }
  attend_rows<Vectors, R>(layer, slice, kv_head, tile, row);
}

template <int Vectors>
void attend_tile(const AttentionLayer &layer, const SliceRows &slice, int kv_head, const QueryTile &tile, int rows) {
  const int tiles = ceil_div(rows, rows_at_once(Vectors));
  for (int i = 0; i < tiles; i++) {
    const int from = rows * i / tiles, to = rows * (i + 1) / tiles;
    attend_some<Vectors>(layer, slice, kv_head, tile, from, to - from);
  }
}

void attend(const AttentionLayer &layer, const SliceRows &slice, int kv_head, int first, int last) {
  const int group = layer.heads / layer.kv_heads, pairs = layer.head_dim / 2;
  uint32_t queries[kQueryRows * kMostHeadDim / 2];
  float rotated[kMostHeadDim];
  QueryTile tile;
  int rows = 0;
  for (int token = first; token < last; token++) {
    const int row = slice.first_row + token, end = slice.start + token + 1;
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++, rows++) {
      uint32_t *query = queries + rows * pairs;
      rotate(layer, row, head, rotated);
      for (int d = 0; d < pairs; d++) query[d] = bf16_pair(rotated[2 * d], rotated[2 * d + 1]);
      tile.queries[rows] = query;
      tile.first[rows] = layer.window > 0 && end > layer.window ? end - layer.window : 0;
      tile.last[rows] = end;
      tile.out[rows] = layer.out + row * layer.out_stride + static_cast<size_t>(head) * layer.head_dim;
    }
  }
  switch (layer.value_dim / 16) {
    case 4: return attend_tile<4>(layer, slice, kv_head, tile, rows);
    case 5: return attend_tile<5>(layer, slice, kv_head, tile, rows);
    case 6: return attend_tile<6>(layer, slice, kv_head, tile, rows);
    case 8: return attend_tile<8>(layer, slice, kv_head, tile, rows);
    default: return attend_tile<0>(layer, slice, kv_head, tile, rows);
  }
}

}  // namespace
}  // namespace HR_ISA
}  // namespace hr
