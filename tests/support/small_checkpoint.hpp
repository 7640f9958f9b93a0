// A model directory made from weights: for tests of what loads checkpoints.
#pragma once

#include <filesystem>

#include "model/weights.hpp"

namespace longhalo::test {

/// Rounds the matrices (not the small vectors) to bf16, so that every precision reads the same numbers.
void round_matrices_to_bfloat16(Weights& weights);

/// Writes model.safetensors into `directory`, which is made: matrices in bf16 (which must be exact), vectors
/// in fp32.
void write_checkpoint(const Weights& weights, const std::filesystem::path& directory);

}  // namespace longhalo::test
