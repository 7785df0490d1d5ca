// Sixteen floats in two registers: AVX2 with FMA. bf16 products are two FMAs, 8-bit products two multiply-adds.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#define HR_ISA avx2

namespace hr {
namespace avx2 {
namespace {

constexpr int kTileRows = 6;
constexpr int kTilePanels = 2;
constexpr int kTileOutputs = 6;  // 12 of the 16 registers: 6 rows of one panel, or up to 3 of two
constexpr int kGroupedTilePanels = 2;
constexpr int kGroupedTileRows = 4;
constexpr int kGroupedTileOutputs = 4;
constexpr int kAttentionRegisters = 16;  // more than there are: a page's values are added to a part of them at a time
constexpr bool kBf16AsFloats = true;     // rows are kept as floats, weights widened as they are read
constexpr bool kUnsignedWeights = false;

struct F32 {
  __m256 low, high;
};
struct Bf16Pairs {
  __m256i low, high;
};
struct I32 {
  __m256i low, high;
};

inline F32 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F32 broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F32 load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float *p, F32 x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}
inline void store_first(float *p, F32 x, int count) {
  alignas(32) float lanes[16];
  store(lanes, x);
  for (int i = 0; i < count; i++) p[i] = lanes[i];
}
inline F32 add(F32 a, F32 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline F32 sub(F32 a, F32 b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline F32 mul(F32 a, F32 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline F32 div(F32 a, F32 b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline F32 fma(F32 a, F32 b, F32 c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline F32 round(F32 x) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, nearest), _mm256_round_ps(x.high, nearest)};
}
inline float sum(F32 x) {
  const __m256 eight = _mm256_add_ps(x.low, x.high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float largest(F32 x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
inline F32 max_magnitude(F32 a, F32 b) {
  const __m256i positive = _mm256_set1_epi32(0x7fffffff);
  const auto larger = [positive](__m256 x, __m256 y) {
    return _mm256_castsi256_ps(
        _mm256_max_epi32(_mm256_castps_si256(x), _mm256_and_si256(_mm256_castps_si256(y), positive)));
  };
  return {larger(a.low, b.low), larger(a.high, b.high)};
}
inline float largest_magnitude(F32 x) {
  const __m256i eight = _mm256_max_epi32(_mm256_castps_si256(x.low), _mm256_castps_si256(x.high));
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
  return _mm_cvtss_f32(_mm_castsi128_ps(four));
}
inline F32 scale_by_power(F32 x, F32 n) {
  const auto power = [](__m256 exponent) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(exponent), _mm256_set1_epi32(127)), 23));
  };
  return {_mm256_mul_ps(x.low, power(n.low)), _mm256_mul_ps(x.high, power(n.high))};
}
inline F32 keep_lanes(F32 x, int first, int last, F32 other) {
  const __m256i from = _mm256_set1_epi32(first - 1), to = _mm256_set1_epi32(last);
  const auto pick = [&](__m256i lane, __m256 a, __m256 b) {
    const __m256i inside = _mm256_and_si256(_mm256_cmpgt_epi32(lane, from), _mm256_cmpgt_epi32(to, lane));
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(inside));
  };
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {pick(lanes, x.low, other.low), pick(_mm256_add_epi32(lanes, _mm256_set1_epi32(8)), x.high, other.high)};
}

inline __m256 widen(const uint16_t *p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline F32 load_bf16(const uint16_t *p) { return {widen(p), widen(p + 8)}; }
// From 16-bit floats, denormal ones too.
inline F32 load_half(const uint16_t *p) {
  const auto *eights = reinterpret_cast<const __m128i *>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(eights)), _mm256_cvtph_ps(_mm_loadu_si128(eights + 1))};
}
// To the nearest, ties to even; a NaN stays one.
inline __m256i rounded(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  return _mm256_srli_epi32(
      _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(up), _mm256_castsi256_ps(quiet), is_nan)), 16);
}
inline void store_bf16(uint16_t *p, F32 x) {
  const __m256i packed = _mm256_packus_epi32(rounded(x.low), rounded(x.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
// Inputs k to k + 15 of a row that bf16 weights multiply.
inline void keep_bf16(uint8_t *row, int k, F32 x) {
  auto *at = reinterpret_cast<__m256i *>(reinterpret_cast<float *>(row) + k);
  _mm256_storeu_si256(at, _mm256_slli_epi32(rounded(x.low), 16));
  _mm256_storeu_si256(at + 1, _mm256_slli_epi32(rounded(x.high), 16));
}
inline Bf16Pairs load_pairs(const uint16_t *p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p + 16))};
}
inline Bf16Pairs broadcast_pair(uint32_t pair) {
  return {_mm256_set1_epi32(static_cast<int>(pair)), _mm256_set1_epi32(static_cast<int>(pair))};
}
inline F32 first_of(Bf16Pairs x) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(x.low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(x.high, 16))};
}
inline F32 second_of(Bf16Pairs x) {
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(x.low, upper)), _mm256_castsi256_ps(_mm256_and_si256(x.high, upper))};
}
inline F32 dot_pairs(F32 sum, Bf16Pairs a, Bf16Pairs b) {
  return fma(second_of(a), second_of(b), fma(first_of(a), first_of(b), sum));
}

inline I32 zero_int() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I32 broadcast_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I32 load_int(const void *p) {
  const auto *halves = static_cast<const __m256i *>(p);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
inline I32 sub_int(I32 a, I32 b) { return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)}; }
inline F32 to_float(I32 x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
inline I32 low_nibbles(I32 x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.low, mask), _mm256_and_si256(x.high, mask)};
}
inline I32 high_nibbles(I32 x) { return low_nibbles({_mm256_srli_epi16(x.low, 4), _mm256_srli_epi16(x.high, 4)}); }
// As intrinsics, gcc 12 orders such additions anew, keeps all products until the end, and runs out of registers.
inline __m256i add_words(__m256i sum, __m256i x) {
  asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(x));
  return sum;
}
inline __m256i add_longs(__m256i sum, __m256i x) {
  asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(x));
  return sum;
}
inline __m256i dot_bytes(__m256i sum, __m256i unsigned_bytes, __m256i signed_bytes) {
  const __m256i pairs = _mm256_maddubs_epi16(unsigned_bytes, signed_bytes);
  return add_longs(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
// |row| times the weight with the row's sign: both within 127, so that two products never overflow 16 bits.
inline __m256i dot_int8_half(__m256i sum, __m256i row, __m256i weights) {
  const __m256i value = _mm256_xor_si256(weights, _mm256_set1_epi8(static_cast<char>(0x80)));
  return dot_bytes(sum, _mm256_abs_epi8(row), _mm256_sign_epi8(value, row));
}
inline I32 dot_int8(I32 sum, I32 row, I32 weights) {
  return {dot_int8_half(sum.low, row.low, weights.low), dot_int8_half(sum.high, row.high, weights.high)};
}
inline I32 dot_unsigned(I32 sum, I32 row, I32 weights) {
  return {dot_bytes(sum.low, weights.low, row.low), dot_bytes(sum.high, weights.high, row.high)};
}
// Products of nibbles in 16 bits: two make at most 3,810, so eight such pairs may be added before they are widened.
struct NibbleSums {
  __m256i low, high;
};
inline NibbleSums zero_nibbles() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline NibbleSums dot_nibbles(NibbleSums sum, I32 row, I32 nibbles) {
  return {add_words(sum.low, _mm256_maddubs_epi16(nibbles.low, row.low)),
          add_words(sum.high, _mm256_maddubs_epi16(nibbles.high, row.high))};
}
inline F32 to_float(NibbleSums x) {
  const __m256i one = _mm256_set1_epi16(1);
  return to_float(I32{_mm256_madd_epi16(x.low, one), _mm256_madd_epi16(x.high, one)});
}
inline __m128i to_signed_bytes(F32 x) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high));
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
  return _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
}
inline void store_signed_bytes(int8_t *p, F32 x) { _mm_storeu_si128(reinterpret_cast<__m128i *>(p), to_signed_bytes(x)); }

}  // namespace
}  // namespace avx2
}  // namespace hr
