// The tensor-core instructions that every GPU from Ampere on has (sm_80), as small functions: asynchronous
// copies into shared memory, ldmatrix, and mma.sync on 16 x 8 x 16 tiles of bf16 with fp32 sums.
//
// Where a lane's numbers lie in a tile (g = lane / 4, t = lane % 4; PTX ISA, "Matrix Fragments for
// mma.m16n8k16"):
//   A [16 x 16], 4 registers of two:  rows g and g + 8 of columns 2t, 2t+1; then both rows of columns 2t+8,
//   2t+9 B [16 x 8],  2 registers of two:  rows 2t, 2t+1 of column g; then rows 2t+8, 2t+9 C [16 x 8],  4
//   numbers:           row g, columns 2t, 2t+1; then row g + 8
// Device code only.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace longhalo {

__device__ __forceinline__ uint32_t shared_offset(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- Copies of 16 bytes from global to shared memory that run beside the thread. Both sides are aligned.

__device__ __forceinline__ void copy_async_16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

/// Writes zeros where `there` is false; `from` is not read then.
__device__ __forceinline__ void copy_async_16_or_zero(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}

/// Four bytes instead of sixteen.
__device__ __forceinline__ void copy_async_4_or_zero(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(there ? 4 : 0)
               : "memory");
}

/// Ends a group of this thread's copies.
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until at most `kPending` of this thread's latest groups are still flying.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- Four 8 x 8 matrices of 16-bit numbers from shared memory; lane l names row l % 8 of matrix l / 8.

__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

/// d = a b + c on the whole warp.
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                             const float (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]),
        "f"(c[3]));
}

/// 2^x within 2 ulp; 0 for x below -126, -infinity included.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Two bf16 numbers, the first in the low half; rounds to nearest, ties to even.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

}  // namespace longhalo
