#include "model/device_context.hpp"

#include <algorithm>
#include <limits>

namespace longhalo {
namespace {

// A quarter more than is kept, so that memory moves rarely while a context grows.
int64_t with_slack(int64_t count) {
  return count + std::max<int64_t>(count / 4, 64);
}

// Pooling states of segments without a token: maximum -infinity, all else 0.
std::vector<float> empty_states(int64_t states, int64_t kv_heads, int64_t state_floats) {
  std::vector<float> values(static_cast<size_t>(states * state_floats), 0.0F);
  for (int64_t state = 0; state < states; ++state)
    std::fill_n(values.begin() + state * state_floats, kv_heads, -std::numeric_limits<float>::infinity());
  return values;
}

}  // namespace

int64_t DeviceKeyRows::allocated_bytes(int64_t layers, int64_t row_elements, int64_t count) {
  return layers * with_slack(count) * row_elements * static_cast<int64_t>(sizeof(BFloat16));
}

// `rows` rows copied, or left undefined where `from` is null, and zeros after them.
DeviceBuffer<BFloat16> DeviceKeyRows::made(int64_t capacity, const BFloat16* from, int64_t rows,
                                           cudaStream_t stream) const {
  DeviceBuffer<BFloat16> buffer(capacity * row_elements_, "keys and values of the context", stream);
  if (from != nullptr && rows > 0) copy_async(buffer.data(), from, rows * row_elements_, stream);
  const int64_t filled = from != nullptr ? rows * row_elements_ : 0;
  check_cuda(cudaMemsetAsync(buffer.data() + filled, 0,
                             static_cast<size_t>(buffer.size() - filled) * sizeof(BFloat16), stream),
             "clearing rows of the context");
  return buffer;
}

void DeviceKeyRows::reset(int64_t first, int64_t count, cudaStream_t stream) {
  buffers_.clear();
  first_ = first;
  count_ = count;
  capacity_ = with_slack(count);
  for (int64_t layer = 0; layer < layers_; ++layer)
    buffers_.push_back(made(capacity_, nullptr, 0, stream));
}

bool DeviceKeyRows::append(int64_t rows, int64_t keep, cudaStream_t stream) {
  const bool full = count_ + rows > capacity_;
  if (full) {  // the oldest rows go and the kept ones move to the front of new memory
    const int64_t kept = std::min(keep, count_);
    const int64_t from = (count_ - kept) * row_elements_;
    capacity_ = with_slack(kept + rows);
    for (DeviceBuffer<BFloat16>& buffer : buffers_)
      buffer = made(capacity_, buffer.data() + from, kept, stream);
    first_ += count_ - kept;
    count_ = kept;
  }
  count_ += rows;
  return full;
}

DeviceKeyRows DeviceKeyRows::clone(cudaStream_t stream) const {
  DeviceKeyRows copy(layers_, row_elements_);
  copy.first_ = first_;
  copy.count_ = count_;
  copy.capacity_ = capacity_;
  for (const DeviceBuffer<BFloat16>& buffer : buffers_)
    copy.buffers_.push_back(made(capacity_, buffer.data(), count_, stream));
  return copy;
}

BandKeys<BFloat16> DeviceKeyRows::as_band(const Band& band, int64_t layer, int64_t count) const {
  return rows_as_band(band, rows(layer), row_elements_, first_, count);
}

DeviceContext::DeviceContext(const ModelConfig& config, const AttentionPattern& pattern, cudaStream_t stream)
    : DeviceContext(config.layers, 2 * config.kv_size()) {
  const size_t strided = pattern.strides().size();
  exact_.reset(0, 0, stream);
  for (size_t band = 0; band < strided; ++band)
    landmarks_.emplace_back(config.layers, 2 * config.kv_size()).reset(0, 0, stream);
  state_floats_ = pool_state_floats(config.kv_heads, config.head_dim);
  if (strided == 0) return;
  open_ = to_device<float>(empty_states(layers_ * bands(), config.kv_heads, state_floats_),
                           "pooling states of the context", stream);
}

DeviceContext DeviceContext::clone(cudaStream_t stream) const {
  DeviceContext copy(layers_, 0);
  copy.position_ = position_;
  copy.state_floats_ = state_floats_;
  copy.exact_ = exact_.clone(stream);
  for (const DeviceKeyRows& band : landmarks_)
    copy.landmarks_.push_back(band.clone(stream));
  copy.open_ = DeviceBuffer<float>(open_.size(), "pooling states of the context", stream);
  if (!open_.empty()) copy_async(copy.open_.data(), open_.data(), open_.size(), stream);
  return copy;
}

int64_t DeviceContext::bytes() const {
  int64_t total = exact_.bytes() + open_.bytes();
  for (const DeviceKeyRows& band : landmarks_)
    total += band.bytes();
  return total;
}

BandKeys<BFloat16> rows_as_band(const Band& band, const BFloat16* rows, int64_t row_elements, int64_t first,
                                int64_t count) {
  if (count == 0) return {band, nullptr, nullptr, first, 0, row_elements};
  return {band, rows, rows + row_elements / 2, first, count, row_elements};
}

std::vector<BandKeys<BFloat16>> band_keys(const AttentionPattern& pattern, const BandKeys<BFloat16>& exact,
                                          std::span<const BandKeys<BFloat16>> landmarks) {
  std::vector<BandKeys<BFloat16>> bands;
  size_t strided = 0;
  for (const Band& band : pattern.bands) {
    bands.push_back(band.stride == 1 ? exact : landmarks[strided++]);
    bands.back().band = band;
  }
  return bands;
}

}  // namespace longhalo
