// Named ranges for profilers (Nsight); they cost nothing when none is attached.
#pragma once

#include <nvtx3/nvToolsExt.h>

namespace longhalo {

class NvtxRange {
 public:
  explicit NvtxRange(const char* name) { nvtxRangePushA(name); }
  ~NvtxRange() { nvtxRangePop(); }
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
};

}  // namespace longhalo
