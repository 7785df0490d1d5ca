// 16-bit floats in plain C++, for packing and for machines without an instruction for them. Right while denormals count as
// zero, too: no float here is one.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

namespace hr {

constexpr float kHalfMost = 65504.0f;

inline float from_half(uint16_t half) {
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  float value;
  if (exponent == 0) {
    value = static_cast<float>(fraction) * 0x1p-24f;
  } else {
    const uint32_t bits = static_cast<uint32_t>(exponent + 112) << 23 | static_cast<uint32_t>(fraction) << 13;
    memcpy(&value, &bits, 4);
  }
  return half & 0x8000 ? -value : value;
}

// To the nearest, ties to even; what is too large becomes the largest.
inline uint16_t to_half(float x) {
  const uint16_t sign = x < 0 ? 0x8000 : 0;
  const float magnitude = fabsf(x) < kHalfMost ? fabsf(x) : kHalfMost;
  if (magnitude < 0x1p-14f) return static_cast<uint16_t>(sign | static_cast<int>(nearbyintf(magnitude * 0x1p24f)));
  uint32_t bits;
  memcpy(&bits, &magnitude, 4);
  bits += 0xfff + (bits >> 13 & 1);
  return static_cast<uint16_t>(sign | ((bits >> 13) - (112u << 10)));
}

}  // namespace hr
