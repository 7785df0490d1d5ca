// Steps of a small random model with one thread and with four, for ThreadSanitizer: prints whether the answers agree.
#include "headrace_cpu.h"

#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

namespace {

constexpr int kVocabulary = 150, kHidden = 64, kIntermediate = 96, kLayers = 2, kHeads = 4, kKvHeads = 2, kHeadDim = 16;
constexpr int kBlock = 16, kBlocks = 160, kContext = 1100;

std::mt19937 generator(5);

std::vector<float> random(size_t count) {
  std::normal_distribution<float> normal(0, 0.2f);
  std::vector<float> out(count);
  for (float &x : out) x = normal(generator);
  return out;
}

struct Matrix {
  std::vector<uint8_t> weights, scales;
  hr_linear linear{};

  Matrix(hr_pool *pool, int format, int columns, int depth) {
    const int panels = (columns + 15) / 16;
    weights.resize(hr_weights_bytes(format, panels, depth));
    scales.resize(hr_scales_bytes(format, panels));
    const std::vector<float> rows = random(static_cast<size_t>(columns) * depth);
    hr_pack(pool, format, rows.data(), columns, depth, 0, 1, weights.data(), scales.data());
    linear = {format, columns, depth, panels, weights.data(), scales.data(), nullptr};
  }
};

// Tokens of one step, as pieces (sequence, first, last) of sequences that have kBlocks / 2 blocks each.
struct Piece {
  int sequence, first, last;
};

std::vector<int32_t> step(hr_model *model, const std::vector<Piece> &pieces) {
  std::vector<int32_t> tokens, positions, first_row{0}, tables, table_start, head_rows, logits_row;
  for (const Piece &piece : pieces) {
    table_start.push_back(static_cast<int32_t>(tables.size()));
    for (int b = 0; b < kBlocks / 2; b++) tables.push_back(piece.sequence * (kBlocks / 2) + b);
    for (int p = piece.first; p < piece.last; p++) {
      tokens.push_back((p * 7 + piece.sequence * 31) % kVocabulary);
      positions.push_back(p);
    }
    first_row.push_back(static_cast<int32_t>(tokens.size()));
    head_rows.push_back(first_row.back() - 1);
    logits_row.push_back(-1);
  }
  std::vector<int32_t> best(pieces.size());
  const hr_batch batch = {static_cast<int32_t>(tokens.size()), static_cast<int32_t>(pieces.size()),
                          static_cast<int32_t>(best.size()), 0, tokens.data(), positions.data(), first_row.data(),
                          tables.data(), table_start.data(), head_rows.data(), logits_row.data(), nullptr, best.data()};
  hr_step(model, &batch);
  return best;
}

std::vector<int32_t> answers(int threads, int format, int kv_format) {
  generator.seed(5);
  hr_pool *pool = hr_pool_create(threads, hr_best_isa());
  std::vector<float> norm(64, 1.0f), frequencies(kHeadDim / 2, 0.1f);
  Matrix head(pool, HR_INT8, kVocabulary, kHidden), qkv(pool, format, (kHeads + 2 * kKvHeads) * kHeadDim, kHidden),
      out(pool, format, kHidden, kHeads * kHeadDim), gate_up(pool, format, 2 * kIntermediate, kHidden),
      down(pool, format, kHidden, kIntermediate);
  const std::vector<hr_layer> layers(
      kLayers, {norm.data(), norm.data(), nullptr, qkv.linear, out.linear, gate_up.linear, down.linear, 0, 0});
  std::vector<uint8_t> cache(hr_cache_bytes(kv_format, kLayers, kBlocks + 1, kBlock, kKvHeads, kHeadDim) + 64);
  const hr_model_spec spec = {kVocabulary, kHidden, kIntermediate, kLayers, kHeads, kKvHeads, kHeadDim, kBlock,
                              kBlocks + 1, 1e-5f, 1.0f, kv_format, frequencies.data(), layers.data(), norm.data(),
                              head.linear, nullptr, cache.data()};
  hr_model *model = hr_model_create(pool, &spec);
  std::vector<int32_t> found;
  const auto run = [&](const std::vector<Piece> &pieces) {
    for (const int32_t token : step(model, pieces)) found.push_back(token);
  };
  // Prompts in chunks until contexts are several ranges long, then answers, guesses, and both beside each other.
  for (int first = 0; first < kContext; first += 250) {
    run({{0, first, std::min(first + 250, kContext)}, {1, first / 10, first / 10 + 25}});
  }
  for (int i = 0; i < 4; i++) run({{0, kContext + i, kContext + i + 1}, {1, 125 + i, 126 + i}});
  run({{0, kContext + 4, kContext + 9}});
  hr_copy_block(model, 3, kBlocks);
  run({{0, kContext + 9, kContext + 12}, {1, 129, 140}});
  hr_model_destroy(model);
  hr_pool_destroy(pool);
  return found;
}

}  // namespace

int main() {
  for (const auto &[format, kv_format] : {std::pair{HR_BF16, HR_KV_BF16}, {HR_INT8, HR_KV_INT8}, {HR_INT4, HR_KV_BF16}}) {
    if (answers(1, format, kv_format) != answers(4, format, kv_format)) {
      printf("format %d, KV format %d: four threads answer otherwise than one\n", format, kv_format);
      return 1;
    }
  }
  printf("the same with one thread and with four\n");
  return 0;
}
