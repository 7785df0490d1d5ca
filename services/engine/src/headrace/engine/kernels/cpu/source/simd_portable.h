// Sixteen floats in an array: plain C++ for every other machine, vectorised as far as the compiler sees it.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "half.h"

#define HR_ISA portable

namespace hr {
namespace portable {
namespace {

constexpr int kTileRows = 2;
constexpr int kTilePanels = 2;
constexpr int kTileOutputs = 4;
constexpr int kGroupedTilePanels = 2;
constexpr int kGroupedTileRows = 2;
constexpr int kGroupedTileOutputs = 4;
constexpr int kAttentionRegisters = 4;
constexpr bool kBf16AsFloats = false;
constexpr bool kUnsignedWeights = false;

struct F32 {
  float v[16];
};
struct Bf16Pairs {
  uint32_t v[16];
};
struct I32 {
  int32_t v[16];
};

template <typename Lane>
inline F32 lanes(const Lane &lane) {
  F32 out;
  for (int i = 0; i < 16; i++) out.v[i] = lane(i);
  return out;
}
inline float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

inline F32 broadcast(float x) {
  return lanes([&](int) { return x; });
}
inline F32 zero() { return broadcast(0.0f); }
inline F32 load(const float *p) {
  return lanes([&](int i) { return p[i]; });
}
inline void store_first(float *p, F32 x, int count) {
  for (int i = 0; i < count; i++) p[i] = x.v[i];
}
inline void store(float *p, F32 x) { store_first(p, x, 16); }
inline F32 add(F32 a, F32 b) {
  return lanes([&](int i) { return a.v[i] + b.v[i]; });
}
inline F32 sub(F32 a, F32 b) {
  return lanes([&](int i) { return a.v[i] - b.v[i]; });
}
inline F32 mul(F32 a, F32 b) {
  return lanes([&](int i) { return a.v[i] * b.v[i]; });
}
inline F32 div(F32 a, F32 b) {
  return lanes([&](int i) { return a.v[i] / b.v[i]; });
}
inline F32 fma(F32 a, F32 b, F32 c) {
  return lanes([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline F32 max(F32 a, F32 b) {
  return lanes([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline F32 round(F32 x) {
  return lanes([&](int i) { return nearbyintf(x.v[i]); });
}
inline float sum(F32 x) {
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; i++) x.v[i] += x.v[i + width];
  }
  return x.v[0];
}
inline float largest(F32 x) {
  for (int i = 1; i < 16; i++) x.v[0] = x.v[i] > x.v[0] ? x.v[i] : x.v[0];
  return x.v[0];
}
inline F32 max_magnitude(F32 a, F32 b) {
  return lanes([&](int i) {
    const uint32_t x = to_bits(a.v[i]), y = to_bits(b.v[i]) & 0x7fffffff;
    return from_bits(x > y ? x : y);
  });
}
inline float largest_magnitude(F32 x) {
  uint32_t most = 0;
  for (int i = 0; i < 16; i++) most = to_bits(x.v[i]) > most ? to_bits(x.v[i]) : most;
  return from_bits(most);
}
inline F32 scale_by_power(F32 x, F32 n) {
  return lanes([&](int i) { return x.v[i] * from_bits(static_cast<uint32_t>(static_cast<int>(n.v[i]) + 127) << 23); });
}
inline F32 keep_lanes(F32 x, int first, int last, F32 other) {
  return lanes([&](int i) { return i >= first && i < last ? x.v[i] : other.v[i]; });
}

inline F32 load_bf16(const uint16_t *p) {
  return lanes([&](int i) { return from_bits(static_cast<uint32_t>(p[i]) << 16); });
}
inline F32 load_half(const uint16_t *p) {
  return lanes([&](int i) { return from_half(p[i]); });
}
inline uint16_t to_bf16(float x) {
  const uint32_t bits = to_bits(x);
  if (x != x) return static_cast<uint16_t>((bits | 0x400000) >> 16);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void store_bf16(uint16_t *p, F32 x) {
  for (int i = 0; i < 16; i++) p[i] = to_bf16(x.v[i]);
}
inline void keep_bf16(uint8_t *row, int k, F32 x) { store_bf16(reinterpret_cast<uint16_t *>(row) + k, x); }
inline Bf16Pairs load_pairs(const uint16_t *p) {
  Bf16Pairs out;
  memcpy(out.v, p, sizeof out.v);
  return out;
}
inline Bf16Pairs broadcast_pair(uint32_t pair) {
  Bf16Pairs out;
  for (int i = 0; i < 16; i++) out.v[i] = pair;
  return out;
}
inline F32 first_of(Bf16Pairs x) {
  return lanes([&](int i) { return from_bits(x.v[i] << 16); });
}
inline F32 second_of(Bf16Pairs x) {
  return lanes([&](int i) { return from_bits(x.v[i] & 0xffff0000); });
}
inline F32 dot_pairs(F32 sum, Bf16Pairs a, Bf16Pairs b) {
  return lanes([&](int i) {
    const float low = sum.v[i] + from_bits(a.v[i] << 16) * from_bits(b.v[i] << 16);
    return low + from_bits(a.v[i] & 0xffff0000) * from_bits(b.v[i] & 0xffff0000);
  });
}

template <typename Lane>
inline I32 int_lanes(const Lane &lane) {
  I32 out;
  for (int i = 0; i < 16; i++) out.v[i] = lane(i);
  return out;
}
inline I32 broadcast_int(int32_t x) {
  return int_lanes([&](int) { return x; });
}
inline I32 zero_int() { return broadcast_int(0); }
inline I32 load_int(const void *p) {
  I32 out;
  memcpy(out.v, p, sizeof out.v);
  return out;
}
inline I32 sub_int(I32 a, I32 b) {
  return int_lanes([&](int i) { return a.v[i] - b.v[i]; });
}
inline F32 to_float(I32 x) {
  return lanes([&](int i) { return static_cast<float>(x.v[i]); });
}
inline I32 low_nibbles(I32 x) {
  return int_lanes([&](int i) { return x.v[i] & 0x0f0f0f0f; });
}
inline I32 high_nibbles(I32 x) {
  return int_lanes([&](int i) { return x.v[i] >> 4 & 0x0f0f0f0f; });
}
inline int32_t dot_bytes(int32_t row, int32_t weights) {
  int8_t a[4], b[4];
  memcpy(a, &row, 4);
  memcpy(b, &weights, 4);
  return a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3];
}
inline I32 dot_int8(I32 sum, I32 row, I32 weights) {
  return int_lanes(
      [&](int i) { return sum.v[i] + dot_bytes(row.v[i], weights.v[i] ^ static_cast<int32_t>(0x80808080u)); });
}
inline I32 dot_unsigned(I32 sum, I32 row, I32 weights) {
  return int_lanes([&](int i) { return sum.v[i] + dot_bytes(row.v[i], weights.v[i]); });
}
using NibbleSums = I32;
inline NibbleSums zero_nibbles() { return zero_int(); }
inline NibbleSums dot_nibbles(NibbleSums sum, I32 row, I32 nibbles) { return dot_unsigned(sum, row, nibbles); }
inline int to_byte(float x) {  // a NaN fails both comparisons; its row's scale is NaN, so any byte will do
  if (!(x > -128.0f)) return -128;
  return x < 127.0f ? static_cast<int>(nearbyintf(x)) : 127;
}
inline void store_signed_bytes(int8_t *p, F32 x) {
  for (int i = 0; i < 16; i++) p[i] = static_cast<int8_t>(to_byte(x.v[i]));
}

}  // namespace
}  // namespace portable
}  // namespace hr
