// The two kinds of error a rank can meet.
//
// UserError: the user's input or environment is at fault (a damaged file, a full disk, an impossible config).
// Its message says what is wrong, where, and what to do. Exit code 2.
// InvariantError: LongHalo itself is at fault; thrown by check(), which is on in every build.
#pragma once

#include <source_location>
#include <stdexcept>
#include <string>
#include <string_view>

namespace longhalo {

/// kRequeue: stopped on request with its state saved; the same command goes on from there. kHung: a rank
/// waited for longer than run.deadline_seconds.
enum class ExitCode : int { kDone = 0, kInternalError = 1, kUserError = 2, kRequeue = 75, kHung = 76 };

class UserError : public std::runtime_error {
 public:
  /// what: the fault in one sentence. where: file, line, tensor, key or path. remedy: what the user can do.
  UserError(std::string_view what, std::string_view where, std::string_view remedy);

  /// Two of the parts of what(), which has all three.
  std::string_view fault() const;
  std::string_view where() const;
};

class InvariantError : public std::runtime_error {
 public:
  InvariantError(std::string_view sentence, const std::source_location& where);
};

/// What an exception means for the job that it ends. Memory that ran out is the user's to deal with,
/// whichever part of the program asked for it.
struct Ending {
  ExitCode exit_code;
  std::string message;
};
Ending ending_of(const std::exception& error);

/// Throws InvariantError unless `holds`. `sentence` states what should have been true.
inline void check(bool holds, std::string_view sentence,
                  const std::source_location& where = std::source_location::current()) {
  if (!holds) throw InvariantError(sentence, where);
}

}  // namespace longhalo
