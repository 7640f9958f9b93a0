// The small pretrained model that tests run when it is there: it is fetched once and not part of the
// repository.
#pragma once

#include <filesystem>
#include <string>

namespace longhalo::test {

inline const std::filesystem::path kRealModel =
    std::filesystem::path(LONGHALO_SOURCE_DIR) / "models/smollm2-135m-instruct";

/// Why a test of it is skipped; empty where the model is there.
inline std::string why_no_real_model() {
  if (std::filesystem::exists(kRealModel / "config.json")) return "";
  return "no model at " + kRealModel.string() + ": run scripts/fetch_model.py";
}

}  // namespace longhalo::test
