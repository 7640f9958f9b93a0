#include "model/cuda_engine.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "core/text.hpp"
#include "device/memory_pool.hpp"
#include "model/device_decoder.hpp"
#include "model/device_outputs.hpp"
#include "model/device_prefill.hpp"
#include "model/device_rates.hpp"
#include "model/rank_gpu.hpp"

namespace longhalo {
namespace {

// Tokens a tile for each multiprocessor: with query tiles of 128 every multiprocessor then gets the same
// number of items, whatever the number of heads, and the products' tiles come out even, too. 16,896 on an
// H200.
constexpr int64_t kTokensAMultiprocessor = 128;
constexpr int64_t kDecodeTile = 1024;

struct CudaContext : DocumentContext {
  explicit CudaContext(DeviceContext kept) : context(std::move(kept)) {}
  int64_t bytes() const override { return context.bytes(); }
  DeviceContext context;
};

class CudaContinuation : public Continuation {
 public:
  CudaContinuation(DeviceDecoder& decoder, DeviceContext context)
      : decoder_(decoder), state_(std::move(context)) {}
  void extend(std::span<const int32_t> tokens) override { decoder_.extend(state_, tokens); }
  int32_t most_likely() override { return decoder_.most_likely(); }
  std::span<const float> logits() override { return decoder_.logits(); }

 private:
  DeviceDecoder& decoder_;
  DecodedContext state_;
};

class CudaReading : public Reading {
 public:
  CudaReading(const MpiSession& session, const DeviceRoom& room, const DeviceWeights& weights,
              const AttentionPattern& pattern, const ShardPlan& shards, int64_t tile)
      : session_(session), shards_(shards), prefill_(room, weights, pattern, shards, tile) {}

  void prefill(std::span<const int32_t> tokens, KeepContext keep, const PrefillProgress& progress) override {
    std::optional<DeviceContext> context = prefill_.run(tokens, keep, progress);
    if (context) context_ = std::make_unique<CudaContext>(std::move(*context));
  }
  std::unique_ptr<DocumentContext> take_context() override { return std::move(context_); }
  void require_finite() const override { longhalo::require_finite(prefill_); }
  std::vector<float> scores(std::span<const int32_t> tokens, const RowProgress& progress) override {
    return score_tokens(session_, prefill_, shards_, tokens, progress);
  }
  std::vector<float> embeddings(int64_t chunk_tokens, int64_t first_token) override {
    return embed_chunks(session_, prefill_, shards_, chunk_tokens, first_token);
  }
  const PrefillCost& cost() const override { return prefill_.cost(); }

 private:
  const MpiSession& session_;
  const ShardPlan& shards_;
  DevicePrefill prefill_;
  std::unique_ptr<CudaContext> context_;
};

class CudaEngine : public Engine {
 public:
  CudaEngine(const MpiSession& session, std::unique_ptr<Device> device, TransportChoice transport,
             const ModelConfig& config, const AttentionPattern& pattern, Precision precision)
      : session_(session),
        config_(config),
        pattern_(pattern),
        precision_(precision),
        gpu_(session, std::move(device), transport) {}

  const ModelConfig& config() const override { return config_; }
  const AttentionPattern& pattern() const override { return pattern_; }
  Precision precision() const override { return precision_; }
  std::string device() const override { return gpu_.name(); }
  std::string transport() const override { return gpu_.transport_reason(); }
  int64_t default_tile() const override {
    return kTokensAMultiprocessor * gpu_.device().info().multiprocessors;
  }

  void load_weights(const WeightsRequest& request, const LayerProgress& progress) override;

  std::vector<MemoryItem> memory(const ShardPlan& shards, int64_t tile, const Wanted& wanted) const override;
  int64_t available_bytes() const override {
    return gpu_.available_bytes() + (weights_.layers.empty() ? 0 : weights_bytes());
  }
  std::string memory_place() const override { return gpu_.memory_place(); }
  DeviceMemoryUse device_memory() const override { return gpu_.memory_use(); }
  MatmulRates measure_rates(double seconds) override;

  std::unique_ptr<Reading> read(const ShardPlan& shards, int64_t tile) override {
    decoder_.reset();  // its memory serves the reading
    gpu_.device().synchronize();
    memory_pool().reset_high_marks();
    return std::make_unique<CudaReading>(session_, gpu_.room(), weights_, pattern_, shards, tile);
  }
  std::unique_ptr<DocumentContext> empty_context() override {
    return std::make_unique<CudaContext>(DeviceContext(config_, pattern_, gpu_.compute()));
  }
  std::unique_ptr<Continuation> continue_from(const DocumentContext& context) override {
    cudaStream_t stream = gpu_.compute();
    if (!decoder_)
      decoder_ = std::make_unique<DeviceDecoder>(weights_, pattern_, kDecodeTile, gpu_.matmul(), stream);
    return std::make_unique<CudaContinuation>(
        *decoder_, dynamic_cast<const CudaContext&>(context).context.clone(stream));
  }

 private:
  int64_t weights_bytes() const {
    return device_weights_bytes(config_, precision_, static_cast<int64_t>(pattern_.strides().size()));
  }

  const MpiSession& session_;
  ModelConfig config_;
  AttentionPattern pattern_;
  Precision precision_;
  RankGpu gpu_;
  DeviceWeights weights_;
  std::unique_ptr<DeviceDecoder> decoder_;
};

void CudaEngine::load_weights(const WeightsRequest& request, const LayerProgress& progress) {
  const int64_t for_a_while =
      loading_bytes(config_, precision_, static_cast<int64_t>(request.calibration.size()));
  const int64_t needed = weights_bytes() + for_a_while, available = available_bytes();
  if (needed > available)
    throw UserError(
        text("the weights need ", needed / 1'000'000, " MB of GPU memory in ", name_of(precision_),
             for_a_while > 0
                 ? text(", ", for_a_while / 1'000'000, " of these only while they are loaded, and ")
                 : ", and ",
             available / 1'000'000, " MB are free"),
        memory_place(),
        precision_ == Precision::kBf16
            ? "use a GPU with more memory, run.precision: int8 or fp8, or a smaller model; see that no "
              "other program holds memory of this GPU (nvidia-smi)"
            : "use a GPU with more memory or a smaller model; see that no other program holds "
              "memory of this GPU (nvidia-smi)");
  cudaStream_t stream = gpu_.compute();
  weights_ = request.checkpoint ? load_device_weights(*request.checkpoint, config_, request.landmarks,
                                                      precision_, stream, request.calibration, progress)
                                : random_device_weights(config_, request.landmarks, request.seed, precision_,
                                                        stream, request.calibration);
}

MatmulRates CudaEngine::measure_rates(double seconds) {
  MatmulRates rates = measure_device_rates(gpu_.matmul(), precision_, gpu_.compute(), seconds);
  if (precision_ == Precision::kFp8) {
    const double in_bf16 = bf16_share_of_fp8(config_);
    rates.products = 1 / ((1 - in_bf16) / rates.products + in_bf16 / rates.attention);
  }
  return rates;
}

std::vector<MemoryItem> CudaEngine::memory(const ShardPlan& shards, int64_t tile,
                                           const Wanted& wanted) const {
  const ModelConfig& c = config_;
  const DevicePrefill::Memory prefill = DevicePrefill::memory(c, precision_, pattern_, shards, tile);
  const bool keeps = wanted.context == KeepContext::kYes;
  std::vector<MemoryItem> items{{"weights", weights_bytes()},
                                {"residual stream", prefill.residual},
                                {"keys and values of a layer", prefill.keys},
                                {"workspace", prefill.workspace + (keeps ? 0 : prefill.landmarks)}};
  // Scores and embeddings come after one another.
  int64_t outputs = 0;
  if (wanted.scores) outputs = score_bytes(c, shards);
  if (wanted.embed_chunk_tokens > 0)
    outputs = std::max(outputs, embed_bytes(c, shards, wanted.embed_chunk_tokens));
  if (outputs > 0) items.push_back({"scores and embeddings", outputs});
  if (!keeps) return items;

  const auto context_bytes = [&](int64_t exact, int64_t more) {
    int64_t bytes = DeviceKeyRows::allocated_bytes(c.layers, 2 * c.kv_size(), exact + more);
    for (const int64_t stride : pattern_.strides())
      bytes += DeviceKeyRows::allocated_bytes(c.layers, 2 * c.kv_size(), (shards.tokens() + more) / stride);
    return bytes;
  };
  const int64_t exact = std::min(pattern_.exact_reach(), shards.tokens());
  items.push_back({"context", context_bytes(exact, 0)});
  // A query's copy, grown once, when the reading has released its memory.
  const int64_t reading = prefill.residual + prefill.keys + prefill.workspace + outputs;
  const int64_t query = context_bytes(exact, exact / 4) + DeviceDecoder::bytes(c, precision_, kDecodeTile);
  if (query > reading) items.push_back({"a query, beyond what the reading has released", query - reading});
  return items;
}

}  // namespace

std::unique_ptr<Engine> make_cuda_engine(const MpiSession& session, std::unique_ptr<Device> device,
                                         TransportChoice transport, const ModelConfig& config,
                                         const AttentionPattern& pattern, Precision precision) {
  session.together([&] {
    const DeviceInfo& info = device->info();
    if (precision == Precision::kFp8 && info.major < 9)
      throw UserError(text(info.name, " has compute capability ", info.major, ".", info.minor,
                           ", and fp8 products with a scale a token need 9.0"),
                      "run.precision: fp8", "use a Hopper GPU or a later one, or run.precision: bf16");
    if (precision == Precision::kInt8 && !info.is_hopper())
      throw UserError(text(info.name, " has compute capability ", info.major, ".", info.minor,
                           ", and the int8 products are made for 9.0"),
                      "run.precision: int8",
                      "use a Hopper GPU, or run.precision: bf16, or fp8 on GPUs later than Hopper");
  });
  return std::make_unique<CudaEngine>(session, std::move(device), transport, config, pattern, precision);
}

}  // namespace longhalo
