#include "model/checkpoint_reader.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/error.hpp"
#include "core/text.hpp"
#include "model/save_model.hpp"

namespace longhalo {
namespace {

// On the bits, which the compiler does many at a time: an exponent of all ones is an infinity or a NaN.
bool all_finite(std::span<const float> values) {
  constexpr uint32_t kExponent = 0x7f800000;
  uint32_t bad = 0;
  for (const float value : values)
    bad |= static_cast<uint32_t>((std::bit_cast<uint32_t>(value) & kExponent) == kExponent);
  return bad == 0;
}

bool all_finite(std::span<const BFloat16> values) {
  constexpr uint16_t kExponent = 0x7f80;
  uint16_t bad = 0;
  for (const BFloat16 value : values)
    bad |= static_cast<uint16_t>((value.bits & kExponent) == kExponent);
  return bad == 0;
}

void require_finite(bool finite, const TensorView& tensor) {
  if (finite) return;
  throw UserError("it holds values that are infinite or no number",
                  text(tensor.file, ", tensor ", tensor.name),
                  "the file is damaged, or its values do not fit its type: fetch or convert it again");
}

// Elements [begin, begin + count) of a tensor, as a tensor.
TensorView portion_of(const TensorView& tensor, int64_t begin, int64_t count) {
  TensorView portion = tensor;
  const auto size = static_cast<size_t>(dtype_bytes(tensor.dtype));
  portion.shape = {count};
  portion.bytes = tensor.bytes.subspan(static_cast<size_t>(begin) * size, static_cast<size_t>(count) * size);
  return portion;
}

}  // namespace

HostBuffer<float> CheckpointReader::read(const std::string& name, std::vector<int64_t> shape) const {
  int64_t elements = 1;
  for (const int64_t size : shape)
    elements *= size;
  HostBuffer<float> values(elements, "weights");
  read_into(name, std::move(shape), values.span());
  return values;
}

void CheckpointReader::read_into(const std::string& name, std::vector<int64_t> shape,
                                 std::span<float> out) const {
  const TensorView& tensor = tensors_.view(name, shape);
  copy_as_float(tensor, out);
  drop_pages(tensor);
  require_finite(all_finite(out), tensor);
}

void CheckpointReader::read_portions(const std::string& name, std::vector<int64_t> shape,
                                     const std::function<std::span<BFloat16>()>& room,
                                     const std::function<void(std::span<const BFloat16>)>& take) const {
  const TensorView& tensor = tensors_.view(name, shape);
  HostBuffer<float> wide;
  for (int64_t begin = 0; begin < tensor.elements();) {
    const std::span<BFloat16> target = room();
    const int64_t count = std::min(static_cast<int64_t>(target.size()), tensor.elements() - begin);
    const std::span<BFloat16> filled = target.first(static_cast<size_t>(count));
    const TensorView portion = portion_of(tensor, begin, count);
    if (tensor.dtype == Dtype::kBF16) {
      std::memcpy(filled.data(), portion.bytes.data(), portion.bytes.size());
    } else {
      if (wide.size() < count) wide = HostBuffer<float>(count, "a portion of a tensor");
      copy_as_float(portion, wide.span().first(filled.size()));
      std::transform(wide.data(), wide.data() + count, filled.data(), to_bfloat16);
    }
    require_finite(all_finite(filled), tensor);
    take(filled);
    begin += count;
  }
  drop_pages(tensor);
}

std::vector<HostBuffer<float>> CheckpointReader::landmark_queries(int64_t layer, const ModelConfig& c,
                                                                  int64_t bands) const {
  const std::string name = layer_prefix(layer) + "self_attn.landmark_query";
  std::vector<HostBuffer<float>> queries;
  if (bands == 0 || !contains(name)) return queries;
  const bool single = tensors_.view(name).shape.size() == 2;
  const HostBuffer<float> all = single && bands == 1 ? read(name, {c.kv_heads, c.head_dim})
                                                     : read(name, {bands, c.kv_heads, c.head_dim});
  for (int64_t band = 0; band < bands; ++band) {
    HostBuffer<float>& query = queries.emplace_back(c.kv_size(), "landmark queries");
    std::copy_n(all.data() + band * c.kv_size(), c.kv_size(), query.data());
  }
  return queries;
}

HostBuffer<float> CheckpointReader::landmark_bias(int64_t layer, const ModelConfig& c,
                                                  std::optional<double> bias, double fallback) const {
  const std::string name = layer_prefix(layer) + "self_attn.landmark_bias";
  if (bias || !contains(name)) return filled(c.heads, bias.value_or(fallback));
  return read(name, {c.heads});
}

void require_tensors(const std::filesystem::path& directory, const ModelConfig& config) {
  const ModelWeights weights(directory);
  ModelArrays nowhere;
  nowhere.config = config;
  nowhere.layers.resize(static_cast<size_t>(config.layers));
  for (const NamedTensor& tensor : model_tensors(nowhere))
    if (tensor.name.find(".landmark_") == std::string::npos) weights.view(tensor.name, tensor.shape);
  if (!config.tied_embeddings) weights.view("lm_head.weight", std::vector{config.vocabulary, config.hidden});
  // What landmarks add: all layers have it, alike, or none has.
  for (const char* kind : {"self_attn.landmark_query", "self_attn.landmark_bias"}) {
    const auto name_in = [&](int64_t layer) { return layer_prefix(layer) + kind; };
    int64_t first = 0;
    while (first < config.layers && !weights.contains(name_in(first)))
      ++first;
    for (int64_t layer = 0; layer < config.layers && first < config.layers; ++layer)
      weights.view(name_in(layer), weights.view(name_in(first)).shape);
  }
}

std::string layer_prefix(int64_t layer) {
  return text("model.layers.", layer, ".");
}

HostBuffer<float> filled(int64_t count, double value) {
  HostBuffer<float> values(count, "weights");
  std::fill_n(values.data(), count, static_cast<float>(value));
  return values;
}

}  // namespace longhalo
