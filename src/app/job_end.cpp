#include "app/job_end.hpp"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "core/error.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

constexpr double kMostReserve = 120, kShareOfTimeLeft = 0.1;
constexpr size_t kMostWords = 40;  // of a variable, in a message

}  // namespace

JobEnd::JobEnd(std::optional<double> end, std::optional<double> reserve_seconds, double now) {
  if (!end || *end <= now) return;
  end_ = end;
  reserve_is_given_ = reserve_seconds.has_value();
  reserve_ = reserve_seconds.value_or(std::min(kMostReserve, kShareOfTimeLeft * (*end - now)));
}

void JobEnd::saving_takes(double seconds) {
  if (!reserve_is_given_) reserve_ = std::max(reserve_, 2 * seconds);
}

bool JobEnd::is_near(double now) {
  if (!end_) return false;
  if (asked_) longest_ = std::max(longest_, now - *asked_);
  asked_ = now;
  near_ = near_ || now + longest_ + reserve_ >= *end_;
  return near_;
}

double JobEnd::left(double now) const {
  check(end_.has_value(), "the job has an end");
  return *end_ - now;
}

std::optional<double> job_end_of_environment(Say say) {
  const char* variable = std::getenv("SLURM_JOB_END_TIME");
  if (variable == nullptr || *variable == '\0') return std::nullopt;
  const std::string_view words(variable);
  int64_t seconds = 0;
  const auto [end, error] = std::from_chars(words.data(), words.data() + words.size(), seconds);
  if (error == std::errc() && end == words.data() + words.size()) return static_cast<double>(seconds);
  if (say == Say::kYes)
    log_warning(text("SLURM_JOB_END_TIME is '", words.substr(0, kMostWords),
                     "', no seconds since 1970: the job does not stop by itself before its time is over, "
                     "but when a signal asks for it (sbatch --signal=TERM@300)"));
  return std::nullopt;
}

double now_seconds() {
  using Seconds = std::chrono::duration<double>;
  const auto steady = [] { return Seconds(std::chrono::steady_clock::now().time_since_epoch()).count(); };
  static const double between =
      Seconds(std::chrono::system_clock::now().time_since_epoch()).count() - steady();
  return steady() + between;
}

}  // namespace longhalo
