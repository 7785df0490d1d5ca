#include "kernels.h"

#include <math.h>
#include <string.h>

// clang-format off: these are written in terms of what comes before them
#include "simd_portable.h"
#include "linear.h"
#include "pages.h"
#include "pages_bf16.h"
#include "pages_int8.h"
#include "attention.h"
// clang-format on

namespace hr {

const Kernels *portable_kernels() {
  static const Kernels kernels = {
      "portable",
      portable::row_bytes,
      portable::prepare_row,
      portable::multiply,
      portable::find_likeliest,
      portable::store_keys_and_values,
      portable::attend,
      portable::merge,
  };
  return &kernels;
}

}  // namespace hr
