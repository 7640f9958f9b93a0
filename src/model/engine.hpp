// What a job asks of a model, whichever device computes it: one engine a job, made for the CPU (fp32) or for
// GPUs (bf16, fp8). Which one runs, only the code that made it knows.
//
//   engine->load_weights(...)
//   engine->memory(shards, tile, wanted)        before the work: bytes by item
//   reading = engine->read(shards, tile)        one document over all ranks
//   reading->prefill(...); require_finite(); scores(...); embeddings(...); take_context()
//   continuation = engine->continue_from(context); generate(*continuation, ...)    one query, on one rank
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/shard_plan.hpp"
#include "model/attention_pattern.hpp"
#include "model/generator.hpp"
#include "model/outputs.hpp"
#include "model/precision.hpp"
#include "model/prefill_cost.hpp"
#include "model/weights.hpp"

namespace longhalo {

/// Tokens of WeightsRequest::calibration that are used, the first ones.
inline constexpr int64_t kCalibrationTokens = 8192;

struct WeightsRequest {
  std::optional<std::filesystem::path> checkpoint;  // empty: random weights
  uint64_t seed = 0;                                // of random weights
  LandmarkWeights landmarks;
  std::vector<int32_t> calibration = {};  // tokens like those that will be read, which make fp8 more exact
};

/// What is wanted of a document beside its residual stream; it decides about memory.
struct Wanted {
  KeepContext context = KeepContext::kNo;
  bool scores = false;
  int64_t embed_chunk_tokens = 0;  // 0: no embeddings
};

struct MemoryItem {
  std::string name;
  int64_t bytes = 0;
};

/// FLOP/s of large matrix products of this rank, measured: as the layers' products (in fp8 some of them in
/// bf16) and as attention are computed (fp8 speeds up the former alone).
struct MatmulRates {
  double products = 0;
  double attention = 0;
};

/// Device memory of this rank since the last read(); zeros on the CPU.
struct DeviceMemoryUse {
  int64_t arrays_bytes = 0;    // most that arrays held at once
  int64_t reserved_bytes = 0;  // most that was taken from the card
  double fragmentation = 0;    // share of reserved that arrays never filled
};

/// What remains of a sequence, for queries to go on from.
class DocumentContext {
 public:
  virtual ~DocumentContext() = default;
  /// Bytes of keys, values and pooling state that are kept.
  virtual int64_t bytes() const = 0;
};

/// One document read by all ranks. All functions are collective but take_context(), require_finite(), cost().
class Reading {
 public:
  virtual ~Reading() = default;
  /// `tokens`: the whole sequence of the shard plan, on every rank, all inside the vocabulary.
  virtual void prefill(std::span<const int32_t> tokens, KeepContext keep,
                       const PrefillProgress& progress = {}) = 0;
  /// The context of the prefill, with KeepContext::kYes; once.
  virtual std::unique_ptr<DocumentContext> take_context() = 0;
  /// As in outputs.hpp.
  virtual void require_finite() const = 0;
  virtual std::vector<float> scores(std::span<const int32_t> tokens, const RowProgress& progress = {}) = 0;
  virtual std::vector<float> embeddings(int64_t chunk_tokens, int64_t first_token) = 0;
  virtual const PrefillCost& cost() const = 0;
};

class Engine {
 public:
  virtual ~Engine() = default;
  virtual const ModelConfig& config() const = 0;
  virtual const AttentionPattern& pattern() const = 0;
  virtual Precision precision() const = 0;
  /// Of this rank: "CPU", or the GPU's name and number.
  virtual std::string device() const = 0;
  /// One sentence: how ranks exchange halos, and why so.
  virtual std::string transport() const = 0;

  /// Tokens that go through a layer at once where nothing else is said.
  virtual int64_t default_tile() const = 0;

  /// Loads or makes the weights on this rank. Throws UserError. Not collective.
  virtual void load_weights(const WeightsRequest& request, const LayerProgress& progress = {}) = 0;

  /// Bytes that the rank with the largest share holds during a reading, by item, weights included.
  virtual std::vector<MemoryItem> memory(const ShardPlan& shards, int64_t tile,
                                         const Wanted& wanted) const = 0;
  /// What memory() may add up to on this rank: what is free now, and what the weights hold already.
  virtual int64_t available_bytes() const = 0;
  /// Where that memory is, for messages: "GPU 0 (NVIDIA H200) of node1".
  virtual std::string memory_place() const = 0;
  virtual DeviceMemoryUse device_memory() const = 0;
  /// Measured for about `seconds`. Not collective.
  virtual MatmulRates measure_rates(double seconds) = 0;

  /// `shards` must outlive the reading; the reading not the engine. At most `tile` tokens go through a layer
  /// at once.
  virtual std::unique_ptr<Reading> read(const ShardPlan& shards, int64_t tile) = 0;
  virtual std::unique_ptr<DocumentContext> empty_context() = 0;
  /// A query's own copy of a context. Not collective. One at a time computes.
  virtual std::unique_ptr<Continuation> continue_from(const DocumentContext& context) = 0;
};

std::unique_ptr<Engine> make_cpu_engine(const MpiSession& session, const ModelConfig& config,
                                        const AttentionPattern& pattern);

}  // namespace longhalo
