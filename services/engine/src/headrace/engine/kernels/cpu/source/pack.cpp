#include "pack.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "half.h"
#include "kernels.h"

namespace hr {
namespace {

constexpr float kByteMost = 127.0f;
// Parts of the distance from the middle of a group to its ends that are tried for each end.
constexpr float kRangeParts[] = {1.0f, 0.92f, 0.84f};

uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Halves away from zero: a cast, unlike lrintf, is vectorised without SSE4.
inline int nearest(float x) { return static_cast<int>(x + copysignf(0.5f, x)); }

void pack_bf16(const float *row, int depth, int lane, uint8_t *panel) {
  auto *out = reinterpret_cast<uint16_t *>(panel);
  for (int k = 0; k < depth; k++) out[(k / 2 * kPanel + lane) * 2 + k % 2] = to_bf16(row[k]);
}

void pack_float(const float *row, int depth, int lane, uint8_t *panel) {
  auto *out = reinterpret_cast<float *>(panel);
  for (int k = 0; k < depth; k++) out[k * kPanel + lane] = row[k];
}

void pack_int8(const float *row, int depth, int lane, uint8_t *panel, float *scale) {
  float most = 0;
  for (int k = 0; k < depth; k++) most = std::max(most, fabsf(row[k]));
  *scale = most / kByteMost;
  const float to_bytes = most > 0 ? kByteMost / most : 0;
  for (int k = 0; k < depth; k++) {
    panel[(k / 4 * kPanel + lane) * 4 + k % 4] = static_cast<uint8_t>(nearest(row[k] * to_bytes) + 128);
  }
}

// What the nibbles of a group stand for: nibble * scale + least.
struct Steps {
  float scale, least;
};

Steps rounded(float scale, float least) { return {from_half(to_half(scale)), from_half(to_half(least))}; }

int nibble_of(float x, Steps steps) {
  if (steps.scale == 0) return 0;
  return static_cast<int>(std::min(15.0f, std::max(0.0f, (x - steps.least) / steps.scale)) + 0.5f);
}

float error_of(const float *group, int count, Steps steps) {
  float total = 0;
  for (int i = 0; i < count; i++) {
    const float error = static_cast<float>(nibble_of(group[i], steps)) * steps.scale + steps.least - group[i];
    total += error * error;
  }
  return total;
}

// The steps that bring the nibbles of `steps` closest to the group: a straight line through points.
Steps fitted(const float *group, int count, Steps steps) {
  float nibbles = 0, squares = 0, values = 0, products = 0;
  for (int i = 0; i < count; i++) {
    const auto nibble = static_cast<float>(nibble_of(group[i], steps));
    nibbles += nibble;
    squares += nibble * nibble;
    values += group[i];
    products += nibble * group[i];
  }
  const auto n = static_cast<float>(count);
  const float spread = n * squares - nibbles * nibbles;
  if (spread <= 0) return steps;
  const float scale = (n * products - nibbles * values) / spread;
  return scale > 0 ? rounded(scale, (values - scale * nibbles) / n) : steps;
}

// From the least to the largest weight in 15 steps, exact where the group comes from a 4-bit file; else the best of a few
// shorter ranges, which clip the outermost weights and are closer to all the others.
Steps steps_of(const float *group, int count) {
  const auto [low, high] = std::minmax_element(group, group + count);
  const float middle = (*low + *high) / 2, reach = (*high - *low) / 2;
  const float exact = std::max(fabsf(*low), fabsf(*high)) * 1e-6f;
  Steps best{};
  float least_error = INFINITY;
  for (const float below : kRangeParts) {
    for (const float above : kRangeParts) {
      const Steps steps = rounded(reach * (below + above) / 15, middle - reach * below);
      for (const Steps &tried : {steps, fitted(group, count, steps)}) {
        const float error = error_of(group, count, tried);
        if (error < least_error) {
          least_error = error;
          best = tried;
        }
        if (error <= static_cast<float>(count) * exact * exact) return best;
      }
    }
  }
  return best;
}

void pack_int4(const float *row, int depth, int lane, uint8_t *panel) {
  for (int first = 0; first < depth; first += kHalfGroup) {
    const int count = std::min(kHalfGroup, depth - first);
    const Steps steps = steps_of(row + first, count);
    uint8_t *group = panel + static_cast<size_t>(first / kGroup) * kNibbleGroupBytes;
    uint16_t *at = reinterpret_cast<uint16_t *>(group + kNibbleBytes) + first % kGroup / kHalfGroup * kPanel + lane;
    at[0] = to_half(steps.scale);
    at[2 * kPanel] = to_half(steps.least);
    for (int i = 0; i < count; i++) {
      const int k = first % kGroup + i, nibble = nibble_of(row[first + i], steps);
      uint8_t *pair = group + (k / 8 * kPanel + lane) * 4 + k % 4;
      *pair = static_cast<uint8_t>(*pair | (k % 8 < 4 ? nibble : nibble << 4));
    }
  }
}

}  // namespace

void pack(Pool &pool, const float *rows, int columns, int depth, const Packed &to) {
  pool.run(ceil_div(columns, kPanel), [&](int task, int) {
    const int index = to.first_panel + task * to.panel_step;
    const size_t bytes = panel_bytes(to.format, depth);
    uint8_t *panel = static_cast<uint8_t *>(to.weights) + index * bytes;
    memset(panel, to.format == HR_INT8 ? 128 : 0, bytes);  // zero weights
    for (int lane = 0; lane < kPanel; lane++) {
      const int column = task * kPanel + lane, place = index * kPanel + lane;
      const bool there = column < columns;
      const float *row = rows + static_cast<size_t>(there ? column : 0) * depth;
      const int length = there ? depth : 0;  // a column of padding: zeros
      switch (to.format) {
        case HR_BF16: pack_bf16(row, length, lane, panel); break;
        case HR_INT8: pack_int8(row, length, lane, panel, static_cast<float *>(to.scales) + place); break;
        case HR_INT4: pack_int4(row, length, lane, panel); break;
        default: pack_float(row, length, lane, panel);
      }
    }
  });
}

}  // namespace hr
