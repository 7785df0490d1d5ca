// Sixteen floats in one register: AVX-512 with BF16 and VNNI (Zen 4, Cooper Lake, Sapphire Rapids and later).
#pragma once

#include <immintrin.h>
#include <stdint.h>

#define HR_ISA avx512

namespace hr {
namespace avx512 {
namespace {

// 24 accumulators, 4 columns of weights and a broadcast fill the 32 registers.
constexpr int kTileRows = 6;
constexpr int kTilePanels = 4;
constexpr int kTileOutputs = 24;
constexpr int kGroupedTilePanels = 2;  // sums of groups need a second set of accumulators
constexpr int kGroupedTileRows = 4;
constexpr int kGroupedTileOutputs = 8;
constexpr int kAttentionRegisters = 24;  // for the outputs of the query rows of one tile
constexpr bool kBf16AsFloats = false;
constexpr bool kUnsignedWeights = true;  // dot_int8 counts stored weights as they are, 128 too large

struct F32 {
  __m512 v;
};
struct Bf16Pairs {
  __m512bh v;
};
struct I32 {
  __m512i v;
};

inline F32 zero() { return {_mm512_setzero_ps()}; }
inline F32 broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline F32 load(const float *p) { return {_mm512_loadu_ps(p)}; }
inline void store(float *p, F32 x) { _mm512_storeu_ps(p, x.v); }
inline void store_first(float *p, F32 x, int count) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), x.v);
}
inline F32 add(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32 sub(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32 mul(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32 div(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32 round(F32 x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline float sum(F32 x) { return _mm512_reduce_add_ps(x.v); }
inline float largest(F32 x) { return _mm512_reduce_max_ps(x.v); }
// Of absolute values compared as integers: a NaN is larger than any number.
inline F32 max_magnitude(F32 a, F32 b) {
  const __m512i positive = _mm512_set1_epi32(0x7fffffff);
  return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a.v), _mm512_and_si512(_mm512_castps_si512(b.v), positive)))};
}
inline float largest_magnitude(F32 x) {
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epi32(_mm512_castps_si512(x.v)))));
}
// x * 2^n for whole n; x finite, the result not denormal.
inline F32 scale_by_power(F32 x, F32 n) { return {_mm512_scalef_ps(x.v, n.v)}; }
// Lanes first to last - 1 of x, `other` elsewhere.
inline F32 keep_lanes(F32 x, int first, int last, F32 other) {
  const auto lanes = static_cast<__mmask16>(((1u << last) - 1) & ~((1u << first) - 1));
  return {_mm512_mask_mov_ps(other.v, lanes, x.v)};
}

inline F32 load_bf16(const uint16_t *p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
// From 16-bit floats, denormal ones too.
inline F32 load_half(const uint16_t *p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)))};
}
inline void store_bf16(uint16_t *p, F32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v)));
}
inline void keep_bf16(uint8_t *row, int k, F32 x) { store_bf16(reinterpret_cast<uint16_t *>(row) + k, x); }
inline Bf16Pairs load_pairs(const uint16_t *p) { return {reinterpret_cast<__m512bh>(_mm512_loadu_si512(p))}; }
inline Bf16Pairs broadcast_pair(uint32_t pair) {
  return {reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(pair)))};
}
inline F32 first_of(Bf16Pairs x) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(reinterpret_cast<__m512i>(x.v), 16))};
}
inline F32 second_of(Bf16Pairs x) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm512_castsi512_ps(_mm512_and_si512(reinterpret_cast<__m512i>(x.v), upper))};
}
inline F32 dot_pairs(F32 sum, Bf16Pairs a, Bf16Pairs b) { return {_mm512_dpbf16_ps(sum.v, a.v, b.v)}; }

inline I32 zero_int() { return {_mm512_setzero_si512()}; }
inline I32 broadcast_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I32 load_int(const void *p) { return {_mm512_loadu_si512(p)}; }
inline I32 sub_int(I32 a, I32 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline F32 to_float(I32 x) { return {_mm512_cvtepi32_ps(x.v)}; }
inline I32 low_nibbles(I32 x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
inline I32 high_nibbles(I32 x) { return low_nibbles({_mm512_srli_epi16(x.v, 4)}); }
// Four products of unsigned and signed bytes per lane. As an intrinsic, gcc 12 copies the accumulators to other
// registers and back, and runs out of them: 390 instead of 960 GOP/s in tiles of 6 x 4.
inline I32 add_products(I32 sum, I32 unsigned_bytes, I32 signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(unsigned_bytes.v), "v"(signed_bytes.v));
  return sum;
}
inline I32 dot_int8(I32 sum, I32 row, I32 weights) { return add_products(sum, weights, row); }
// Signed bytes times unsigned ones of at most 127.
inline I32 dot_unsigned(I32 sum, I32 bytes, I32 unsigned_bytes) { return add_products(sum, unsigned_bytes, bytes); }
using NibbleSums = I32;
inline NibbleSums zero_nibbles() { return zero_int(); }
inline NibbleSums dot_nibbles(NibbleSums sum, I32 row, I32 nibbles) { return add_products(sum, nibbles, row); }
// Rounded to the nearest integers.
inline void store_signed_bytes(int8_t *p, F32 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x.v)));
}

}  // namespace
}  // namespace avx512
}  // namespace hr
