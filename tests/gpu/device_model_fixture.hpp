// A small model on this rank's GPU and the same one in fp64: what the tests of the model's device path share.
#pragma once

#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "model/device_decoder.hpp"
#include "model/device_outputs.hpp"
#include "model/device_prefill.hpp"
#include "support/reference_model.hpp"
#include "support/small_checkpoint.hpp"
#include "transport_fixture.hpp"

namespace longhalo::testing {

struct PatternCase {
  std::string name;
  AttentionPattern pattern;
};

inline std::vector<PatternCase> pattern_cases() {
  return {
      {"window and landmarks", AttentionPattern::window_and_landmarks(200, 8)},
      {"window shorter than a shard", AttentionPattern::window_and_landmarks(33, 33)},
      {"window of one token alone", AttentionPattern::window_and_landmarks(1, 0)},
      {"dense", {{{1, 0, kUnlimited}}}},
      {"window beyond the sequence", AttentionPattern::window_and_landmarks(5000, 64)},
      {"four scales", {{{1, 0, 40}, {4, 40, 128}, {16, 128, 384}, {64, 384, kUnlimited}}}},
      {"landmarks alone", {{{8, 8, kUnlimited}}}},
  };
}

inline ModelConfig device_test_shape(int64_t head_dim) {
  ModelConfig config;
  config.layers = 2;
  config.hidden = 128;
  config.ffn = 192;
  config.kv_heads = 128 / head_dim;
  config.heads = 2 * config.kv_heads;
  config.head_dim = head_dim;
  config.vocabulary = 131;
  return config;
}

// From the residual stream's rounding to bf16 (twice a layer) and the results that are rounded on the way to
// a sum: five in attention (norm; query, key, value, each rotated; weights; output) and four in the MLP
// (norm; gate and up; activation; product). Each errs by at most 2^-8 of itself (bf16 has eight significant
// bits) and they are independent, so they add as squares; the last norm is one more.
inline double bf16_bound(const ModelConfig& config) {
  return 0x1p-8 * std::sqrt(12.0 * static_cast<double>(config.layers) + 1);
}
// One row, or a mean over few values, strays further from the whole's error than the whole's mean.
inline constexpr double kOfOneRow = 3;

inline std::vector<float> floats_of(const BFloat16* device, int64_t count, cudaStream_t stream) {
  std::vector<BFloat16> narrow(static_cast<size_t>(count));
  to_host<BFloat16>(narrow, device, stream);
  std::vector<float> wide;
  for (const BFloat16 value : narrow)
    wide.push_back(to_float(value));
  return wide;
}

class DeviceModelTest : public RankTest {
 protected:
  void SetUp() override {
    RankTest::SetUp();
    if (IsSkipped() || parts() != nullptr) return;
    auto made = std::make_unique<Parts>();
    made->transport = make_transport(test::session(), TransportChoice::kAuto, device().info()).transport;
    made->matmul = std::make_unique<DeviceMatmul>(stream());
    parts() = std::move(made);
  }
  static void TearDownTestSuite() { parts().reset(); }  // before MPI ends

  static DeviceRoom room() { return {device(), *parts()->transport, *parts()->matmul}; }
  static DeviceMatmul& matmul() { return *parts()->matmul; }

  /// The model's weights on the host, exact in bf16.
  static Weights host_weights(const ModelConfig& config, const AttentionPattern& pattern, uint64_t seed) {
    Weights weights = test::small_model(config, static_cast<int64_t>(pattern.strides().size()), seed);
    test::round_matrices_to_bfloat16(weights);
    return weights;
  }

  /// The same on the GPU, by way of a checkpoint that rank 0 writes. Collective.
  static DeviceWeights on_device(const Weights& weights, const AttentionPattern& pattern, Precision precision,
                                 std::span<const int32_t> calibration = {}) {
    std::string directory =
        (std::filesystem::temp_directory_path() / ("longhalo_device_model_" + std::to_string(getpid())))
            .string();
    directory = broadcast_text(test::session(), directory);
    test::session().together([&] {
      if (test::session().is_root()) test::write_checkpoint(weights, directory);
    });
    DeviceWeights loaded;
    test::session().together([&] {
      loaded =
          load_device_weights(directory, weights.config, {static_cast<int64_t>(pattern.strides().size()), {}},
                              precision, stream(), calibration);
    });
    if (test::session().is_root()) std::filesystem::remove_all(directory);
    return loaded;
  }

  /// Leaves NaN in the memory that the next arrays are made of.
  static void poison_free_memory() {
    DeviceBuffer<uint8_t> poison(int64_t{256} << 20, "poison", stream());
    check_cuda(cudaMemsetAsync(poison.data(), 0xff, static_cast<size_t>(poison.bytes()), stream()), "poison");
  }

  /// Final hidden states of this rank's shard.
  static std::vector<float> hidden_of(DevicePrefill& prefill) {
    const int64_t n = prefill.shard().size(), width = prefill.layer().config().hidden;
    if (n == 0) return {};
    DeviceBuffer<BFloat16> hidden(n * width, "hidden states", stream());
    prefill.layer().final_norm(n, prefill.residual(), hidden.data());
    return floats_of(hidden.data(), n * width, stream());
  }

 private:
  struct Parts {
    std::unique_ptr<Transport> transport;
    std::unique_ptr<DeviceMatmul> matmul;
  };
  static std::unique_ptr<Parts>& parts() {
    static std::unique_ptr<Parts> made;
    return made;
  }
};

}  // namespace longhalo::testing
