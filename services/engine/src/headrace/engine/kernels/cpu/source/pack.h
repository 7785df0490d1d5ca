// Float matrices to panels; see hr_pack.
#pragma once

#include "pool.h"

namespace hr {

struct Packed {
  int format;
  int first_panel, panel_step;
  void *weights;
  void *scales;
};

void pack(Pool &pool, const float *rows, int columns, int depth, const Packed &to);

}  // namespace hr
