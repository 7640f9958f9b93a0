// Files that are shortened while they are mapped.
#include "storage/mapped_file.hpp"

#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <string>

#include "scratch.hpp"

namespace longhalo {
namespace {

using namespace testing;
using ::testing::ExitedWithCode;
using ::testing::KilledBySignal;

std::byte sum_of(std::span<const std::byte> bytes) {
  auto sum = std::byte{0};
  for (const std::byte byte : bytes)
    sum ^= byte;
  return sum;
}

TEST(MappedFile, HoldsTheBytes) {
  const ScratchFolder folder;
  const std::filesystem::path file = folder / "file";
  write_text(file, std::string(5000, 'x') + "y");
  const MappedFile mapped(open_input(file), file);
  ASSERT_EQ(mapped.bytes().size(), 5001U);
  EXPECT_EQ(sum_of(mapped.bytes()), static_cast<std::byte>('y'));
}

TEST(MappedFileDeathTest, ShortenedWhileItIsReadEndsWithItsName) {
  const ScratchFolder folder;
  const std::filesystem::path kept = folder / "kept", cut = folder / "cut";
  const auto read_what_is_gone = [&] {
    for (const std::filesystem::path& file : {kept, cut})
      write_text(file, std::string(100000, 'x'));
    const MappedFile one(open_input(kept), kept), other(open_input(cut), cut);
    std::filesystem::resize_file(cut, 10);
    ::_exit(sum_of(one.bytes()) == sum_of(other.bytes()) ? 3 : 4);
  };
  EXPECT_EXIT(read_what_is_gone(), ExitedWithCode(2), "error: the file ended early.*\n.*/cut\n.*remedy: ");
}

TEST(MappedFileDeathTest, OtherBusErrorsAreWhatTheyWere) {
  const ScratchFolder folder;
  write_text(folder / "file", "x");
  const auto raise_it = [&] {
    const MappedFile mapped(open_input(folder / "file"), folder / "file");
    std::raise(SIGBUS);
  };
#if defined(__SANITIZE_ADDRESS__)
  EXPECT_DEATH(raise_it(), "");  // its own handler ends the process
#else
  EXPECT_EXIT(raise_it(), KilledBySignal(SIGBUS), "");
#endif
}

}  // namespace
}  // namespace longhalo
