// KV pages of bytes: keys [ceil(head_dim / 4)][16][4], too large by 128; values [4][value_dim][4]; bf16 scales of the
// keys [16] and of the values [16]. Included once per instruction set.
//
// Everything is multiplied in integers: a query is rounded to bytes, too, and so are a page's weights times the scales of
// its values. Tokens that do not count have weights of zero, whatever bytes and scales an earlier sequence left there.

namespace hr {
namespace HR_ISA {
namespace {

struct Int8Pages {
  static size_t values_at(const AttentionLayer &layer) { return static_cast<size_t>(ceil_div(layer.head_dim, 4)) * 64; }
  static size_t scales_at(const AttentionLayer &layer) {
    return values_at(layer) + static_cast<size_t>(layer.value_dim) * kPage;
  }

  // Bytes of x, at most 127 in size; their scale, rounded up to bf16 so that no byte is larger. NaN if any x is not finite.
  static float quantise(const float *x, int count, int8_t *bytes) {
    float most = 0, nothing = 0;
    for (int i = 0; i < count; i++) {
      most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
      nothing += x[i] * 0.0f;
    }
    float scale = most / kByteMost;
    uint32_t bits;
    memcpy(&bits, &scale, 4);
    bits = (bits + 0xffff) & 0xffff0000u;
    memcpy(&scale, &bits, 4);
    const bool number = nothing == 0.0f;
    const float to_bytes = number && scale > 0 ? 1.0f / scale : 0.0f;
    for (int i = 0; i < count; i++) bytes[i] = number ? static_cast<int8_t>(nearbyintf(x[i] * to_bytes)) : int8_t{0};
    return number ? scale : NAN;
  }

  static void prepare_query(const AttentionLayer &layer, const float *rotated, uint32_t *query, QueryTile &tile) {
    int8_t bytes[kMostHeadDim] = {};
    const float scale = quantise(rotated, layer.head_dim, bytes);
    int32_t total = 0;
    for (int d = 0; d < layer.head_dim; d++) total += bytes[d];
    memcpy(query, bytes, static_cast<size_t>(ceil_div(layer.head_dim, 4)) * 4);
    tile.query_scale[tile.rows] = scale * layer.scale;
    tile.query_sum[tile.rows] = total;
  }

  static void store(const AttentionLayer &layer, uint8_t *page, int place, const float *key, const float *value) {
    int8_t bytes[kMostHeadDim] = {};
    auto *scales = reinterpret_cast<uint16_t *>(page + scales_at(layer));
    scales[place] = bf16(quantise(key, layer.head_dim, bytes));
    for (int d = 0; d < ceil_div(layer.head_dim, 4); d++) {
      uint32_t quad;
      memcpy(&quad, bytes + 4 * d, 4);
      quad ^= 0x80808080u;
      memcpy(page + static_cast<size_t>(d) * 64 + place * 4, &quad, 4);
    }
    scales[kPage + place] = bf16(quantise(value, layer.head_dim, bytes));
    uint8_t *values = page + values_at(layer) + static_cast<size_t>(place / 4) * layer.value_dim * 4 + place % 4;
    for (int d = 0; d < layer.head_dim; d++) values[4 * d] = static_cast<uint8_t>(bytes[d]);
  }

  template <int R>
  static void score(const AttentionLayer &layer, const uint8_t *page, const uint8_t *next, const QueryTile &tile,
                    int row, F32 (&scores)[R]) {
    I32 sums[R];
    for (int r = 0; r < R; r++) sums[r] = broadcast_int(kUnsignedWeights ? -128 * tile.query_sum[row + r] : 0);
    const int quads = ceil_div(layer.head_dim, 4);
    for (int d = 0; d < quads; d++) {
      if (next != nullptr) __builtin_prefetch(next + static_cast<size_t>(d) * 64);
      const I32 key = load_int(page + static_cast<size_t>(d) * 64);
      for (int r = 0; r < R; r++) {
        sums[r] = dot_int8(sums[r], broadcast_int(static_cast<int32_t>(tile.queries[row + r][d])), key);
      }
    }
    const F32 key_scales = load_bf16(reinterpret_cast<const uint16_t *>(page + scales_at(layer)));
    for (int r = 0; r < R; r++) {
      scores[r] = mul(mul(to_float(sums[r]), broadcast(tile.query_scale[row + r])), key_scales);
    }
  }

  template <int R, int MostVectors>
  static void add(const AttentionLayer &layer, const uint8_t *page, const uint8_t *next, const PageWeights<R> &weights,
                  int vectors, F32 (&sums)[R][MostVectors]) {
    const auto *scales = reinterpret_cast<const uint16_t *>(page + scales_at(layer)) + kPage;
    if (next != nullptr) __builtin_prefetch(next + scales_at(layer));
    const F32 value_scales = load_bf16(scales);
    alignas(16) int8_t bytes[R][kPage];
    F32 step[R];
    for (int r = 0; r < R; r++) {
      // Once more: zero times the NaN of a token that does not count is a NaN.
      const F32 weight = keep_lanes(mul(weights.of[r], value_scales), weights.from[r], weights.to[r], zero());
      const float most = largest_magnitude(max_magnitude(zero(), weight));
      store_signed_bytes(bytes[r], mul(weight, broadcast(most > 0 ? kByteMost / most : 0.0f)));
      step[r] = broadcast(most / kByteMost);
    }
    const size_t begin = values_at(layer), stride = static_cast<size_t>(layer.value_dim) * 4;
    for (int i = 0; i < vectors; i++) {
      I32 products[R];
      for (int r = 0; r < R; r++) products[r] = zero_int();
      for (int t = 0; t < ceil_div(weights.most, 4); t++) {
        const size_t place = begin + t * stride + static_cast<size_t>(i) * 64;
        if (next != nullptr) __builtin_prefetch(next + place);
        const I32 value = load_int(page + place);
        for (int r = 0; r < R; r++) {
          int32_t quad;
          memcpy(&quad, bytes[r] + 4 * t, 4);
          products[r] = dot_unsigned(products[r], value, broadcast_int(quad));
        }
      }
      for (int r = 0; r < R; r++) sums[r][i] = fma(to_float(products[r]), step[r], sums[r][i]);
    }
  }
};

}  // namespace
}  // namespace HR_ISA
}  // namespace hr
