#include "model/device_weights.hpp"

#include <cmath>
#include <functional>
#include <span>

#include "core/text.hpp"
#include "device/pinned_buffer.hpp"
#include "device/stream.hpp"
#include "kernels/matmul/int8_matmul.hpp"
#include "kernels/quantize/quantize.hpp"
#include "kernels/random/fill_normal.hpp"
#include "model/calibration.hpp"
#include "model/checkpoint_reader.hpp"

namespace longhalo {
namespace {

constexpr int64_t kPortionElements = int64_t{8} << 20;  // 16 MiB a buffer

constexpr MatrixKind kMatrixKinds[] = {MatrixKind::kQ, MatrixKind::kKv, MatrixKind::kO, MatrixKind::kGateUp,
                                       MatrixKind::kDown};

struct MatrixShape {
  int64_t out, in;
  int64_t elements() const { return out * in; }
};

MatrixShape matrix_shape(const ModelConfig& c, MatrixKind kind) {
  switch (kind) {
    case MatrixKind::kQ:
      return {c.q_size(), c.hidden};
    case MatrixKind::kKv:
      return {2 * c.kv_size(), c.hidden};
    case MatrixKind::kO:
      return {c.hidden, c.q_size()};
    case MatrixKind::kGateUp:
      return {2 * c.ffn, c.hidden};
    case MatrixKind::kDown:
      break;
  }
  return {c.hidden, c.ffn};
}

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
      const bool stays = !has_eight_bits(precision_) ||
                         (precision_ == Precision::kFp8 && stays_in_bf16(config_, kind, index));
      if (!stays) matrices.push_back(&matrix_of(layer, kind));
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

bool stays_in_bf16(const ModelConfig& config, MatrixKind kind, int64_t layer) {
  const bool outermost = config.layers > 2 && (layer == 0 || layer == config.layers - 1);
  const bool is_mlp = kind == MatrixKind::kGateUp || kind == MatrixKind::kDown;
  return kind == MatrixKind::kKv || (outermost && is_mlp);
}

double bf16_share_of_fp8(const ModelConfig& config) {
  int64_t all = 0, in_bf16 = 0;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    for (const MatrixKind kind : kMatrixKinds) {
      const int64_t elements = matrix_shape(config, kind).elements();
      all += elements;
      if (stays_in_bf16(config, kind, layer)) in_bf16 += elements;
    }
  }
  return static_cast<double>(in_bf16) / static_cast<double>(all);
}

int64_t device_weights_bytes(const ModelConfig& c, Precision precision, int64_t strided_bands) {
  const auto matrix_bytes = [&](MatrixKind kind, int64_t layer) {
    const MatrixShape shape = matrix_shape(c, kind);
    if (precision == Precision::kInt8) return shape.elements() + 4 * shape.out;
    if (precision == Precision::kFp8 && !stays_in_bf16(c, kind, layer))
      return shape.elements() + 4 * shape.out + 2 * (shape.in + shape.out);
    return 2 * shape.elements();
  };
  int64_t matrices = 0;
  for (int64_t layer = 0; layer < c.layers; ++layer)
    for (const MatrixKind kind : kMatrixKinds)
      matrices += matrix_bytes(kind, layer);
  const int64_t vectors = 4 * (2 * c.hidden + c.heads + strided_bands * c.kv_size());
  const int64_t tables = c.tied_embeddings ? 1 : 2;
  return matrices + c.layers * vectors + 4 * c.hidden + 2 * tables * c.vocabulary * c.hidden;
}

std::optional<UserError> device_shape_objection(const ModelConfig& c, Precision precision,
                                                const std::string& origin) {
  if (c.head_dim != 64 && c.head_dim != 128)
    return UserError(text("a head dimension of ", c.head_dim, " is not supported on the GPU"), origin,
                     "the GPU takes 64 and 128; set run.device: cpu for this model");
  constexpr int64_t kBf16Multiple = 8;
  const int64_t multiple = precision == Precision::kInt8  ? kHadamardBlock
                           : precision == Precision::kFp8 ? 16
                                                          : kBf16Multiple;
  struct Size {
    const char* key;
    int64_t value;
  };
  for (const Size& size : {Size{"hidden_size", c.hidden}, {"intermediate_size", c.ffn}}) {
    const bool too_long = precision == Precision::kInt8 && size.value > kLongestInt8Sum;
    if (size.value % multiple == 0 && !too_long) continue;
    return UserError(
        text("\"", size.key, "\" is ", size.value, ", which the GPU's products in ", name_of(precision),
             " do not take"),
        origin,
        text("it must be a multiple of ", multiple,
             precision == Precision::kInt8 ? text(", ", kLongestInt8Sum, " at most") : "",
             size.value % kBf16Multiple == 0 ? "; set run.precision: bf16 for this model"
                                             : "; set run.device: cpu and no run.precision for this model"));
  }
  return std::nullopt;
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
