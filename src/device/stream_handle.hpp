// cudaStream_t without a CUDA header, so that contracts of kernels can name a stream in plain C++.
#pragma once

struct CUstream_st;

namespace longhalo {

using StreamHandle = CUstream_st*;

}  // namespace longhalo
