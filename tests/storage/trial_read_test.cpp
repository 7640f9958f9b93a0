#include "storage/trial_read.hpp"

#include <csignal>
#include <stdexcept>

#include "scratch.hpp"

namespace longhalo {
namespace {

using testing::expect_user_error;

TEST(TrialRead, WhatReadsIsReadAgainByTheCaller) {
  int reads = 0;
  try_to_read("tokens.h5", 60, [&] { ++reads; });
  EXPECT_EQ(reads, 0) << "the child's memory is its own";
}

TEST(TrialRead, AnExceptionIsForTheCaller) {
  EXPECT_NO_THROW(try_to_read("tokens.h5", 60, [] { throw std::runtime_error("bad"); }));
}

TEST(TrialRead, ACrashNamesTheFile) {
  for (const int signal : {SIGSEGV, SIGFPE, SIGABRT})
    expect_user_error([&] { try_to_read("tokens.h5", 60, [&] { ::raise(signal); }); },
                      {"tokens.h5", "damaged", "crashes"});
}

TEST(TrialRead, AnEndlessReadEnds) {
  volatile bool forever = true;
  expect_user_error(
      [&] {
        try_to_read("tokens.h5", 0.1, [&] {
          while (forever) {
          }
        });
      },
      {"tokens.h5", "does not come to an end"});
}

}  // namespace
}  // namespace longhalo
