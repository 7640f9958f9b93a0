// A disk store of activations that is odd in every way, for tests.
#pragma once

#include "storage/disk_activation_store.hpp"

namespace longhalo::testing {

// The last chunk is short, its last block too.
inline const ActivationShape kOddShape{{0, 2, 4, 6}, 1237, 33, ActivationType::kBfloat16};

inline DiskStoreOptions small_options(const std::filesystem::path& directory,
                                      const ActivationShape& shape = kOddShape) {
  DiskStoreOptions options;
  options.directory = directory;
  options.job = "test";
  options.shape = shape;
  options.chunk_bytes = 8192;
  options.buffers = 4;
  options.threads = 3;
  return options;
}

}  // namespace longhalo::testing
