#include "kernels.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

// clang-format off: these are written in terms of what comes before them
#include "simd_avx2.h"
#include "linear.h"
#include "pages.h"
#include "pages_bf16.h"
#include "pages_int8.h"
#include "attention.h"
// clang-format on

namespace hr {

const Kernels *avx2_kernels() {
  static const Kernels kernels = {
      "avx2",
      avx2::row_bytes,
      avx2::prepare_row,
      avx2::multiply,
      avx2::find_likeliest,
      avx2::store_keys_and_values,
      avx2::attend,
      avx2::merge,
  };
  __builtin_cpu_init();
  const bool runs = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  return runs ? &kernels : nullptr;
}

}  // namespace hr

#else

namespace hr {

const Kernels *avx2_kernels() { return nullptr; }

}  // namespace hr

#endif
