#include <math.h>
#include <string.h>

#include "half.h"
#include "model.h"

namespace hr {
namespace {

// Fewer numbers than this are prepared by the caller alone: sharing them out costs about as much.
constexpr int kSharedNumbers = 16384;
// Rows of one task of a product: enough that weights in the second-level cache are used often, few enough to share.
constexpr int kTaskRows = 96;
constexpr int kTaskPanels = 4;
// Rows of logits that a task holds while it looks for the likeliest.
constexpr int kHeadRows = 32;

inline float from_bf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// Element k of column n of a packed matrix.
float element(const hr_linear &w, int n, int k) {
  const int panel = n / kPanel, lane = n % kPanel;
  const auto *bytes = static_cast<const uint8_t *>(w.weights) + panel * panel_bytes(w.format, w.depth);
  switch (w.format) {
    case HR_BF16:
      return from_bf16(reinterpret_cast<const uint16_t *>(bytes)[(k / 2 * kPanel + lane) * 2 + k % 2]);
    case HR_INT8:
      return static_cast<float>(bytes[(k / 4 * kPanel + lane) * 4 + k % 4] - 128) *
             static_cast<const float *>(w.scales)[n];
    case HR_INT4: {
      const uint8_t *group = bytes + static_cast<size_t>(k / kGroup) * kNibbleGroupBytes;
      const uint8_t pair = group[(k % kGroup / 8 * kPanel + lane) * 4 + k % 4];
      const int nibble = k % 8 < 4 ? pair & 15 : pair >> 4;
      const auto *steps =
          reinterpret_cast<const uint16_t *>(group + kNibbleBytes) + k % kGroup / kHalfGroup * kPanel + lane;
      return static_cast<float>(nibble) * from_half(steps[0]) + from_half(steps[2 * kPanel]);
    }
    default:
      return reinterpret_cast<const float *>(bytes)[k * kPanel + lane];
  }
}

// Those of one task of a product. Threads take tasks in turns.
Panels panels_of(int task, int panels, int threads) {
  const int first = task * kTaskPanels, last = first + kTaskPanels;
  return {first, last < panels ? last : panels, first + threads * kTaskPanels};
}

}  // namespace

Rows PreparedRows::reserve(const Kernels &kernels, int format, int rows, int depth) {
  Rows out{};
  out.stride = kernels.row_bytes(format, depth);
  out.data = data_.reserve(out.stride * rows);
  out.groups = ceil_div(depth, kGroup);
  if (format == HR_INT8 || format == HR_INT4) {
    out.scales = scales_.reserve(static_cast<size_t>(rows) * out.groups);
    out.group_sums = group_sums_.reserve(static_cast<size_t>(rows) * out.groups);
    out.half_sums = half_sums_.reserve(static_cast<size_t>(rows) * out.groups * 2);
  }
  return out;
}

void multiply(Pool &pool, const Kernels &kernels, const hr_linear &linear, const Rows &rows, int count,
              const Output &out) {
  const int row_tasks = ceil_div(count, kTaskRows), panel_tasks = ceil_div(linear.panels, kTaskPanels);
  pool.run(row_tasks * panel_tasks, [&](int task, int) {
    // Row blocks of the same panels follow each other: the second finds them in the cache.
    const int block = task % row_tasks;
    Panels panels = panels_of(task / row_tasks, linear.panels, pool.threads());
    if (row_tasks > 1) panels.next = linear.panels;  // the next task has the same panels
    const auto row_of = [&](int b) { return static_cast<int>(static_cast<int64_t>(count) * b / row_tasks); };
    kernels.multiply(linear, rows, row_of(block), row_of(block + 1), panels, out);
  });
}

Rows prepare(Pool &pool, const Kernels &kernels, int format, PreparedRows &to, const float *x, size_t stride,
             const float *norm, float eps, int depth, int count) {
  const Rows rows = to.reserve(kernels, format, count, depth);
  const int per_task = depth * count < kSharedNumbers ? count : ceil_div(count, 4 * pool.threads());
  pool.run(ceil_div(count, per_task), [&](int task, int) {
    for (int row = task * per_task; row < (task + 1) * per_task && row < count; row++) {
      kernels.prepare_row(format, x + row * stride, norm, eps, depth, rows, row);
    }
  });
  return rows;
}

Angles AngleTable::find(Pool &pool, const float *frequencies, int half, float factor, const hr_batch &batch) {
  const int per_task = 16;
  float *cosines = cosines_.reserve(static_cast<size_t>(batch.rows) * half);
  float *sines = sines_.reserve(static_cast<size_t>(batch.rows) * half);
  pool.run(ceil_div(batch.rows, per_task), [&](int task, int) {
    for (int row = task * per_task; row < (task + 1) * per_task && row < batch.rows; row++) {
      for (int d = 0; d < half; d++) {
        const float angle = static_cast<float>(batch.positions[row]) * frequencies[d];
        cosines[static_cast<size_t>(row) * half + d] = cosf(angle) * factor;
        sines[static_cast<size_t>(row) * half + d] = sinf(angle) * factor;
      }
    }
  });
  return {cosines, sines};
}

Model::Model(Pool &pool, const Kernels &kernels, const hr_model_spec &spec)
    : pool_(pool),
      kernels_(kernels),
      spec_(spec),
      layers_(spec.layer, spec.layer + spec.layers),
      value_dim_(ceil_div(spec.head_dim, 16) * 16),
      block_bytes_(page_bytes(spec.kv_format, spec.head_dim) * spec.kv_heads * (spec.block_size / kPage)),
      layer_bytes_(block_bytes_ * spec.blocks),
      hidden_stride_(pad64(spec.hidden)),
      qkv_stride_(pad64((spec.heads + 2 * spec.kv_heads) * spec.head_dim)),
      heads_stride_(pad64(spec.heads * spec.head_dim)),
      mlp_stride_(pad64(spec.intermediate)) {}

void Model::step(const hr_batch &batch) {
  const FlushDenormals flush;
  hidden_.reserve(batch.rows * hidden_stride_);
  qkv_.reserve(batch.rows * qkv_stride_);
  attended_.reserve(batch.rows * heads_stride_);
  mlp_.reserve(batch.rows * mlp_stride_);
  embed(batch);
  angles_ = angle_table_.find(pool_, spec_.frequencies, spec_.head_dim / 2, spec_.rope_factor, batch);
  attention_plan_.make(batch, spec_.heads, spec_.kv_heads, value_dim_, pool_.threads());
  for (int index = 0; index < spec_.layers; index++) compute_layer(index, batch);
  find_tokens(batch);
}

void Model::embed(const hr_batch &batch) {
  const int per_task = 8;
  pool_.run(ceil_div(batch.rows, per_task), [&](int task, int) {
    for (int row = task * per_task; row < (task + 1) * per_task && row < batch.rows; row++) {
      embed_row(batch.tokens[row], hidden_.get() + row * hidden_stride_);
    }
  });
}

void Model::embed_row(int32_t token, float *out) const {
  // The padding too: a sequence whose values were not numbers may have left some there.
  memset(out + spec_.hidden, 0, (hidden_stride_ - spec_.hidden) * sizeof(float));
  if (spec_.embedding == nullptr) {
    for (int k = 0; k < spec_.hidden; k++) out[k] = element(spec_.head, token, k);
  } else {
    const uint16_t *row = spec_.embedding + static_cast<size_t>(token) * spec_.hidden;
    for (int k = 0; k < spec_.hidden; k++) out[k] = from_bf16(row[k]);
  }
}

void Model::compute_layer(int index, const hr_batch &batch) {
  const hr_layer &layer = layers_[index];
  const int count = batch.rows;
  float *hidden = hidden_.get(), *qkv = qkv_.get(), *attended = attended_.get(), *mlp = mlp_.get();
  const Output residual{Finish::kAdd, hidden, hidden_stride_};

  Rows rows = prepare(pool_, kernels_, layer.qkv.format, prepared_, hidden, hidden_stride_, layer.input_norm,
                      spec_.rms_eps, spec_.hidden, count);
  multiply(pool_, kernels_, layer.qkv, rows, count, {Finish::kStore, qkv, qkv_stride_});
  attention_plan_.run(pool_, kernels_, attention_of(index), batch);
  rows = prepare(pool_, kernels_, layer.out.format, prepared_, attended, heads_stride_, nullptr, 0,
                 spec_.heads * spec_.head_dim, count);
  multiply(pool_, kernels_, layer.out, rows, count, residual);

  rows = prepare(pool_, kernels_, layer.gate_up.format, prepared_, hidden, hidden_stride_, layer.mlp_norm,
                 spec_.rms_eps, spec_.hidden, count);
  multiply(pool_, kernels_, layer.gate_up, rows, count, {Finish::kSiluMul, mlp, mlp_stride_});
  rows = prepare(pool_, kernels_, layer.down.format, prepared_, mlp, mlp_stride_, nullptr, 0, spec_.intermediate, count);
  multiply(pool_, kernels_, layer.down, rows, count, residual);
}

AttentionLayer Model::attention_of(int index) const {
  AttentionLayer layer{};
  layer.qkv = qkv_.get();
  layer.qkv_stride = qkv_stride_;
  layer.head_norms = layers_[index].head_norms;
  layer.eps = spec_.rms_eps;
  layer.cosines = angles_.cosines;
  layer.sines = angles_.sines;
  layer.heads = spec_.heads;
  layer.kv_heads = spec_.kv_heads;
  layer.head_dim = spec_.head_dim;
  layer.value_dim = value_dim_;
  layer.kv_format = spec_.kv_format;
  layer.cache = static_cast<uint8_t *>(spec_.cache) + layer_bytes_ * index;
  layer.page_bytes = page_bytes(spec_.kv_format, spec_.head_dim);
  layer.pages_per_block = spec_.block_size / kPage;
  layer.window = layers_[index].window;
  layer.scale = 1.0f / sqrtf(static_cast<float>(spec_.head_dim));
  layer.out = attended_.get();
  layer.out_stride = heads_stride_;
  return layer;
}

void Model::gather(const int32_t *rows, int count) {
  float *gathered = gathered_.reserve(count * hidden_stride_);
  for (int i = 0; i < count; i++) {
    memcpy(gathered + i * hidden_stride_, hidden_.get() + rows[i] * hidden_stride_, hidden_stride_ * sizeof(float));
  }
}

void Model::find_tokens(const hr_batch &batch) {
  const int count = batch.head_count;
  if (count == 0) return;
  gather(batch.head_rows, count);
  const hr_linear &head = spec_.head;
  const Rows rows = prepare(pool_, kernels_, head.format, prepared_, gathered_.get(), hidden_stride_, spec_.final_norm,
                            spec_.rms_eps, spec_.hidden, count);
  const int chunks = ceil_div(head.panels, kTaskPanels), columns = kTaskPanels * kPanel;
  float *values = chunk_best_values_.reserve(static_cast<size_t>(chunks) * count);
  int32_t *best = chunk_best_.reserve(static_cast<size_t>(chunks) * count);
  pool_.run(chunks, [&](int chunk, int) {
    alignas(64) float tile[kHeadRows * kTaskPanels * kPanel];
    const Panels panels = panels_of(chunk, head.panels, pool_.threads());
    const int first = panels.first * kPanel;
    const int width = first + columns < spec_.vocabulary ? columns : spec_.vocabulary - first;
    for (int from = 0; from < count; from += kHeadRows) {
      const int to = from + kHeadRows < count ? from + kHeadRows : count;
      // The tile as seen from row 0, panel 0 of the whole.
      float *origin = tile - (static_cast<ptrdiff_t>(from) * columns + first);
      kernels_.multiply(head, rows, from, to, panels,
                        {Finish::kStore, origin, static_cast<size_t>(columns)});
      for (int row = from; row < to; row++) {
        const float *logits = tile + (row - from) * columns;
        const size_t at = static_cast<size_t>(chunk) * count + row;
        values[at] = -INFINITY;
        best[at] = first;
        kernels_.find_likeliest(logits, width, first, values + at, best + at);
        if (batch.logits_row[row] >= 0) {
          float *out = batch.logits + static_cast<size_t>(batch.logits_row[row]) * spec_.vocabulary + first;
          memcpy(out, logits, width * sizeof(float));
        }
      }
    }
  });
  for (int row = 0; row < count; row++) {
    float most = -INFINITY;
    batch.best[row] = 0;
    for (int chunk = 0; chunk < chunks; chunk++) {  // in order: among equals the lowest token
      const size_t at = static_cast<size_t>(chunk) * count + row;
      if (best[at] < 0) {
        batch.best[row] = -1;
        break;
      }
      if (values[at] > most) {
        most = values[at];
        batch.best[row] = best[at];
      }
    }
  }
}

void Model::logits(const int32_t *rows, int count, float *out) {
  std::vector<int32_t> logits_row(count), best(count);
  for (int i = 0; i < count; i++) logits_row[i] = i;
  hr_batch batch{};
  batch.head_count = count;
  batch.head_rows = rows;
  batch.logits_row = logits_row.data();
  batch.logits = out;
  batch.best = best.data();
  const FlushDenormals flush;
  find_tokens(batch);
}

void Model::copy_block(int source, int target) {
  for (int index = 0; index < spec_.layers; index++) {
    uint8_t *layer = static_cast<uint8_t *>(spec_.cache) + layer_bytes_ * index;
    memcpy(layer + block_bytes_ * target, layer + block_bytes_ * source, block_bytes_);
  }
}

}  // namespace hr
