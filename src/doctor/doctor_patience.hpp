// A limit for each check: a link that swallows messages must end the doctor with the name of the check, not
// hold the job's nodes until their time is over.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "comm/mpi_session.hpp"

namespace longhalo {

class Patience {
 public:
  Patience(const MpiSession& session, double seconds);
  ~Patience();
  Patience(const Patience&) = delete;
  Patience& operator=(const Patience&) = delete;

  /// From here on `check` has the whole time.
  void begin(const std::string& check);

 private:
  void watch();
  [[noreturn]] void give_up(const std::string& check) const;

  const MpiSession& session_;
  double seconds_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string check_ = "launch";
  int number_ = 0;  // of checks begun
  bool over_ = false;
  std::thread watcher_;  // last: it uses the members above
};

}  // namespace longhalo
