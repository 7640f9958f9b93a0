// Tensors of a checkpoint, one at a time: as fp32 for the CPU and for small tensors, as bf16 in portions for
// the GPU. Each is checked for shape and finite values, and the file's pages are let go at once, so that
// memory holds the weights once.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/bfloat16.hpp"
#include "device/host_buffer.hpp"
#include "model/model_config.hpp"
#include "storage/safetensors.hpp"

namespace longhalo {

class CheckpointReader {
 public:
  /// Throws UserError naming the file, like all its functions; those also name the tensor.
  explicit CheckpointReader(const std::filesystem::path& directory) : tensors_(directory) {}

  bool contains(const std::string& name) const { return tensors_.contains(name); }

  HostBuffer<float> read(const std::string& name, std::vector<int64_t> shape) const;
  void read_into(const std::string& name, std::vector<int64_t> shape, std::span<float> out) const;

  /// The tensor rounded to bf16, in order, in portions: each goes to the memory that `room()` gives (all of
  /// it, but for the last portion) and is then handed to `take`.
  void read_portions(const std::string& name, std::vector<int64_t> shape,
                     const std::function<std::span<BFloat16>()>& room,
                     const std::function<void(std::span<const BFloat16>)>& take) const;

  /// Per strided band [H_kv, d]; empty where the checkpoint has none. In the file they are [H_kv, d] for one
  /// band, [bands, H_kv, d] for several.
  std::vector<HostBuffer<float>> landmark_queries(int64_t layer, const ModelConfig& config,
                                                  int64_t bands) const;
  /// [H]: `bias` for every head when set, else the checkpoint's own, else `fallback`.
  HostBuffer<float> landmark_bias(int64_t layer, const ModelConfig& config, std::optional<double> bias,
                                  double fallback) const;

 private:
  ModelWeights tensors_;
};

/// Throws UserError where a tensor that `config` asks for is missing or has another shape, or some layers
/// lack what landmarks add to others. From headers alone, before a job makes anything; what is in them is
/// looked at when they are read.
void require_tensors(const std::filesystem::path& directory, const ModelConfig& config);

/// "model.layers.3."
std::string layer_prefix(int64_t layer);

HostBuffer<float> filled(int64_t count, double value);

}  // namespace longhalo
