// Paged attention. Included once per instruction set, after its simd header, linear.h and the two kinds of pages.
//
// A task is one KV head of one slice: the query heads that share it are rows beside each other, so its keys and values
// are read once for all of them. Pages are taken in order with a running maximum (Milakov and Gimelshein 2018), every
// row on its own, and what a row makes of each range of kRange positions is merged in the order of the ranges. So a
// row's result depends neither on the rows beside it, nor on how a prompt was cut into chunks, nor on whether the ranges
// were the work of one task or of several.

namespace hr {
namespace HR_ISA {
namespace {

// What a row has made of some positions, in memory: value_dim weighted sums, then these two.
struct State {
  float *sums;
  float *largest, *total;

  State(float *at, int value_dim) : sums(at), largest(at + value_dim), total(at + value_dim + 1) {}
};

// A row that has seen nothing has a total of 0.
void merge_states(const State &into, const State &from, int value_dim) {
  if (*from.total == 0) return;
  if (*into.total == 0) {
    memcpy(into.sums, from.sums, (value_dim + 2) * sizeof(float));
    return;
  }
  const float now = *from.largest > *into.largest ? *from.largest : *into.largest;
  const float old_part = expf(*into.largest - now), new_part = expf(*from.largest - now);
  for (int d = 0; d < value_dim; d += 16) {
    store(into.sums + d, fma(load(from.sums + d), broadcast(new_part), mul(load(into.sums + d), broadcast(old_part))));
  }
  *into.total = *into.total * old_part + *from.total * new_part;
  *into.largest = now;
}

void finish_row(const AttentionLayer &layer, const State &state, float *out) {
  const F32 inverse = broadcast(1.0f / *state.total);
  for (int d = 0; d < layer.value_dim; d += 16) {
    store_first(out + d, mul(load(state.sums + d), inverse), clamp(layer.head_dim - d, 0, 16));
  }
}

// Weights of one page's scores (of the lanes from, to), relative to the largest score so far; returns the factor for
// everything that was summed before.
inline float weigh_page(F32 scores, int from, int to, Softmax &seen, F32 &weight) {
  const F32 x = keep_lanes(scores, from, to, broadcast(-INFINITY));
  const float page_largest = largest(x);
  const float now = page_largest > seen.largest ? page_largest : seen.largest;
  const float factor = now == seen.largest ? 1.0f : expf(seen.largest - now);
  weight = keep_lanes(exponential(sub(x, broadcast(now))), from, to, zero());
  seen = {now, seen.total * factor + sum(weight)};
  return factor;
}

// R rows over the positions of one range, into `states`. Vectors is value_dim / 16, or 0 to find it at run time.
template <typename Pages, int Vectors, int R>
void attend_range(const AttentionLayer &layer, const SliceRows &slice, int kv_head, const QueryTile &tile, int row,
                  int range, float *states, size_t stride) {
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
  begin = begin > range * kRange ? begin : range * kRange;
  end = end < (range + 1) * kRange ? end : (range + 1) * kRange;
  for (int page = begin / kPage; page * kPage < end; page++) {
    const uint8_t *at = page_of(layer, slice, page, kv_head);
    // The next page lies anywhere: the hardware does not foresee it.
    const uint8_t *next = (page + 1) * kPage < end ? page_of(layer, slice, page + 1, kv_head) : nullptr;
    F32 scores[R];
    PageWeights<R> weights;
    weights.most = clamp(end - page * kPage, 0, kPage);
    Pages::template score<R>(layer, at, next, tile, row, scores);
    for (int r = 0; r < R; r++) {
      const int from = weights.from[r] = clamp(tile.first[row + r] - page * kPage, 0, kPage);
      const int to = weights.to[r] = clamp(tile.last[row + r] - page * kPage, 0, kPage);
      weights.of[r] = zero();
      if (from >= to) continue;
      const float factor = weigh_page(scores[r], from, to, seen[r], weights.of[r]);
      if (factor != 1.0f) {
        for (int i = 0; i < vectors; i++) sums[r][i] = mul(sums[r][i], broadcast(factor));
      }
    }
    Pages::template add<R, kMostVectors>(layer, at, next, weights, vectors, sums);
  }
  for (int r = 0; r < R; r++) {
    const State state(states + r * stride, layer.value_dim);
    for (int i = 0; i < vectors; i++) store(state.sums + i * 16, sums[r][i]);
    *state.largest = seen[r].largest;
    *state.total = seen[r].total;
  }
}

// R rows over all ranges, and their output.
template <typename Pages, int Vectors, int R>
void attend_rows(const AttentionLayer &layer, const SliceRows &slice, int kv_head, const QueryTile &tile, int row) {
  const size_t stride = state_size(layer.value_dim);
  alignas(64) float all[R * (kMostHeadDim + 16)], part[R * (kMostHeadDim + 16)];
  int begin = tile.first[row], end = 0;
  for (int r = 0; r < R; r++) {
    begin = tile.first[row + r] < begin ? tile.first[row + r] : begin;
    end = tile.last[row + r] > end ? tile.last[row + r] : end;
  }
  attend_range<Pages, Vectors, R>(layer, slice, kv_head, tile, row, begin / kRange, all, stride);
  for (int range = begin / kRange + 1; range * kRange < end; range++) {
    attend_range<Pages, Vectors, R>(layer, slice, kv_head, tile, row, range, part, stride);
    for (int r = 0; r < R; r++) {
      merge_states(State(all + r * stride, layer.value_dim), State(part + r * stride, layer.value_dim), layer.value_dim);
    }
  }
  for (int r = 0; r < R; r++) {
    finish_row(layer, State(all + r * stride, layer.value_dim), tile.out[row + r]);
  }
}

constexpr int rows_at_once(int vectors) {
  return vectors == 0 ? 2 : kAttentionRegisters / vectors > 6 ? 6 : kAttentionRegisters / vectors < 1 ? 1 : kAttentionRegisters / vectors;
}

// `count` rows: over all ranges, or over one of them into `states`.
template <typename Pages, int Vectors, int R = rows_at_once(Vectors)>
void attend_some(const AttentionLayer &layer, const SliceRows &slice, int kv_head, const QueryTile &tile, int row,
                 int count, int range, float *states) {
  if constexpr (R > 1) {
    if (count < R) return attend_some<Pages, Vectors, R - 1>(layer, slice, kv_head, tile, row, count, range, states);
  }
  if (states == nullptr) return attend_rows<Pages, Vectors, R>(layer, slice, kv_head, tile, row);
  const size_t stride = state_size(layer.value_dim);
  attend_range<Pages, Vectors, R>(layer, slice, kv_head, tile, row, range, states + row * stride, stride);
}

template <typename Pages, int Vectors>
void attend_tile(const AttentionLayer &layer, const SliceRows &slice, int kv_head, const QueryTile &tile, int range,
                 float *states) {
  const int tiles = ceil_div(tile.rows, rows_at_once(Vectors));
  for (int i = 0; i < tiles; i++) {
    const int from = tile.rows * i / tiles, to = tile.rows * (i + 1) / tiles;
    attend_some<Pages, Vectors>(layer, slice, kv_head, tile, from, to - from, range, states);
  }
}

template <typename Pages>
void attend_pages(const AttentionLayer &layer, const SliceRows &slice, int kv_head, int first, int last, int range,
                  float *states) {
  const int group = layer.heads / layer.kv_heads;
  constexpr int kQueryWords = kBf16AsFloats ? kMostHeadDim : kMostHeadDim / 2;
  uint32_t queries[kQueryRows * kQueryWords];
  float rotated[kMostHeadDim];
  QueryTile tile;
  tile.rows = 0;
  for (int token = first; token < last; token++) {
    const int row = slice.first_row + token, end = slice.start + token + 1;
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++, tile.rows++) {
      uint32_t *query = queries + static_cast<size_t>(tile.rows) * kQueryWords;
      tile.queries[tile.rows] = query;
      rotate(layer, row, head, rotated);
      Pages::prepare_query(layer, rotated, query, tile);
      tile.first[tile.rows] = layer.window > 0 && end > layer.window ? end - layer.window : 0;
      tile.last[tile.rows] = end;
      tile.out[tile.rows] = layer.out + row * layer.out_stride + static_cast<size_t>(head) * layer.head_dim;
    }
  }
  switch (layer.value_dim / 16) {
    case 4: return attend_tile<Pages, 4>(layer, slice, kv_head, tile, range, states);
    case 5: return attend_tile<Pages, 5>(layer, slice, kv_head, tile, range, states);
    case 6: return attend_tile<Pages, 6>(layer, slice, kv_head, tile, range, states);
    case 8: return attend_tile<Pages, 8>(layer, slice, kv_head, tile, range, states);
    default: return attend_tile<Pages, 0>(layer, slice, kv_head, tile, range, states);
  }
}

void attend(const AttentionLayer &layer, const SliceRows &slice, int kv_head, int first, int last, int range,
            float *states) {
  if (layer.kv_format == HR_KV_INT8) return attend_pages<Int8Pages>(layer, slice, kv_head, first, last, range, states);
  attend_pages<Bf16Pages>(layer, slice, kv_head, first, last, range, states);
}

void merge(const AttentionLayer &layer, const SliceRows &slice, int kv_head, int first, int last, int ranges,
           float *states) {
  const int group = layer.heads / layer.kv_heads;
  const size_t stride = state_size(layer.value_dim), range_stride = stride * group * (last - first);
  for (int token = first, i = 0; token < last; token++) {
    float *out = layer.out + (slice.first_row + token) * layer.out_stride;
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++, i++) {
      const State state(states + i * stride, layer.value_dim);
      for (int range = 1; range < ranges; range++) {
        merge_states(state, State(states + range * range_stride + i * stride, layer.value_dim), layer.value_dim);
      }
      finish_row(layer, state, out + static_cast<size_t>(head) * layer.head_dim);
    }
  }
}

void store_keys_and_values(const AttentionLayer &layer, const SliceRows &slice, int kv_head) {
  float key[kMostHeadDim];
  for (int token = 0; token < slice.count; token++) {
    const int row = slice.first_row + token, position = slice.start + token;
    uint8_t *page = page_of(layer, slice, position / kPage, kv_head);
    rotate(layer, row, layer.heads + kv_head, key);
    const float *value = layer.qkv + row * layer.qkv_stride +
                         static_cast<size_t>(layer.heads + layer.kv_heads + kv_head) * layer.head_dim;
    if (layer.kv_format == HR_KV_INT8) {
      Int8Pages::store(layer, page, position % kPage, key, value);
    } else {
      Bf16Pages::store(layer, page, position % kPage, key, value);
    }
  }
}

}  // namespace
}  // namespace HR_ISA
}  // namespace hr
