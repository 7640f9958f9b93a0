#include "model/device_weights.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <span>

#include "device/pinned_buffer.hpp"
#include "device/stream.hpp"
#include "kernels/quantize/quantize.hpp"
#include "kernels/random/fill_normal.hpp"
#include "model/calibration.hpp"
#include "model/checkpoint_reader.hpp"

namespace longhalo {
namespace {

constexpr int64_t kPortionElements = int64_t{8} << 20;  // 16 MiB a buffer

DeviceMatrix& matrix_of(DeviceLayerWeights& w, MatrixKind kind) {
  switch (kind) {
    case MatrixKind::kQ:
      return w.q;
    case MatrixKind::kKv:
      return w.kv;
    case MatrixKind::kO:
      return w.o;
    case MatrixKind::kGateUp:
      return w.gate_up;
    case MatrixKind::kDown:
      break;
  }
  return w.down;
}

DeviceBuffer<float> vector_on_device(const HostBuffer<float>& values, cudaStream_t stream) {
  return to_device<float>(values.span(), "weights", stream);
}

// Where tensors come from. What it queues writes bf16 values at `to`.
class TensorSource {
 public:
  virtual ~TensorSource() = default;
  virtual void matrix(const std::string& name, int64_t rows, int64_t columns, BFloat16* to) = 0;
  virtual HostBuffer<float> vector(const std::string& name, int64_t size) = 0;
  virtual std::vector<HostBuffer<float>> landmark_queries(int64_t layer) = 0;
  virtual HostBuffer<float> landmark_bias(int64_t layer) = 0;
};

class CheckpointSource : public TensorSource {
 public:
  CheckpointSource(const std::filesystem::path& directory, const ModelConfig& config,
                   const LandmarkWeights& landmarks, cudaStream_t stream)
      : reader_(directory), config_(config), landmarks_(landmarks), stream_(stream) {}

  // Two buffers in turn: one is filled while the other is copied.
  void matrix(const std::string& name, int64_t rows, int64_t columns, BFloat16* to) override {
    reader_.read_portions(
        name, {rows, columns},
        [&] {
          turn_ = 1 - turn_;
          copied_[turn_].synchronize();
          return buffers_[turn_].span();
        },
        [&](std::span<const BFloat16> portion) {
          copy_async(to, portion.data(), static_cast<int64_t>(portion.size()), stream_);
          copied_[turn_].record(stream_);
          to += portion.size();
        });
  }
  HostBuffer<float> vector(const std::string& name, int64_t size) override {
    return reader_.read(name, {size});
  }
  std::vector<HostBuffer<float>> landmark_queries(int64_t layer) override {
    return reader_.landmark_queries(layer, config_, landmarks_.strided_bands);
  }
  HostBuffer<float> landmark_bias(int64_t layer) override {
    return reader_.landmark_bias(layer, config_, landmarks_.bias, kDefaultLandmarkBias);
  }

 private:
  CheckpointReader reader_;
  const ModelConfig& config_;
  const LandmarkWeights& landmarks_;
  cudaStream_t stream_;
  PinnedBuffer<BFloat16> buffers_[2] = {{kPortionElements, "loading weights"},
                                        {kPortionElements, "loading weights"}};
  Event copied_[2];
  int turn_ = 0;
};

class RandomSource : public TensorSource {
 public:
  RandomSource(const ModelConfig& config, const LandmarkWeights& landmarks, uint64_t seed,
               cudaStream_t stream)
      : config_(config), landmarks_(landmarks), seed_(seed), stream_(stream) {}

  void matrix(const std::string& name, int64_t rows, int64_t columns, BFloat16* to) override {
    fill_normal(stream_, rows * columns, seed_, number_of(name), 1 / std::sqrt(static_cast<float>(columns)),
                to);
  }
  HostBuffer<float> vector(const std::string&, int64_t size) override { return filled(size, 1); }
  std::vector<HostBuffer<float>> landmark_queries(int64_t) override { return {}; }
  HostBuffer<float> landmark_bias(int64_t) override {
    return filled(config_.heads, landmarks_.bias.value_or(kDefaultLandmarkBias));
  }

 private:
  // A number for each tensor, so that their order does not matter. FNV-1a: the same on every machine, unlike
  // std::hash.
  static uint64_t number_of(const std::string& name) {
    uint64_t hash = 0xcbf29ce484222325U;
    for (const char c : name)
      hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
    return hash;
  }

  const ModelConfig& config_;
  const LandmarkWeights& landmarks_;
  uint64_t seed_;
  cudaStream_t stream_;
};

class Maker {
 public:
  Maker(const ModelConfig& config, Precision precision, TensorSource& source, cudaStream_t stream)
      : config_(config), precision_(precision), source_(source), stream_(stream) {}

  DeviceWeights make(std::span<const int32_t> calibration, const LayerProgress& progress) {
    DeviceWeights weights;
    weights.config = config_;
    weights.precision = precision_;
    weights.embedding = table("model.embed_tokens.weight");
    std::optional<Calibration> fitted;
    if (precision_ == Precision::kFp8 && !calibration.empty()) fitted.emplace(weights, calibration, stream_);
    for (int64_t layer = 0; layer < config_.layers; ++layer) {
      const std::vector<DeviceMatrix*> quantised =
          to_quantise(weights.layers.emplace_back(make_layer(layer)), layer);
      if (fitted)
        fitted->quantise(layer, quantised);
      else
        for (DeviceMatrix* w : quantised)
          quantise(*w);
      if (progress) progress(layer + 1, config_.layers);
    }
    weights.final_norm = vector_on_device(source_.vector("model.norm.weight", config_.hidden), stream_);
    if (!config_.tied_embeddings) weights.untied_head = table("lm_head.weight");
    wait_for_stream(stream_, "weights, to this rank's GPU");
    return weights;
  }

 private:
  struct Part {
    std::string name;
    int64_t rows;
  };

  DeviceBuffer<BFloat16> table(const std::string& name) {
    DeviceBuffer<BFloat16> values(config_.vocabulary * config_.hidden, "the embedding", stream_);
    source_.matrix(name, config_.vocabulary, config_.hidden, values.data());
    return values;
  }

  // Parts one below the other.
  DeviceMatrix matrix(MatrixKind kind, std::initializer_list<Part> parts) {
    const MatrixShape shape = matrix_shape(config_, kind);
    DeviceMatrix w;
    w.kind = kind;
    w.out = shape.out;
    w.in = shape.in;
    w.bf16 = DeviceBuffer<BFloat16>(shape.elements(), "weights", stream_);
    BFloat16* to = w.bf16.data();
    for (const Part& part : parts) {
      source_.matrix(part.name, part.rows, w.in, to);
      to += part.rows * w.in;
    }
    return w;
  }

  std::vector<DeviceMatrix*> to_quantise(DeviceLayerWeights& layer, int64_t index) const {
    std::vector<DeviceMatrix*> matrices;
    for (const MatrixKind kind : kMatrixKinds) {
      if (matrix_form(config_, precision_, kind, index) != Precision::kBf16)
        matrices.push_back(&matrix_of(layer, kind));
    }
    return matrices;
  }

  void quantise(DeviceMatrix& w) {
    w.scales = DeviceBuffer<float>(w.out, "scales of weights", stream_);
    if (precision_ == Precision::kFp8) {
      w.fp8 = DeviceBuffer<Fp8E4M3>(w.out * w.in, "weights in fp8", stream_);
      quantize_rows_least_error(stream_, w.out, w.in, w.bf16.data(), {w.fp8.data(), w.scales.data()});
    } else {
      w.int8 = DeviceBuffer<int8_t>(w.out * w.in, "weights in int8", stream_);
      quantize_rows(stream_, w.out, w.in, w.bf16.data(), Int8Rows{w.int8.data(), w.scales.data()});
    }
    w.bf16 = {};
  }

  DeviceLayerWeights make_layer(int64_t index) {
    const ModelConfig& c = config_;
    const std::string layer = layer_prefix(index);
    DeviceLayerWeights w;
    w.attention_norm = vector_on_device(source_.vector(layer + "input_layernorm.weight", c.hidden), stream_);
    w.q = matrix(MatrixKind::kQ, {{layer + "self_attn.q_proj.weight", c.q_size()}});
    w.kv = matrix(MatrixKind::kKv, {{layer + "self_attn.k_proj.weight", c.kv_size()},
                                    {layer + "self_attn.v_proj.weight", c.kv_size()}});
    w.o = matrix(MatrixKind::kO, {{layer + "self_attn.o_proj.weight", c.hidden}});
    w.mlp_norm =
        vector_on_device(source_.vector(layer + "post_attention_layernorm.weight", c.hidden), stream_);
    w.gate_up = matrix(MatrixKind::kGateUp,
                       {{layer + "mlp.gate_proj.weight", c.ffn}, {layer + "mlp.up_proj.weight", c.ffn}});
    w.down = matrix(MatrixKind::kDown, {{layer + "mlp.down_proj.weight", c.hidden}});
    for (const HostBuffer<float>& query : source_.landmark_queries(index))
      w.landmark_query.push_back(vector_on_device(query, stream_));
    w.landmark_bias = vector_on_device(source_.landmark_bias(index), stream_);
    return w;
  }

  const ModelConfig& config_;
  Precision precision_;
  TensorSource& source_;
  cudaStream_t stream_;
};

}  // namespace

int64_t loading_bytes(const ModelConfig& config, Precision precision, int64_t calibration_tokens) {
  if (!has_eight_bits(precision)) return 0;
  // Numbers of two bytes at first and one at the end; those of one matrix have both for a while.
  int64_t layer = 0, largest = 0;
  for (const MatrixKind kind : kMatrixKinds) {
    layer += matrix_shape(config, kind).elements();
    largest = std::max(largest, matrix_shape(config, kind).elements());
  }
  const bool fitted = precision == Precision::kFp8 && calibration_tokens > 0;
  return layer + largest + (fitted ? Calibration::bytes(config, calibration_tokens) : 0);
}

DeviceWeights load_device_weights(const std::filesystem::path& model_directory, const ModelConfig& config,
                                  const LandmarkWeights& landmarks, Precision precision, cudaStream_t stream,
                                  std::span<const int32_t> calibration, const LayerProgress& progress) {
  CheckpointSource source(model_directory, config, landmarks, stream);
  return Maker(config, precision, source, stream).make(calibration, progress);
}

DeviceWeights random_device_weights(const ModelConfig& config, const LandmarkWeights& landmarks,
                                    uint64_t seed, Precision precision, cudaStream_t stream,
                                    std::span<const int32_t> calibration) {
  RandomSource source(config, landmarks, seed, stream);
  return Maker(config, precision, source, stream).make(calibration, {});
}

}  // namespace longhalo
