// The matrices of a model's layers on the GPU before there are any: how large they are, in which form, and
// whether the kernels take them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/error.hpp"
#include "model/model_config.hpp"
#include "model/precision.hpp"

namespace longhalo {

enum class MatrixKind { kQ, kKv, kO, kGateUp, kDown };

inline constexpr MatrixKind kMatrixKinds[] = {MatrixKind::kQ, MatrixKind::kKv, MatrixKind::kO,
                                              MatrixKind::kGateUp, MatrixKind::kDown};

struct MatrixShape {
  int64_t out, in;
  int64_t elements() const { return out * in; }
};

/// Keys and values are one matrix, and so are gates and ups.
MatrixShape matrix_shape(const ModelConfig& config, MatrixKind kind);

/// What a matrix is in, in a model of this precision. Some of an fp8 model are left in bf16, those through
/// which e4m3 costs the most for their size (docs/performance.md): keys and values of all layers, 4% of the
/// products of an 8B shape, the last layer's MLP, 2.5%, and the first one's down, 0.8%; in models of one or
/// two layers, which stand for a part of a larger one, keys and values alone.
Precision matrix_form(const ModelConfig& config, Precision precision, MatrixKind kind, int64_t layer);

/// How many columns of a matrix in fp8 are outliers (fp8.hpp), where it is fitted to inputs: one of 32, but
/// none of down, where they hardly made a model more exact (docs/performance.md).
int64_t fp8_outliers(const ModelConfig& config, MatrixKind kind);

/// Of the layers' products in fp8, the share of multiplications that are made in bf16.
double bf16_share_of_fp8(const ModelConfig& config);

/// Bytes of DeviceWeights.
int64_t device_weights_bytes(const ModelConfig& config, Precision precision, int64_t strided_bands);

/// Why the GPU's kernels do not take these sizes in this precision, as the error to throw; nothing when they
/// do. `origin` is where the sizes come from.
std::optional<UserError> device_shape_objection(const ModelConfig& config, Precision precision,
                                                const std::string& origin);

}  // namespace longhalo
