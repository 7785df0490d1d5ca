// A decoder of the Llama lineage over packed weights and a paged KV cache; see hr_model_spec and hr_batch.
#pragma once

#include <vector>

#include "attention_plan.h"
#include "buffer.h"
#include "kernels.h"
#include "pool.h"

namespace hr {

// Activations of one step in the form that the weights multiply.
class PreparedRows {
 public:
  Rows reserve(const Kernels &kernels, int format, int rows, int depth);

 private:
  Buffer<uint8_t> data_;
  Buffer<float> scales_;
  Buffer<int32_t> group_sums_;
  Buffer<float> half_sums_;
};

// out(rows x columns) = rows times the matrix, as `out.finish` says.
void multiply(Pool &pool, const Kernels &kernels, const hr_linear &linear, const Rows &rows, int count,
              const Output &out);
// Every row of x (stride `stride`) prepared for `format`.
Rows prepare(Pool &pool, const Kernels &kernels, int format, PreparedRows &to, const float *x, size_t stride,
             const float *norm, float eps, int depth, int count);

// Cosines and sines of every row's position, [rows][head_dim / 2].
struct Angles {
  const float *cosines, *sines;
};

class AngleTable {
 public:
  Angles find(Pool &pool, const float *frequencies, int half, float factor, const hr_batch &batch);

 private:
  Buffer<float> cosines_, sines_;
};

class Model {
 public:
  Model(Pool &pool, const Kernels &kernels, const hr_model_spec &spec);

  void step(const hr_batch &batch);
  void logits(const int32_t *rows, int count, float *out);
  void copy_block(int source, int target);

 private:
  void embed(const hr_batch &batch);
  void embed_row(int32_t token, float *out) const;
  void compute_layer(int index, const hr_batch &batch);
  AttentionLayer attention_of(int index) const;
  void gather(const int32_t *rows, int count);
  void find_tokens(const hr_batch &batch);

  Pool &pool_;
  const Kernels &kernels_;
  const hr_model_spec spec_;
  const std::vector<hr_layer> layers_;
  const int value_dim_;
  const size_t block_bytes_, layer_bytes_;  // of the cache of one layer
  const size_t hidden_stride_, qkv_stride_, heads_stride_, mlp_stride_;

  Buffer<float> hidden_, qkv_, attended_, mlp_, gathered_;
  AngleTable angle_table_;
  AttentionPlan attention_plan_;
  Angles angles_{};
  PreparedRows prepared_;
  Buffer<float> chunk_best_values_;
  Buffer<int32_t> chunk_best_;
};

}  // namespace hr
