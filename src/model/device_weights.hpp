// The weights of one model in the memory of this rank's GPU: matrices in bf16, or the layers' in eight bits
// with a scale an output channel (e4m3, with the scale of least error, or int8), small vectors in fp32.
// Replicated on every rank.
//
// e4m3 has three bits of fraction, so with it some matrices stay in bf16 (matrix_form() says which), and the
// others are fitted to tokens of the job (calibration.hpp).
//
// They come tensor by tensor through two small pinned buffers, or are made on the device; the host never
// holds the model. Matrices that read the same input are one (keys and values; gate and up), so that one
// product makes both.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "device/device_buffer.hpp"
#include "kernels/common/fp8.hpp"
#include "kernels/common/int8.hpp"
#include "model/device_matrices.hpp"
#include "model/precision.hpp"
#include "model/weights.hpp"

namespace longhalo {

/// W [out, in], in one of its three forms; the others are empty.
struct DeviceMatrix {
  Precision form() const {
    return !fp8.empty() ? Precision::kFp8 : !int8.empty() ? Precision::kInt8 : Precision::kBf16;
  }

  MatrixKind kind = MatrixKind::kQ;
  int64_t out = 0, in = 0;
  DeviceBuffer<BFloat16> bf16;
  DeviceBuffer<Fp8E4M3> fp8;  // [out, in + outliers]
  DeviceBuffer<int8_t> int8;
  DeviceBuffer<float> scales;  // [out], with fp8 and int8
  // With fp8, where tokens were there to find it by: the mean of what W multiplies, and what W makes of it.
  DeviceBuffer<BFloat16> mean, bias;  // [in], [out]
  float largest_mean = 0;
  DeviceBuffer<int32_t> outliers;  // columns that fp8 has twice (fp8.hpp)

  ConstFp8Rows fp8_rows() const { return {fp8.data(), scales.data()}; }
  OutlierColumns outlier_columns() const { return {outliers.data(), outliers.size()}; }
  ConstInt8Rows int8_rows() const { return {int8.data(), scales.data()}; }
};

struct DeviceLayerWeights {
  DeviceBuffer<float> attention_norm, mlp_norm;     // [D]
  DeviceMatrix q;                                   // [H*d, D]
  DeviceMatrix kv;                                  // [2*H_kv*d, D]: keys, then values
  DeviceMatrix o;                                   // [D, H*d]
  DeviceMatrix gate_up;                             // [2F, D]: gates, then ups
  DeviceMatrix down;                                // [D, F]
  std::vector<DeviceBuffer<float>> landmark_query;  // per strided band [H_kv, d]; empty: 0, a mean
  DeviceBuffer<float> landmark_bias;                // [H]
};

struct DeviceWeights {
  ModelConfig config;
  Precision precision = Precision::kBf16;
  DeviceBuffer<BFloat16> embedding;  // [V, D]
  std::vector<DeviceLayerWeights> layers;
  DeviceBuffer<float> final_norm;      // [D]
  DeviceBuffer<BFloat16> untied_head;  // [V, D], empty when tied

  const BFloat16* head() const { return config.tied_embeddings ? embedding.data() : untied_head.data(); }
};

/// GPU memory that loading needs at most beyond device_weights_bytes(): a layer comes in bf16, and is fitted.
int64_t loading_bytes(const ModelConfig& config, Precision precision, int64_t calibration_tokens);

/// Reads *.safetensors of `model_directory` (bf16, fp16 or fp32, rounded to bf16). Throws UserError naming
/// file and tensor, and when the GPU's memory does not suffice. The host waits. `calibration`: tokens like
/// those that will be read, which weights in fp8 are fitted to; none: to nothing.
DeviceWeights load_device_weights(const std::filesystem::path& model_directory, const ModelConfig& config,
                                  const LandmarkWeights& landmarks, Precision precision, cudaStream_t stream,
                                  std::span<const int32_t> calibration = {},
                                  const LayerProgress& progress = {});

/// Normally distributed, with the spreads of random_weights() but other numbers; equal on every rank.
DeviceWeights random_device_weights(const ModelConfig& config, const LandmarkWeights& landmarks,
                                    uint64_t seed, Precision precision, cudaStream_t stream,
                                    std::span<const int32_t> calibration = {});

}  // namespace longhalo
