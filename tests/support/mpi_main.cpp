#include "support/mpi_main.hpp"

#include <gtest/gtest.h>

#include <cstdio>

#ifdef __SANITIZE_ADDRESS__
// Open MPI unloads its plugins at the end; the leak checker then could not tell whose memory it looks at, and
// lsan.supp not name them. So they stay loaded.
extern "C" int dlclose(void*) {
  return 0;
}
#endif

namespace longhalo::test {
namespace {

const MpiSession* current = nullptr;

// A failure on one rank is a failure: every rank learns of it, so the program's exit code is non-zero on all.
// Only rank 0 prints passes; every rank prints its own failures. A test that one rank leaves early (an
// exception, an ASSERT) leaves the others waiting for it, so it ends the program.
class RankPrinter : public testing::EmptyTestEventListener {
 public:
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (result.failed())
      std::fprintf(stderr, "[rank %d of %d] %s:%d: %s\n", current->rank(), current->ranks(),
                   result.file_name() == nullptr ? "?" : result.file_name(), result.line_number(),
                   result.message());
    if (result.fatally_failed() && current->ranks() > 1) current->abort(ExitCode::kInternalError);
  }
};

}  // namespace

const MpiSession& session() {
  return *current;
}

}  // namespace longhalo::test

int main(int argc, char** argv) {
  using namespace longhalo;
  testing::InitGoogleTest(&argc, argv);
  const MpiSession session(&argc, &argv);
  test::current = &session;
  auto& listeners = testing::UnitTest::GetInstance()->listeners();
  if (!session.is_root()) delete listeners.Release(listeners.default_result_printer());
  listeners.Append(new test::RankPrinter);
  const int failed = RUN_ALL_TESTS();
  return sum_over_ranks(session, failed) == 0 ? 0 : 1;
}
