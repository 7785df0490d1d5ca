// Matrix products with packed weights. Included once per instruction set, after its simd header.
//
// An output is one chain of additions over the inputs in their order, whatever the number of rows and panels that are
// computed beside it: so results depend neither on the batch nor on the number of threads.

namespace hr {
namespace HR_ISA {
namespace {

constexpr float kByteMost = 127.0f;

inline F32 exponential(F32 x) {
  // 2^n * e^f with |f| <= ln 2 / 2; the polynomial's relative error is 2e-7.
  x = max(x, broadcast(-87.0f));
  const F32 n = round(mul(x, broadcast(1.44269504f)));
  const F32 f = fma(n, broadcast(-1.42860677e-6f), fma(n, broadcast(-0.693145752f), x));
  F32 p = broadcast(1.0f / 720);
  p = fma(p, f, broadcast(1.0f / 120));
  p = fma(p, f, broadcast(1.0f / 24));
  p = fma(p, f, broadcast(1.0f / 6));
  p = fma(p, f, broadcast(0.5f));
  p = fma(p, f, broadcast(1.0f));
  p = fma(p, f, broadcast(1.0f));
  return scale_by_power(p, n);
}

inline F32 silu(F32 x) {
  // exp(-x) of a large negative x would overflow; from -80 on the result is 0 to float precision.
  const F32 one = broadcast(1.0f);
  const F32 bounded = max(x, broadcast(-80.0f));
  return div(x, add(one, exponential(sub(zero(), bounded))));
}

// Where a tile's columns of weights and its rows begin: with these in registers the loops over the inputs compute no
// addresses.
template <int MT, int NT>
struct Origins {
  const uint8_t *column[NT];
  const uint8_t *row[MT];

  Origins(const hr_linear &w, const Rows &rows, int first_row, int first_panel) {
    const size_t stride = panel_bytes(w.format, w.depth);
    const auto *weights = static_cast<const uint8_t *>(w.weights) + first_panel * stride;
    for (int n = 0; n < NT; n++) column[n] = weights + n * stride;
    for (int m = 0; m < MT; m++) row[m] = rows.data + (first_row + m) * rows.stride;
  }
};

// What a pass over a tile's weights asks the memory for meanwhile, told the place of each step in a column.

// Later tiles of rows find the weights in the cache: prompts lost 6 % by asking for them again.
struct FetchNothing {
  void operator()(size_t) const {}
};

// The weights of 20 steps later. The hardware foresees them too, but not as far: a stream alone is bound by memory, and
// gains 10 to 20 %.
template <int NT>
struct FetchOwn {
  const uint8_t *column[NT];

  FetchOwn(const hr_linear &w, int first_panel) {
    const size_t stride = panel_bytes(w.format, w.depth);
    for (int n = 0; n < NT; n++) column[n] = static_cast<const uint8_t *>(w.weights) + (first_panel + n) * stride;
  }

  void operator()(size_t place) const {
    for (int n = 0; n < NT; n++) __builtin_prefetch(column[n] + place + 1280);
  }
};

// Some columns of the tile that this thread most likely multiplies next, into the second-level cache. With more rows than
// a tile has, its weights are multiplied several times: the memory would rest in all passes but the first.
template <int Columns>
struct FetchNext {
  const uint8_t *column[Columns];

  FetchNext(const hr_linear &w, int first_panel) {
    const size_t stride = panel_bytes(w.format, w.depth);
    for (int n = 0; n < Columns; n++) column[n] = static_cast<const uint8_t *>(w.weights) + (first_panel + n) * stride;
  }

  void operator()(size_t place) const {
    for (int n = 0; n < Columns; n++) __builtin_prefetch(column[n] + place, 0, 2);
  }
};

// Input k of rows of floats, times its weights.
template <int MT, int NT>
inline void add_row_products(const F32 (&column)[NT], const uint8_t *const (&row)[MT], size_t k, F32 (&out)[MT][NT]) {
  for (int m = 0; m < MT; m++) {
    const F32 value = broadcast(reinterpret_cast<const float *>(row[m])[k]);
    for (int n = 0; n < NT; n++) out[m][n] = fma(column[n], value, out[m][n]);
  }
}

struct Bf16Format {
  static constexpr int kRows = kTileRows;
  static constexpr int kPanels = kTilePanels;
  static constexpr int kOutputs = kTileOutputs;

  template <int MT, int NT, typename Fetch>
  static void multiply(const hr_linear &w, const Rows &rows, int row, int panel, const Fetch &fetch,
                       F32 (&out)[MT][NT]) {
    const Origins<MT, NT> at(w, rows, row, panel);
    for (int m = 0; m < MT; m++) {
      for (int n = 0; n < NT; n++) out[m][n] = zero();
    }
    const size_t pairs = ceil_div(w.depth, 2);
    for (size_t k = 0; k < pairs; k++) {
      fetch(k * 64);
      Bf16Pairs column[NT];
      for (int n = 0; n < NT; n++) {
        column[n] = load_pairs(reinterpret_cast<const uint16_t *>(at.column[n] + k * 64));
      }
      if constexpr (kBf16AsFloats) {
        // One after the other: the widened halves of both would not leave registers for the outputs.
        F32 half[NT];
        for (int n = 0; n < NT; n++) half[n] = first_of(column[n]);
        add_row_products(half, at.row, 2 * k, out);
        for (int n = 0; n < NT; n++) half[n] = second_of(column[n]);
        add_row_products(half, at.row, 2 * k + 1, out);
      } else {
        for (int m = 0; m < MT; m++) {
          const Bf16Pairs value = broadcast_pair(reinterpret_cast<const uint32_t *>(at.row[m])[k]);
          for (int n = 0; n < NT; n++) out[m][n] = dot_pairs(out[m][n], column[n], value);
        }
      }
    }
  }
};

struct FloatFormat {
  static constexpr int kRows = kTileRows;
  static constexpr int kPanels = kTilePanels;
  static constexpr int kOutputs = kTileOutputs;

  template <int MT, int NT, typename Fetch>
  static void multiply(const hr_linear &w, const Rows &rows, int row, int panel, const Fetch &fetch,
                       F32 (&out)[MT][NT]) {
    const Origins<MT, NT> at(w, rows, row, panel);
    for (int m = 0; m < MT; m++) {
      for (int n = 0; n < NT; n++) out[m][n] = zero();
    }
    const size_t depth = w.depth;
    for (size_t k = 0; k < depth; k++) {
      fetch(k * 64);
      F32 column[NT];
      for (int n = 0; n < NT; n++) column[n] = load(reinterpret_cast<const float *>(at.column[n] + k * 64));
      add_row_products(column, at.row, k, out);
    }
  }
};

// Where the integer sums of one group's products begin.
template <int MT, int NT>
inline void start_group(const Rows &rows, int row, int group, int excess, I32 (&sum)[MT][NT]) {
  for (int m = 0; m < MT; m++) {
    // Stored weights are too large by a constant, so the sum is by so many times the sum of the row.
    const int32_t start = -excess * rows.group_sums[static_cast<size_t>(row + m) * rows.groups + group];
    for (int n = 0; n < NT; n++) sum[m][n] = broadcast_int(start);
  }
}

inline F32 group_scale(const Rows &rows, int row, int group) {
  return broadcast(rows.scales[static_cast<size_t>(row) * rows.groups + group]);
}

struct Int8Format {
  static constexpr int kRows = kGroupedTileRows;
  static constexpr int kPanels = kGroupedTilePanels;
  static constexpr int kOutputs = kGroupedTileOutputs;

  template <int MT, int NT, typename Fetch>
  static void multiply(const hr_linear &w, const Rows &rows, int row, int panel, const Fetch &fetch,
                       F32 (&out)[MT][NT]) {
    const Origins<MT, NT> at(w, rows, row, panel);
    for (int m = 0; m < MT; m++) {
      for (int n = 0; n < NT; n++) out[m][n] = zero();
    }
    const size_t quads = ceil_div(w.depth, 4);
    for (int group = 0; group < rows.groups; group++) {
      I32 sum[MT][NT];
      start_group<MT, NT>(rows, row, group, kUnsignedWeights ? 128 : 0, sum);
      const size_t end = static_cast<size_t>(group + 1) * (kGroup / 4);
      for (size_t k = static_cast<size_t>(group) * (kGroup / 4); k < (end < quads ? end : quads); k++) {
        fetch(k * 64);
        I32 column[NT];
        for (int n = 0; n < NT; n++) column[n] = load_int(at.column[n] + k * 64);
        for (int m = 0; m < MT; m++) {
          const I32 value = broadcast_int(reinterpret_cast<const int32_t *>(at.row[m])[k]);
          for (int n = 0; n < NT; n++) sum[m][n] = dot_int8(sum[m][n], value, column[n]);
        }
      }
      for (int m = 0; m < MT; m++) {
        const F32 scale = group_scale(rows, row + m, group);
        for (int n = 0; n < NT; n++) out[m][n] = fma(to_float(sum[m][n]), scale, out[m][n]);
      }
    }
    for (int n = 0; n < NT; n++) {
      const F32 scale = load(static_cast<const float *>(w.scales) + (panel + n) * kPanel);
      for (int m = 0; m < MT; m++) out[m][n] = mul(out[m][n], scale);
    }
  }
};

struct Int4Format {
  static constexpr int kRows = kGroupedTileRows;
  static constexpr int kPanels = kGroupedTilePanels;
  static constexpr int kOutputs = kGroupedTileOutputs;

  template <int MT, int NT, typename Fetch>
  static void multiply(const hr_linear &w, const Rows &rows, int row, int panel, const Fetch &fetch,
                       F32 (&out)[MT][NT]) {
    const Origins<MT, NT> at(w, rows, row, panel);
    for (int m = 0; m < MT; m++) {
      for (int n = 0; n < NT; n++) out[m][n] = zero();
    }
    for (int group = 0; group < rows.groups; group++) {
      const size_t place = static_cast<size_t>(group) * kNibbleGroupBytes;
      const auto step = [&](int n, int which) {
        return load_half(reinterpret_cast<const uint16_t *>(at.column[n] + place + kNibbleBytes) + which * kPanel);
      };
      F32 sum[MT][NT];  // in units of the row's scale
      for (int half = 0; half < 2; half++) {
        NibbleSums products[MT][NT];
        add_half_group<MT, NT>(at, 2 * group + half, place + half * (kNibbleBytes / 2), fetch, products);
        for (int n = 0; n < NT; n++) {
          const F32 scale = step(n, half);
          for (int m = 0; m < MT; m++) {
            const F32 product = to_float(products[m][n]);
            sum[m][n] = half == 0 ? mul(product, scale) : fma(product, scale, sum[m][n]);
          }
        }
      }
      for (int n = 0; n < NT; n++) {
        const F32 least[2] = {step(n, 2), step(n, 3)};
        for (int m = 0; m < MT; m++) {
          const float *half_sums = rows.half_sums + (static_cast<size_t>(row + m) * rows.groups + group) * 2;
          out[m][n] = fma(sum[m][n], group_scale(rows, row + m, group), out[m][n]);
          out[m][n] = fma(least[0], broadcast(half_sums[0]), out[m][n]);
          out[m][n] = fma(least[1], broadcast(half_sums[1]), out[m][n]);
        }
      }
    }
  }

 private:
  // Sums of 32 inputs' products of nibbles, which lie at `place` of each column, and bytes.
  template <int MT, int NT, typename Fetch>
  static void add_half_group(const Origins<MT, NT> &at, size_t half_group, size_t place, const Fetch &fetch,
                             NibbleSums (&sum)[MT][NT]) {
    for (int m = 0; m < MT; m++) {
      for (int n = 0; n < NT; n++) sum[m][n] = zero_nibbles();
    }
    for (size_t k = 0; k < kHalfGroup / 8; k++) {
      fetch(place + k * 64);
      I32 low[NT], high[NT];
      for (int n = 0; n < NT; n++) {
        const I32 packed = load_int(at.column[n] + place + k * 64);
        low[n] = low_nibbles(packed);
        high[n] = high_nibbles(packed);
      }
      for (int m = 0; m < MT; m++) {
        const auto *quads = reinterpret_cast<const int32_t *>(at.row[m] + half_group * kHalfGroup) + 2 * k;
        const I32 first = broadcast_int(quads[0]), second = broadcast_int(quads[1]);
        for (int n = 0; n < NT; n++) sum[m][n] = dot_nibbles(sum[m][n], first, low[n]);
        for (int n = 0; n < NT; n++) sum[m][n] = dot_nibbles(sum[m][n], second, high[n]);
      }
    }
  }
};

template <int MT, int NT>
void finish(const hr_linear &w, int row, int panel, F32 (&tile)[MT][NT], const Output &out) {
  if (w.bias != nullptr) {
    for (int n = 0; n < NT; n++) {
      const F32 bias = load(w.bias + (panel + n) * kPanel);
      for (int m = 0; m < MT; m++) tile[m][n] = add(tile[m][n], bias);
    }
  }
  for (int m = 0; m < MT; m++) {
    float *to = out.data + (row + m) * out.stride;
    switch (out.finish) {
      case Finish::kStore:
        for (int n = 0; n < NT; n++) store(to + (panel + n) * kPanel, tile[m][n]);
        break;
      case Finish::kAdd:
        for (int n = 0; n < NT; n++) {
          float *at = to + (panel + n) * kPanel;
          store(at, add(load(at), tile[m][n]));
        }
        break;
      case Finish::kSiluMul:  // panels come in pairs: a gate's, then its up's
        for (int n = 0; n + 1 < NT; n += 2) {
          store(to + (panel + n) / 2 * kPanel, mul(silu(tile[m][n]), tile[m][n + 1]));
        }
        break;
    }
  }
}

template <typename Format, int NT, int MT = Format::kRows, typename Fetch>
void multiply_tile(const hr_linear &w, const Rows &rows, int row, int count, int panel, const Fetch &fetch,
                   const Output &out) {
  if constexpr (MT > 1) {
    if (count < MT) {
      multiply_tile<Format, NT, MT - 1>(w, rows, row, count, panel, fetch, out);
      return;
    }
  }
  F32 tile[MT][NT];
  if constexpr (MT * NT <= Format::kOutputs) {
    Format::template multiply<MT, NT>(w, rows, row, panel, fetch, tile);
  } else {  // a panel after the other: outputs in memory would cost more than rows read again
    F32 column[MT][1];
    for (int n = 0; n < NT; n++) {
      if (n == 0) {
        Format::template multiply<MT, 1>(w, rows, row, panel, fetch, column);
      } else {
        Format::template multiply<MT, 1>(w, rows, row, panel + n, FetchNothing(), column);
      }
      for (int m = 0; m < MT; m++) tile[m][n] = column[m][0];
    }
  }
  finish<MT, NT>(w, row, panel, tile, out);
}

// Rows in tiles of nearly equal height: 8 rows are 4 and 4, not 6 and 2. `next` is the panel at which this thread most
// likely goes on; its weights are asked for in equal parts by the passes over these.
template <typename Format, int NT>
void multiply_rows(const hr_linear &w, const Rows &rows, int first, int last, int panel, int next, const Output &out) {
  const int tiles = ceil_div(last - first, Format::kRows);
  const bool fetch_next = tiles > 1 && next + NT <= w.panels;
  for (int tile = 0; tile < tiles; tile++) {
    const int from = first + (last - first) * tile / tiles;
    const int count = first + (last - first) * (tile + 1) / tiles - from;
    if (fetch_next && NT > 2 && tiles < NT && 2 * tile < NT) {
      multiply_tile<Format, NT>(w, rows, from, count, panel, FetchNext<2>(w, next + 2 * tile), out);
    } else if (fetch_next && (NT <= 2 || tiles >= NT) && tile < NT) {
      multiply_tile<Format, NT>(w, rows, from, count, panel, FetchNext<1>(w, next + tile), out);
    } else if (!fetch_next && tile == 0) {
      multiply_tile<Format, NT>(w, rows, from, count, panel, FetchOwn<NT>(w, panel), out);
    } else {
      multiply_tile<Format, NT>(w, rows, from, count, panel, FetchNothing(), out);
    }
  }
}

template <typename Format>
void multiply_panels(const hr_linear &w, const Rows &rows, int first_row, int last_row, const Panels &panels,
                     const Output &out) {
  const auto after = [&](int panel) { return panel < panels.last ? panel : panel - panels.last + panels.next; };
  int panel = panels.first;
  for (; panel + Format::kPanels <= panels.last; panel += Format::kPanels) {
    multiply_rows<Format, Format::kPanels>(w, rows, first_row, last_row, panel, after(panel + Format::kPanels), out);
  }
  if constexpr (Format::kPanels > 2) {
    for (; panel + 2 <= panels.last; panel += 2) {
      multiply_rows<Format, 2>(w, rows, first_row, last_row, panel, after(panel + 2), out);
    }
  }
  for (; panel < panels.last; panel++) {
    multiply_rows<Format, 1>(w, rows, first_row, last_row, panel, after(panel + 1), out);
  }
}

void multiply(const hr_linear &w, const Rows &rows, int first_row, int last_row, const Panels &panels,
              const Output &out) {
  switch (w.format) {
    case HR_BF16: return multiply_panels<Bf16Format>(w, rows, first_row, last_row, panels, out);
    case HR_INT8: return multiply_panels<Int8Format>(w, rows, first_row, last_row, panels, out);
    case HR_INT4: return multiply_panels<Int4Format>(w, rows, first_row, last_row, panels, out);
    default: return multiply_panels<FloatFormat>(w, rows, first_row, last_row, panels, out);
  }
}

// x * factor, times the norm's weights if there are any.
inline F32 normalised(const float *x, const float *norm, F32 factor, int k) {
  const F32 scaled = mul(load(x + k), factor);
  return norm == nullptr ? scaled : mul(scaled, load(norm + k));
}

float inverse_root_mean_square(const float *x, float eps, int depth, int padded) {
  F32 squares = zero();
  for (int k = 0; k < padded; k += 16) squares = fma(load(x + k), load(x + k), squares);
  return 1.0f / sqrtf(sum(squares) / static_cast<float>(depth) + eps);
}

// Signed bytes of one row, and their scales: the largest magnitude of a group becomes 127. A group with a NaN gets a NaN
// as its scale, and so has outputs that are not numbers, as it should.
void quantise_row(const float *x, const float *norm, F32 factor, const Rows &out, int row) {
  auto *bytes = reinterpret_cast<int8_t *>(out.data + row * out.stride);
  for (int group = 0; group < out.groups; group++) {
    const int first = group * kGroup;
    F32 value[kGroup / 16], magnitude = zero();
    for (int i = 0; i < kGroup / 16; i++) {
      value[i] = normalised(x, norm, factor, first + i * 16);
      magnitude = max_magnitude(magnitude, value[i]);
    }
    const float most = largest_magnitude(magnitude);
    const F32 to_bytes = broadcast(most > 0 ? kByteMost / most : 0.0f);
    for (int i = 0; i < kGroup / 16; i++) store_signed_bytes(bytes + first + i * 16, mul(value[i], to_bytes));
    int32_t total[2] = {0, 0};
    for (int half = 0; half < 2; half++) {
      for (int i = 0; i < kHalfGroup; i++) total[half] += bytes[first + half * kHalfGroup + i];
    }
    const size_t at = static_cast<size_t>(row) * out.groups + group;
    const float scale = most / kByteMost;
    out.scales[at] = scale;
    out.group_sums[at] = total[0] + total[1];
    for (int half = 0; half < 2; half++) out.half_sums[2 * at + half] = static_cast<float>(total[half]) * scale;
  }
}

size_t row_bytes(int format, int depth) {
  const bool floats = format == HR_FLOAT || (format == HR_BF16 && kBf16AsFloats);
  return static_cast<size_t>(pad64(depth)) * (floats ? 4 : format == HR_BF16 ? 2 : 1);
}

void prepare_row(int format, const float *x, const float *norm, float eps, int depth, const Rows &out, int row) {
  const int padded = pad64(depth);
  const F32 factor = broadcast(norm == nullptr ? 1.0f : inverse_root_mean_square(x, eps, depth, padded));
  uint8_t *to = out.data + row * out.stride;
  if (format == HR_BF16) {
    for (int k = 0; k < padded; k += 16) {
      keep_bf16(to, k, normalised(x, norm, factor, k));
    }
  } else if (format == HR_FLOAT) {
    for (int k = 0; k < padded; k += 16) store(reinterpret_cast<float *>(to) + k, normalised(x, norm, factor, k));
  } else {
    quantise_row(x, norm, factor, out, row);
  }
}

void find_likeliest(const float *logits, int count, int first, float *best_value, int32_t *best) {
  if (*best < 0 && *best_value != *best_value) return;  // an earlier logit was not finite
  // Times zero, a finite number adds nothing, another makes the sum a NaN. Whole vectors: the padding is zero.
  F32 most = broadcast(-INFINITY), nothing = zero();
  int whole = 0;
  for (; whole + kPanel <= count; whole += kPanel) {
    const F32 x = load(logits + whole);
    most = max(most, x);
    nothing = fma(x, zero(), nothing);
  }
  float largest_logit = largest(most), check = sum(nothing);
  for (int i = whole; i < count; i++) {
    largest_logit = logits[i] > largest_logit ? logits[i] : largest_logit;
    check += logits[i] * 0.0f;
  }
  if (check != 0.0f) {
    *best_value = NAN;
    *best = -1;
    return;
  }
  if (largest_logit > *best_value) {
    int at = 0;
    while (logits[at] != largest_logit) at++;
    *best_value = largest_logit;
    *best = first + at;
  }
}

}  // namespace
}  // namespace HR_ISA
}  // namespace hr
