// Decode on the GPU: few queries over long contexts, positions in device memory inside a CUDA graph; and what
// the door of all GPU attention kernels chooses and refuses.
#include <gtest/gtest.h>

#include <array>

#include "attention_gpu_problem.hpp"
#include "core/error.hpp"
#include "gpu_test.hpp"

namespace longhalo::testing {
namespace {

class GpuDecode : public GpuTest {
 protected:
  static AttentionProblem problem(int64_t kv_heads, int64_t group, int64_t head_dim, int64_t first_query,
                                  int64_t queries) {
    AttentionProblem p;
    p.kv_heads = kv_heads, p.heads = kv_heads * group, p.head_dim = head_dim;
    p.first_query = first_query, p.queries = queries;
    return p;
  }
};

TEST_F(GpuDecode, OneToEightQueriesOverLongContexts) {
  unsigned seed = 1;
  for (int64_t d : {64, 128}) {
    for (int64_t group : {1, 3, 4, 8}) {
      for (int64_t queries : {1, 2, 5, 8}) {
        AttentionProblem p = problem(2, group, d, 100'003, queries);
        add_band_of_history(p, {1, 0, 4096});
        add_band_of_history(p, {64, 4096, kUnlimited});
        p.landmark_bias.assign(static_cast<size_t>(p.heads), -2.0F);
        p.units = units_of(seed);
        fill(p, seed++);
        round_to_bfloat16(p);
        expect_kernel_right(p, AttentionKernel::kDecode, stream(),
                            seed % 2 == 0 ? KeyLayout::kDense : KeyLayout::kInterleaved);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(GpuDecode, DenseContextsOfAnyLength) {
  for (int64_t position : {0, 1, 15, 16, 17, 63, 64, 1000, 4097, 60'001}) {
    AttentionProblem p = problem(1, 4, 128, position, 1);
    add_band_of_history(p, {1, 0, kUnlimited});
    p.units = units_of(static_cast<unsigned>(position));
    fill(p, static_cast<unsigned>(position));
    round_to_bfloat16(p);
    expect_kernel_right(p, AttentionKernel::kDecode, stream());
    if (HasFailure()) return;
  }
}

// More KV heads and rows than the card has places: no split at all.
TEST_F(GpuDecode, ManyHeads) {
  AttentionProblem p = problem(128, 8, 64, 500, 8);
  add_band_of_history(p, {1, 0, 200});
  add_band_of_history(p, {32, 200, kUnlimited});
  fill(p, 3);
  round_to_bfloat16(p);
  expect_kernel_right(p, AttentionKernel::kDecode, stream());
}

// A step is captured once, in a stream that has not run the kernel before, and replayed at other positions.
TEST_F(GpuDecode, OneGraphServesEveryPosition) {
  constexpr int64_t kMost = 10'009;
  for (int64_t queries : {1, 3}) {
    AttentionProblem p = problem(2, 4, 128, 0, queries);
    add_band(p, {1, 0, 4096}, 0, kMost + queries);
    add_band(p, {64, 4096, kUnlimited}, 0, kMost / 64);
    p.landmark_bias = {-3, -2, -1, 0, 1, 2, 0.5F, -0.5F};
    p.units = QueryUnits::kExponents;
    fill(p, 17);
    round_to_bfloat16(p);
    Stream own;
    GpuAttention there(p, own);
    DeviceBuffer<int64_t> position(1, "a position", own);
    Attention<BFloat16> a = there.description();
    a.position = position.data();

    cudaGraph_t graph = nullptr;
    cudaGraphExec_t step = nullptr;
    check_cuda(cudaStreamBeginCapture(own, cudaStreamCaptureModeGlobal), "capture");
    attention_forward(own, a);
    check_cuda(cudaStreamEndCapture(own, &graph), "end of capture");
    check_cuda(cudaGraphInstantiate(&step, graph, 0), "graph");
    for (int64_t at : {0, 1, 62, 64, 100, 4095, 4096, 4159, 4160, 7000, 10'009}) {
      p.first_query = at;
      there.poison();
      copy_async(position.data(), &at, 1, own);
      check_cuda(cudaGraphLaunch(step, own), "graph launch");
      expect_right(p, there.answer());
      if (HasFailure()) break;
    }
    check_cuda(cudaGraphExecDestroy(step), "graph");
    check_cuda(cudaGraphDestroy(graph), "graph");
  }
}

// Steps of two streams overlap without disturbing each other.
TEST_F(GpuDecode, TwoStreamsAtOnce) {
  std::array<AttentionProblem, 2> problems;
  std::array<Stream, 2> streams;
  std::vector<GpuAttention> there;
  std::vector<GpuAnswer> alone;
  for (size_t s = 0; s < 2; ++s) {
    problems[s] = problem(4, 4, 128, 30'000, 1);
    add_band_of_history(problems[s], {1, 0, kUnlimited});
    fill(problems[s], static_cast<unsigned>(s));
    round_to_bfloat16(problems[s]);
    there.emplace_back(problems[s], streams[s]);
    alone.push_back(there[s].run(AttentionKernel::kDecode));
    there[s].poison();
  }
  for (int round = 0; round < 50; ++round)
    for (size_t s = 0; s < 2; ++s)
      attention_forward(streams[s], there[s].description(), AttentionKernel::kDecode);
  for (size_t s = 0; s < 2; ++s)
    EXPECT_TRUE(same_bits(there[s].answer(), alone[s])) << "stream " << s;
}

class GpuAttentionDoor : public GpuDecode {};

TEST_F(GpuAttentionDoor, ChoosesByDeviceAndQueries) {
  for (int64_t queries : {kGpuDecodeQueries, kGpuDecodeQueries + 1}) {
    AttentionProblem p = problem(1, 2, 64, 300, queries);
    add_band_of_history(p, {1, 0, 100});
    fill(p, 2);
    round_to_bfloat16(p);
    GpuAttention there(p, stream());
    const AttentionKernel right = queries <= kGpuDecodeQueries  ? AttentionKernel::kDecode
                                  : device().info().is_hopper() ? AttentionKernel::kHopper
                                                                : AttentionKernel::kPortable;
    EXPECT_TRUE(same_bits(there.run(AttentionKernel::kAutomatic), there.run(right)));
  }
}

TEST_F(GpuAttentionDoor, RefusesWhatNoKernelTakes) {
  const auto refused = [](AttentionProblem p, AttentionKernel kernel, auto change) {
    add_band_of_history(p, {1, 0, 100});
    fill(p, 2);
    GpuAttention there(p, stream());
    Attention<BFloat16> a = there.description();
    std::vector<BandKeys<BFloat16>> bands(a.bands.begin(), a.bands.end());
    a.bands = bands;
    change(a, bands);
    EXPECT_THROW(attention_forward(stream(), a, kernel), InvariantError);
  };
  const auto as_it_is = [](auto&, auto&) {};
  refused(problem(1, 1, 96, 0, 9), AttentionKernel::kAutomatic, as_it_is);
  refused(problem(1, 1, 64, 0, 9), AttentionKernel::kDecode, as_it_is);
  refused(problem(1, 1, 64, 0, 9), AttentionKernel::kAutomatic,
          [](auto& a, auto&) { a.position = reinterpret_cast<const int64_t*>(a.q); });
  refused(problem(1, 1, 64, 0, 9), AttentionKernel::kAutomatic,
          [](auto&, auto& bands) { bands[0].row_stride = 68; });
  refused(problem(2, 1, 64, 0, 9), AttentionKernel::kAutomatic,
          [](auto&, auto& bands) { bands[0].row_stride = 64; });
}

TEST_F(GpuAttentionDoor, NoQueriesNoWork) {
  AttentionProblem p = problem(1, 1, 64, 0, 0);
  add_band(p, {1, 0, 100}, 0, 0);
  GpuAttention there(p, stream());
  EXPECT_TRUE(there.run(AttentionKernel::kAutomatic).out.empty());
}

}  // namespace
}  // namespace longhalo::testing
