#include "pack.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "kernels.h"

namespace hr {
namespace {

constexpr float kByteMost = 127.0f;
// Scales tried for each group of 4-bit weights, as parts of the one that just holds the largest of them: a smaller one
// clips that weight and is closer to all the others.
constexpr float kScaleParts[] = {1.0f, 0.96f, 0.92f, 0.88f, 0.84f, 0.8f, 0.76f, 0.72f, 0.68f, 0.64f};

uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float from_bf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
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

// Squared error of a group in 4 bits with this scale.
float error_of(const float *group, int count, float scale) {
  const float inverse = 1.0f / scale;
  float total = 0;
  for (int k = 0; k < count; k++) {
    const float value = std::min(7.0f, std::max(-8.0f, static_cast<float>(nearest(group[k] * inverse))));
    const float error = value * scale - group[k];
    total += error * error;
  }
  return total;
}

// The scale of a group, rounded to bf16: the weight of largest magnitude becomes about -8, of which there is one more
// than of the positive numbers.
float scale_of(const float *group, int count) {
  float most = 0;
  for (int k = 0; k < count; k++) most = fabsf(group[k]) > fabsf(most) ? group[k] : most;
  float best = 0, least = INFINITY;
  if (most == 0) return 0;
  for (const float part : kScaleParts) {
    const float scale = from_bf16(to_bf16(most / -8.0f * part));
    const float error = scale == 0 ? INFINITY : error_of(group, count, scale);
    if (error < least) {
      least = error;
      best = scale;
    }
  }
  return best;
}

void pack_int4(const float *row, int depth, int lane, uint8_t *panel, uint16_t *scales) {
  for (int first = 0; first < depth; first += kGroup) {
    const int count = std::min(kGroup, depth - first);
    const float scale = scale_of(row + first, count);
    const float inverse = scale == 0 ? 0 : 1.0f / scale;
    scales[first / kGroup * kPanel + lane] = to_bf16(scale);
    for (int i = 0; i < kGroup; i++) {
      const int value = i < count ? std::min(7, std::max(-8, nearest(row[first + i] * inverse))) + 8 : 8;
      const int k = first + i;
      uint8_t *pair = panel + (k / 8 * kPanel + lane) * 4 + k % 4;
      *pair = static_cast<uint8_t>(*pair | (k % 8 < 4 ? value : value << 4));
    }
  }
}

}  // namespace

void pack(Pool &pool, const float *rows, int columns, int depth, const Packed &to) {
  const int groups = ceil_div(depth, kGroup);
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
        case HR_INT4: {
          uint16_t *scales = static_cast<uint16_t *>(to.scales) + static_cast<size_t>(index) * groups * kPanel;
          if (there) {
            pack_int4(row, length, lane, panel, scales);
          } else {
            for (int group = 0; group < groups; group++) scales[group * kPanel + lane] = 0;
          }
          break;
        }
        default: pack_float(row, length, lane, panel);
      }
    }
  });
}

}  // namespace hr
