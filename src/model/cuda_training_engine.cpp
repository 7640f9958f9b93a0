#include "model/cuda_training_engine.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "core/text.hpp"
#include "core/waiting.hpp"
#include "model/device_rates.hpp"
#include "model/device_trainer.hpp"
#include "model/device_training_memory.hpp"
#include "model/rank_gpu.hpp"

namespace longhalo {
namespace {

constexpr int64_t kDefaultTile = 32768;

ModelArrays arrays_of(DeviceWeights& weights, cudaStream_t stream) {
  const ModelConfig& c = weights.config;
  ModelArrays arrays;
  arrays.config = c;
  arrays.matrices = Dtype::kBF16;
  arrays.embedding = weights.embedding.data();
  arrays.final_norm = weights.final_norm.data();
  if (!c.tied_embeddings) arrays.head = weights.untied_head.data();
  for (DeviceLayerWeights& w : weights.layers) {
    const BFloat16 *kv = w.kv.bf16.data(), *gate_up = w.gate_up.bf16.data();
    LayerArrays& to = arrays.layers.emplace_back();
    to = {w.attention_norm.data(), w.q.bf16.data(),        kv,      kv + c.kv_size() * c.hidden,
          w.o.bf16.data(),         w.mlp_norm.data(),      gate_up, gate_up + c.ffn * c.hidden,
          w.down.bf16.data(),      w.landmark_bias.data(), {}};
    for (DeviceBuffer<float>& query : w.landmark_query) {
      std::vector<float> values(static_cast<size_t>(query.size()));
      to_host<float>(values, query.data(), stream);
      to.landmark_query.insert(to.landmark_query.end(), values.begin(), values.end());
    }
  }
  return arrays;
}

// The kernels add up the gradients of one band's keys without a word to those of another.
void require_one_exact_band(const AttentionPattern& pattern) {
  const auto exact = std::count_if(pattern.bands.begin(), pattern.bands.end(),
                                   [](const Band& band) { return band.stride == 1; });
  if (exact > 1)
    throw UserError(text("training on GPUs takes one band of stride 1, and there are ", exact),
                    "attention.bands", "join them into one, or train on the CPU (run.device: cpu)");
}

class CudaTrainingEngine : public TrainingEngine {
 public:
  CudaTrainingEngine(const MpiSession& session, std::unique_ptr<Device> device, TransportChoice transport,
                     const ModelConfig& config, const AttentionPattern& pattern)
      : session_(session), config_(config), pattern_(pattern), gpu_(session, std::move(device), transport) {}

  const ModelConfig& config() const override { return config_; }
  Precision precision() const override { return Precision::kBf16; }
  std::string device() const override { return gpu_.name(); }
  std::string transport() const override { return gpu_.transport_reason(); }

  int64_t default_tile() const override { return kDefaultTile; }
  TrainingMemory memory(const ShardPlan& shards, int64_t tile, double every) const override {
    return device_training_memory(config_, pattern_, shards, tile, every);
  }
  int64_t available_bytes() const override { return gpu_.available_bytes(); }
  std::string memory_place() const override { return gpu_.memory_place(); }
  bool has_own_memory() const override { return true; }
  double measure_matmul_rate(double seconds) override {
    return measure_device_rates(gpu_.matmul(), Precision::kBf16, gpu_.compute(), seconds).products;
  }
  ActivationShape stored_inputs_shape(int64_t tokens, double every) const override {
    return device_stored_inputs_shape(KeptLayers(config_.layers, every), tokens, config_.hidden);
  }

  void load_weights(const WeightsRequest& request) override {
    cudaStream_t stream = gpu_.compute();
    weights_ =
        request.checkpoint
            ? load_device_weights(*request.checkpoint, config_, request.landmarks, Precision::kBf16, stream)
            : random_device_weights(config_, request.landmarks, request.seed, Precision::kBf16, stream);
    add_landmark_queries(weights_, request.landmarks.strided_bands, stream);
  }
  void begin(const ShardPlan& shards, const TrainingEngineOptions& options) override {
    const TrainerOptions& from = options.trainer;
    DeviceTrainerOptions to{from.adamw, from.schedule, from.clip, from.z_loss, {}};
    to.pass = {options.tile, from.checkpointing.every, from.checkpointing.store, options.deterministic};
    session_.together([&] {
      if (options.deterministic) gpu_.choose_products_alike();
      trainer_ = std::make_unique<DeviceTrainer>(gpu_.room(), session_, weights_, pattern_, shards, to);
    });
  }

  StepResult step(int64_t number, std::span<const TrainingSequence> sequences) override {
    return trainer_->step(number, sequences);
  }
  double validate(std::span<const TrainingSequence> sequences) override {
    return trainer_->validate(sequences);
  }
  StepTimes times() override { return trainer_->times(); }
  DeviceMemoryUse device_memory() const override { return gpu_.memory_use(); }
  int64_t updates() const override { return trainer_->optimizer().steps(); }

  std::vector<ParameterSize> parameters() override {
    std::vector<ParameterSize> sizes;
    for (const DeviceSection& section : sections_of(weights_))
      for (const DeviceParameter& parameter : section.parameters)
        sizes.emplace_back(parameter.name, parameter.size);
    return sizes;
  }
  TrainingSnapshot snapshot(const CheckpointWriter& writer) override {
    DeviceOptimizer& optimizer = trainer_->optimizer();
    return {arrays_of(weights_, gpu_.compute()), optimizer.layout(), optimizer.arrays(), copy(), writer};
  }
  void restore(OptimizerStateReader& reader, int64_t updates) override {
    DeviceOptimizer& optimizer = trainer_->optimizer();
    read_optimizer_state(session_, reader, optimizer.layout(), optimizer.arrays(), copy());
    optimizer.restore(updates);
    gpu_.device().synchronize();
    gpu_.room().transport.check_health();
  }
  Dtype matrix_type() const override { return Dtype::kBF16; }
  ModelTensors model_tensors() override {
    ModelTensors all{arrays_of(weights_, gpu_.compute()), {}};
    all.tensors = longhalo::model_tensors(all.arrays);
    all.host_bytes = [copy = copy(), here = std::make_shared<HostBuffer<std::byte>>()](NamedTensor tensor) {
      *here = HostBuffer<std::byte>();  // before the next one is made
      *here = copy_tensor(tensor, copy);
      return tensor.bytes;
    };
    return all;
  }

 private:
  CopyBytes copy() {
    return [this](void* to, const void* from, int64_t bytes) {
      const Waiting waiting("this rank's GPU, for a training job's state");
      copy_async(static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes, gpu_.compute());
      wait_for_stream(gpu_.compute(), "a training job's state, from or to this rank's GPU");
      gpu_.room().transport.check_health();
    };
  }

  const MpiSession& session_;
  ModelConfig config_;
  AttentionPattern pattern_;
  RankGpu gpu_;
  DeviceWeights weights_;
  std::unique_ptr<DeviceTrainer> trainer_;
};

}  // namespace

std::unique_ptr<TrainingEngine> make_cuda_training_engine(const MpiSession& session,
                                                          std::unique_ptr<Device> device,
                                                          TransportChoice transport,
                                                          const ModelConfig& config,
                                                          const AttentionPattern& pattern) {
  session.together([&] { require_one_exact_band(pattern); });
  return std::make_unique<CudaTrainingEngine>(session, std::move(device), transport, config, pattern);
}

}  // namespace longhalo
