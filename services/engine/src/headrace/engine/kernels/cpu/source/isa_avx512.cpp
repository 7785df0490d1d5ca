#include "kernels.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__)

// clang-format off: these are written in terms of what comes before them
#include "simd_avx512.h"
#include "linear.h"
#include "pages.h"
#include "pages_bf16.h"
#include "pages_int8.h"
#include "attention.h"
// clang-format on

namespace hr {

const Kernels *avx512_kernels() {
  static const Kernels kernels = {
      "avx512",
      avx512::row_bytes,
      avx512::prepare_row,
      avx512::multiply,
      avx512::find_likeliest,
      avx512::store_keys_and_values,
      avx512::attend,
      avx512::merge,
  };
  __builtin_cpu_init();
  const bool runs = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
                    __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512dq");
  return runs ? &kernels : nullptr;
}

}  // namespace hr

#else

namespace hr {

const Kernels *avx512_kernels() { return nullptr; }

}  // namespace hr

#endif
