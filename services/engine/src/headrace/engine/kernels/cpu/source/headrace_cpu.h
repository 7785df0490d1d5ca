// The C interface of the CPU kernels: plain structs and raw pointers, so that Python binds it with ctypes and nothing
// here needs to know torch or Python. Every array is the caller's and must outlive the object it was given to.
//
// Sizes and layouts
//   panel    16 output columns of a weight matrix, the unit in which weights are packed and results are computed
//   page     16 tokens of one KV head of one layer, keys and then values; see pages_bf16.h and pages_int8.h
//   padding  rows of floats have a stride of pad64(columns) elements; what lies beyond the columns is zero
#ifndef HEADRACE_CPU_H
#define HEADRACE_CPU_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HR_ABI_VERSION 2

enum hr_isa { HR_PORTABLE = 0, HR_AVX2 = 1, HR_AVX512 = 2 };

enum hr_format {
  HR_BF16 = 0,  // panels of [k / 2][16][2] bf16
  HR_INT8 = 1,  // panels of [k / 4][16][4] bytes, value + 128, one float scale per column; 8-bit rows
  HR_INT4 = 2,  // panels of 640 bytes per 64 inputs: [8][16][4] with low nibbles first, then half [4][16]; 8-bit rows
  HR_FLOAT = 3, // panels of [k][16] float
};

// Of the KV cache: bf16, or bytes with a scale for every token's key and value of every head.
enum hr_kv_format { HR_KV_BF16 = 0, HR_KV_INT8 = 1 };

// A packed matrix of `columns` outputs and `depth` inputs; `bias` may be null. `scales` is float[16 * panels] for HR_INT8.
// The 16-bit floats of HR_INT4 are the scales of two groups of 32 inputs, then the groups' least values; a weight is
// nibble * scale + least, which holds every Q4_0 and Q4_1 weight of a GGUF file exactly. They lie beside their nibbles so
// that a single stream reads memory in one go. 8-bit rows have one scale per 64 inputs: with one per row the few large
// activations of a language model cost the others their precision (4.5 % perplexity instead of 0.6).
typedef struct hr_linear {
  int32_t format;
  int32_t columns;
  int32_t depth;
  int32_t panels;
  const void *weights;
  const void *scales;
  const float *bias;
} hr_linear;

typedef struct hr_layer {
  const float *input_norm;
  const float *mlp_norm;
  const float *head_norms;  // [heads + kv_heads][head_dim], or null
  hr_linear qkv;
  hr_linear out;
  hr_linear gate_up;  // gate and up panels take turns
  hr_linear down;
  int32_t window;  // positions a query sees, its own included; 0: all
  int32_t reserved;
} hr_layer;

typedef struct hr_model_spec {
  int32_t vocabulary;
  int32_t hidden;
  int32_t intermediate;
  int32_t layers;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t block_size;  // tokens per KV block, a multiple of 16
  int32_t blocks;
  float rms_eps;
  float rope_factor;
  int32_t kv_format;
  const float *frequencies;   // radians per position, [head_dim / 2]
  const hr_layer *layer;      // [layers]
  const float *final_norm;
  hr_linear head;
  const uint16_t *embedding;  // bf16 [vocabulary][hidden]; null: rows of `head`
  void *cache;                // hr_cache_bytes(...)
} hr_model_spec;

// One step. Row r computes `tokens[r]` at `positions[r]`; slice s owns rows first_row[s] to first_row[s + 1] - 1, whose
// positions are consecutive, and finds block b of its KV at tables[table_start[s] + b]. Head row i asks for the logits
// of row head_rows[i]: the likeliest token goes to best[i] (-1 when they are not finite); where logits_row[i] >= 0, the
// logits themselves go to logits + logits_row[i] * vocabulary.
typedef struct hr_batch {
  int32_t rows;
  int32_t slices;
  int32_t head_count;
  int32_t reserved;
  const int32_t *tokens;
  const int32_t *positions;
  const int32_t *first_row;
  const int32_t *tables;
  const int32_t *table_start;
  const int32_t *head_rows;
  const int32_t *logits_row;
  float *logits;
  int32_t *best;
} hr_batch;

typedef struct hr_pool hr_pool;
typedef struct hr_model hr_model;

int32_t hr_abi_version(void);
int32_t hr_best_isa(void);                   // the best this machine runs and this library has
const char *hr_isa_name(int32_t isa);

hr_pool *hr_pool_create(int32_t threads, int32_t isa);  // null: isa is not available
void hr_pool_destroy(hr_pool *pool);

// Bytes that packing needs: of weights and of scales; `panel_count` panels of `depth` inputs.
int64_t hr_weights_bytes(int32_t format, int32_t panel_count, int32_t depth);
int64_t hr_scales_bytes(int32_t format, int32_t panel_count);
// Pack float rows [columns][depth] into panels first_panel, first_panel + panel_step, ... of the arrays.
void hr_pack(hr_pool *pool, int32_t format, const float *rows, int32_t columns, int32_t depth, int32_t first_panel,
             int32_t panel_step, void *weights, void *scales);

enum hr_finish { HR_STORE = 0, HR_ADD = 1, HR_SILU_MUL = 2 };

// The parts of a step, for tests and measurements.
// out[m][columns] (stride pad64(columns)) = x[m][depth] (dense; each row normalised when `norm`, of pad64(depth), is
// not null) times the matrix. HR_ADD adds to `out`; HR_SILU_MUL takes panels as pairs of a gate and what it multiplies.
void hr_apply_linear(hr_pool *pool, const hr_linear *linear, const float *x, const float *norm, float eps, int32_t m,
                     int32_t finish, float *out);

// Rotate, store and attend. `qkv` has a stride of pad64((heads + 2 kv_heads) head_dim), `out` of pad64(heads head_dim).
typedef struct hr_attention {
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t block_size;
  int32_t window;
  float eps;
  float rope_factor;
  int32_t kv_format;
  const float *qkv;
  const float *head_norms;
  const float *frequencies;
  void *cache;
  float *out;
} hr_attention;
void hr_apply_attention(hr_pool *pool, const hr_attention *attention, const hr_batch *batch);

int64_t hr_cache_bytes(int32_t kv_format, int32_t layers, int32_t blocks, int32_t block_size, int32_t kv_heads,
                       int32_t head_dim);
hr_model *hr_model_create(hr_pool *pool, const hr_model_spec *spec);
void hr_model_destroy(hr_model *model);
void hr_step(hr_model *model, const hr_batch *batch);
// Logits of further rows of the last step, [count][vocabulary].
void hr_step_logits(hr_model *model, const int32_t *rows, int32_t count, float *logits);
void hr_copy_block(hr_model *model, int32_t source, int32_t target);

#ifdef __cplusplus
}
#endif
#endif
