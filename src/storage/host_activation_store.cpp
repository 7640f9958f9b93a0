#include <algorithm>
#include <cstring>
#include <utility>

#include "core/clock.hpp"
#include "core/error.hpp"
#include "core/text.hpp"
#include "storage/activation_store.hpp"

namespace longhalo {

std::string_view activation_type_name(ActivationType type) {
  return type == ActivationType::kBfloat16 ? "bfloat16" : "float32";
}

int64_t activation_type_bytes(ActivationType type) {
  return type == ActivationType::kBfloat16 ? 2 : 4;
}

int ActivationShape::slot_of(int layer) const {
  const auto found = std::find(layers.begin(), layers.end(), layer);
  check(found != layers.end(), text("layer ", layer, " is one whose activations are kept"));
  return static_cast<int>(found - layers.begin());
}

HostActivationStore::HostActivationStore(ActivationShape shape)
    : shape_(std::move(shape)), memory_(shape_.total_bytes()), is_put_(shape_.layers.size()) {}

std::span<std::byte> HostActivationStore::place_of(int layer) {
  const auto bytes = static_cast<size_t>(shape_.layer_bytes());
  return memory_.span().subspan(static_cast<size_t>(shape_.slot_of(layer)) * bytes, bytes);
}

std::span<const std::byte> HostActivationStore::stored(int layer) {
  check(is_put_[static_cast<size_t>(shape_.slot_of(layer))],
        text("layer ", layer, " was put before it is read"));
  return place_of(layer);
}

void HostActivationStore::put(int layer, std::span<const std::byte> bytes) {
  check(static_cast<int64_t>(bytes.size()) == shape_.layer_bytes(), "a layer is put as a whole");
  put_from(layer, [&](int64_t offset, std::span<std::byte> into) {
    std::memcpy(into.data(), bytes.data() + offset, into.size());
  });
}

void HostActivationStore::put_from(int layer, Source source) {
  const Stopwatch clock;
  const std::span<std::byte> place = place_of(layer);
  if (!place.empty()) source(0, place);
  is_put_[static_cast<size_t>(shape_.slot_of(layer))] = true;
  figures_.bytes_put += shape_.layer_bytes();
  figures_.write_seconds += clock.seconds();
  figures_.put_wait_seconds += clock.seconds();
}

void HostActivationStore::finish_put(int layer) {
  shape_.slot_of(layer);
}

void HostActivationStore::start_fetch(int layer) {
  stored(layer);
}

void HostActivationStore::get(int layer, std::span<std::byte> bytes) {
  check(static_cast<int64_t>(bytes.size()) == shape_.layer_bytes(), "a layer is taken as a whole");
  get_to(layer, [&](int64_t offset, std::span<const std::byte> from) {
    std::memcpy(bytes.data() + offset, from.data(), from.size());
  });
}

void HostActivationStore::get_to(int layer, const Sink& sink) {
  const Stopwatch clock;
  const std::span<const std::byte> bytes = stored(layer);
  if (!bytes.empty()) sink(0, bytes);
  figures_.bytes_fetched += shape_.layer_bytes();
  figures_.read_seconds += clock.seconds();
  figures_.get_wait_seconds += clock.seconds();
}

}  // namespace longhalo
