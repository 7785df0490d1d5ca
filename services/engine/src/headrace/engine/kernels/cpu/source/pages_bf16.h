// KV pages of bf16: keys [head_dim / 2][16][2], then values [8][value_dim][2]. Included once per instruction set.

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

struct Bf16Pages {
  static size_t values_at(const AttentionLayer &layer) { return static_cast<size_t>(layer.head_dim) * kPage * 2; }

  static void prepare_query(const AttentionLayer &layer, const float *rotated, uint32_t *query, QueryTile &) {
    for (int d = 0; d < layer.head_dim / 2; d++) {
      const uint32_t pair = bf16_pair(rotated[2 * d], rotated[2 * d + 1]);
      if (kBf16AsFloats) {
        query[2 * d] = pair << 16;
        query[2 * d + 1] = pair & 0xffff0000u;
      } else {
        query[d] = pair;
      }
    }
  }

  static void store(const AttentionLayer &layer, uint8_t *page, int place, const float *key, const float *value) {
    auto *keys = reinterpret_cast<uint16_t *>(page);
    for (int d = 0; d < layer.head_dim; d += 2) {
      const uint32_t pair = bf16_pair(key[d], key[d + 1]);
      memcpy(keys + static_cast<size_t>(d) * kPage + place * 2, &pair, 4);
    }
    auto *values = reinterpret_cast<uint16_t *>(page + values_at(layer)) +
                   static_cast<size_t>(place / 2) * layer.value_dim * 2;
    // The even token of a pair clears its neighbour: weights of zero would keep a NaN that an earlier sequence left.
    if (place % 2 == 0) {
      for (int d = 0; d < layer.head_dim; d++) {
        const uint32_t pair = bf16(value[d]);
        memcpy(values + 2 * d, &pair, 4);
      }
    } else {
      for (int d = 0; d < layer.head_dim; d++) values[2 * d + 1] = bf16(value[d]);
    }
  }

  template <int R>
  static void score(const AttentionLayer &layer, const uint8_t *page, const uint8_t *next, const QueryTile &tile,
                    int row, F32 (&scores)[R]) {
    const int pairs = layer.head_dim / 2;
    for (int r = 0; r < R; r++) scores[r] = zero();
    for (int d = 0; d < pairs; d++) {
      if (next != nullptr) __builtin_prefetch(next + static_cast<size_t>(d) * 64);
      const Bf16Pairs key = load_pairs(reinterpret_cast<const uint16_t *>(page + static_cast<size_t>(d) * 64));
      if constexpr (kBf16AsFloats) {
        const auto query = [&](int r) { return reinterpret_cast<const float *>(tile.queries[row + r]) + 2 * d; };
        const F32 first = first_of(key), second = second_of(key);
        for (int r = 0; r < R; r++) scores[r] = fma(first, broadcast(query(r)[0]), scores[r]);
        for (int r = 0; r < R; r++) scores[r] = fma(second, broadcast(query(r)[1]), scores[r]);
      } else {
        for (int r = 0; r < R; r++) scores[r] = dot_pairs(scores[r], key, broadcast_pair(tile.queries[row + r][d]));
      }
    }
    for (int r = 0; r < R; r++) scores[r] = mul(scores[r], broadcast(layer.scale));
  }

  template <int R, int MostVectors>
  static void add(const AttentionLayer &layer, const uint8_t *page, const uint8_t *next, const PageWeights<R> &weights,
                  int vectors, F32 (&sums)[R][MostVectors]) {
    if constexpr (kBf16AsFloats) {
      add_floats(layer, page, next, weights, vectors, sums);
    } else {
      add_pairs(layer, page, next, weights, vectors, sums);
    }
  }

 private:
  // All values of 16 dimensions, then those of the next: only so many sums fit into the registers.
  template <int R, int MostVectors>
  static void add_floats(const AttentionLayer &layer, const uint8_t *page, const uint8_t *next,
                         const PageWeights<R> &weights, int vectors, F32 (&sums)[R][MostVectors]) {
    alignas(64) uint8_t kept[R][kPage * sizeof(float)];
    for (int r = 0; r < R; r++) keep_bf16(kept[r], 0, weights.of[r]);
    const size_t begin = values_at(layer), stride = static_cast<size_t>(layer.value_dim) * 4;
    for (int i = 0; i < vectors; i++) {
      F32 some[R];
      for (int r = 0; r < R; r++) some[r] = sums[r][i];
      for (int t = 0; t < ceil_div(weights.most, 2); t++) {
        const size_t place = begin + t * stride + static_cast<size_t>(i) * 64;
        if (next != nullptr) __builtin_prefetch(next + place);
        const Bf16Pairs value = load_pairs(reinterpret_cast<const uint16_t *>(page + place));
        const auto weight = [&](int r, int which) {
          return broadcast(reinterpret_cast<const float *>(kept[r])[2 * t + which]);
        };
        const F32 first = first_of(value), second = second_of(value);
        for (int r = 0; r < R; r++) some[r] = fma(first, weight(r, 0), some[r]);
        for (int r = 0; r < R; r++) some[r] = fma(second, weight(r, 1), some[r]);
      }
      for (int r = 0; r < R; r++) sums[r][i] = some[r];
    }
  }

  template <int R, int MostVectors>
  static void add_pairs(const AttentionLayer &layer, const uint8_t *page, const uint8_t *next,
                        const PageWeights<R> &weights, int vectors, F32 (&sums)[R][MostVectors]) {
    alignas(64) uint16_t rounded[R][kPage];
    for (int r = 0; r < R; r++) store_bf16(rounded[r], weights.of[r]);
    const size_t begin = values_at(layer), stride = static_cast<size_t>(layer.value_dim) * 4;
    for (int t = 0; t < ceil_div(weights.most, 2); t++) {
      Bf16Pairs weight[R];
      for (int r = 0; r < R; r++) {
        uint32_t pair;
        memcpy(&pair, rounded[r] + 2 * t, 4);
        weight[r] = broadcast_pair(pair);
      }
      for (int i = 0; i < vectors; i++) {
        const size_t place = begin + t * stride + static_cast<size_t>(i) * 64;
        if (next != nullptr) __builtin_prefetch(next + place);
        const Bf16Pairs value = load_pairs(reinterpret_cast<const uint16_t *>(page + place));
        for (int r = 0; r < R; r++) sums[r][i] = dot_pairs(sums[r][i], value, weight[r]);
      }
    }
  }
};

}  // namespace
}  // namespace HR_ISA
}  // namespace hr
