#include "model/training_snapshot.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "core/text.hpp"
#include "model/save_model.hpp"
#include "storage/sha256.hpp"

namespace longhalo {
namespace {

// In the order of the buckets also as text, which is how the reader lists groups.
std::string bucket_name(size_t index) {
  char name[40];
  std::snprintf(name, sizeof name, "bucket_%08zu", index);
  return name;
}

HostBuffer<float> copy_of(std::span<const float> values, const char* purpose) {
  HostBuffer<float> copy(static_cast<int64_t>(values.size()), purpose);
  std::copy(values.begin(), values.end(), copy.data());
  return copy;
}

}  // namespace

TrainingSnapshot::TrainingSnapshot(const Weights& weights, const ShardedOptimizer& optimizer,
                                   const CheckpointWriter& writer)
    : tensors_(model_tensors(weights, joined_)),
      master_(copy_of(optimizer.master(), "a checkpoint's master weights")),
      first_moment_(copy_of(optimizer.first_moment(), "a checkpoint's first moments")),
      second_moment_(copy_of(optimizer.second_moment(), "a checkpoint's second moments")) {
  for (const size_t index : writer.tensors_written_here(tensors_)) {
    std::span<const std::byte>& bytes = tensors_[index].bytes;
    HostBuffer<std::byte>& copy =
        tensor_bytes_.emplace_back(static_cast<int64_t>(bytes.size()), "a checkpoint's weights");
    std::memcpy(copy.data(), bytes.data(), bytes.size());
    bytes = copy.span();
  }
  const std::vector<ElementRange> ranges = optimizer.owned_ranges();
  int64_t own = 0;
  for (size_t index = 0; index < ranges.size(); ++index) {
    const ElementRange bucket = optimizer.bucket(static_cast<int64_t>(index)), part = ranges[index];
    const auto of = [&](const HostBuffer<float>& values) {
      return values.span().subspan(static_cast<size_t>(own), static_cast<size_t>(part.size()));
    };
    slices_.push_back(
        {{bucket_name(index), part.begin - bucket.begin, part.end - bucket.begin, bucket.size()},
         {{"master", of(master_)},
          {"first_moment", of(first_moment_)},
          {"second_moment", of(second_moment_)}}});
    own += part.size();
  }
}

void restore_optimizer(const MpiSession& session, OptimizerStateReader& reader, int64_t steps,
                       ShardedOptimizer& optimizer) {
  const std::vector<std::string> groups = reader.groups();
  session.together([&] {
    int64_t stored = 0;
    for (const std::string& group : groups)
      stored += reader.total(group);
    if (stored != optimizer.elements())
      throw UserError(
          text("the checkpoint is of ", stored, " parameters, the model has ", optimizer.elements()),
          "the optimizer's state", "resume with the model that the checkpoint was made with");
    int64_t own = 0;
    for (const ElementRange& part : optimizer.owned_ranges()) {
      int64_t begin = 0;  // of the group
      for (const std::string& group : groups) {
        const int64_t end = begin + reader.total(group);
        const int64_t from = std::max(begin, part.begin), to = std::min(end, part.end);
        const auto read = [&](const char* array, std::span<float> values) {
          reader.read(
              group, array, from - begin,
              values.subspan(static_cast<size_t>(own + from - part.begin), static_cast<size_t>(to - from)));
        };
        if (from < to) {
          read("master", optimizer.master());
          read("first_moment", optimizer.first_moment());
          read("second_moment", optimizer.second_moment());
        }
        begin = end;
      }
      own += part.size();
    }
  });
  optimizer.restore(steps);
}

std::string fingerprint_of(const std::vector<Parameter>& parameters) {
  std::string list;
  for (const Parameter& parameter : parameters)
    list += text(parameter.name, " ", parameter.values.size(), "\n");
  return sha256_of_text(list).substr(0, 16);
}

}  // namespace longhalo
