// The C interface, see headrace_cpu.h.
#include "headrace_cpu.h"

#include <math.h>
#include <string.h>

#include "model.h"
#include "pack.h"

struct hr_pool {
  hr::Pool threads;
  const hr::Kernels *kernels;
};

struct hr_model {
  hr::Model model;
};

namespace {

const hr::Kernels *kernels_of(int32_t isa) {
  switch (isa) {
    case HR_AVX512: return hr::avx512_kernels();
    case HR_AVX2: return hr::avx2_kernels();
    case HR_PORTABLE: return hr::portable_kernels();
    default: return nullptr;
  }
}

}  // namespace

int32_t hr_abi_version(void) { return HR_ABI_VERSION; }

int32_t hr_best_isa(void) {
  int32_t isa = HR_AVX512;
  while (kernels_of(isa) == nullptr) isa--;
  return isa;
}

const char *hr_isa_name(int32_t isa) {
  static const char *const names[] = {"portable", "avx2", "avx512"};
  return isa >= HR_PORTABLE && isa <= HR_AVX512 ? names[isa] : "unknown";
}

hr_pool *hr_pool_create(int32_t threads, int32_t isa) {
  const hr::Kernels *kernels = kernels_of(isa);
  return kernels == nullptr ? nullptr : new hr_pool{hr::Pool(threads), kernels};
}

void hr_pool_destroy(hr_pool *pool) { delete pool; }

int64_t hr_weights_bytes(int32_t format, int32_t panel_count, int32_t depth) {
  return static_cast<int64_t>(hr::panel_bytes(format, depth)) * panel_count;
}

int64_t hr_scales_bytes(int32_t format, int32_t panel_count) {
  return format == HR_INT8 ? static_cast<int64_t>(panel_count) * hr::kPanel * static_cast<int64_t>(sizeof(float)) : 0;
}

void hr_pack(hr_pool *pool, int32_t format, const float *rows, int32_t columns, int32_t depth, int32_t first_panel,
             int32_t panel_step, void *weights, void *scales) {
  hr::pack(pool->threads, rows, columns, depth, {format, first_panel, panel_step, weights, scales});
}

void hr_apply_linear(hr_pool *pool, const hr_linear *linear, const float *x, const float *norm, float eps, int32_t m,
                     int32_t finish, float *out) {
  const hr::FlushDenormals flush;
  const size_t stride = hr::pad64(linear->depth);
  hr::Buffer<float> padded;
  float *rows = padded.reserve(stride * m);
  for (int row = 0; row < m; row++) {
    memcpy(rows + row * stride, x + static_cast<size_t>(row) * linear->depth, linear->depth * sizeof(float));
  }
  hr::PreparedRows prepared;
  const hr::Rows ready = hr::prepare(pool->threads, *pool->kernels, linear->format, prepared, rows, stride, norm, eps,
                                     linear->depth, m);
  hr::multiply(pool->threads, *pool->kernels, *linear, ready, m,
               {static_cast<hr::Finish>(finish), out, static_cast<size_t>(hr::pad64(linear->columns))});
}

void hr_apply_attention(hr_pool *pool, const hr_attention *attention, const hr_batch *batch) {
  const hr::FlushDenormals flush;
  hr::AngleTable table;
  const hr::Angles angles = table.find(pool->threads, attention->frequencies, attention->head_dim / 2,
                                       attention->rope_factor, *batch);
  hr::AttentionLayer layer{};
  layer.qkv = attention->qkv;
  layer.qkv_stride = hr::pad64((attention->heads + 2 * attention->kv_heads) * attention->head_dim);
  layer.head_norms = attention->head_norms;
  layer.eps = attention->eps;
  layer.cosines = angles.cosines;
  layer.sines = angles.sines;
  layer.heads = attention->heads;
  layer.kv_heads = attention->kv_heads;
  layer.head_dim = attention->head_dim;
  layer.value_dim = hr::ceil_div(attention->head_dim, 16) * 16;
  layer.kv_format = attention->kv_format;
  layer.cache = static_cast<uint8_t *>(attention->cache);
  layer.page_bytes = hr::page_bytes(attention->kv_format, attention->head_dim);
  layer.pages_per_block = attention->block_size / hr::kPage;
  layer.window = attention->window;
  layer.scale = 1.0f / sqrtf(static_cast<float>(attention->head_dim));
  layer.out = attention->out;
  layer.out_stride = hr::pad64(attention->heads * attention->head_dim);
  hr::AttentionPlan plan;
  plan.make(*batch, layer.heads, layer.kv_heads, layer.value_dim, pool->threads.threads());
  plan.run(pool->threads, *pool->kernels, layer, *batch);
}

int64_t hr_cache_bytes(int32_t kv_format, int32_t layers, int32_t blocks, int32_t block_size, int32_t kv_heads,
                       int32_t head_dim) {
  const auto page = static_cast<int64_t>(hr::page_bytes(kv_format, head_dim));
  return page * layers * blocks * (block_size / hr::kPage) * kv_heads;
}

hr_model *hr_model_create(hr_pool *pool, const hr_model_spec *spec) {
  return new hr_model{hr::Model(pool->threads, *pool->kernels, *spec)};
}

void hr_model_destroy(hr_model *model) { delete model; }

void hr_step(hr_model *model, const hr_batch *batch) { model->model.step(*batch); }

void hr_step_logits(hr_model *model, const int32_t *rows, int32_t count, float *logits) {
  model->model.logits(rows, count, logits);
}

void hr_copy_block(hr_model *model, int32_t source, int32_t target) { model->model.copy_block(source, target); }
