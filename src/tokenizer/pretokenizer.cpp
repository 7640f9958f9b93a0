#include "tokenizer/pretokenizer.hpp"

#include <algorithm>
#include <utility>

#include "core/text.hpp"

namespace longhalo {
namespace {

// The pattern built into ByteLevel (Radford et al. 2019).
constexpr std::string_view kByteLevelPattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

struct Segment {
  ByteRange range;
  bool is_match;
};

std::vector<Segment> find_segments(const Pattern& pattern, bool invert, std::string_view text,
                                   MatchScratch& scratch) {
  std::vector<Segment> segments;
  size_t at = 0;
  ByteRange match;
  while (at < text.size() && pattern.find(text, at, scratch, match)) {
    if (match.begin > at) segments.push_back({{at, match.begin}, invert});
    segments.push_back({match, !invert});
    at = match.end;
  }
  if (at < text.size()) segments.push_back({{at, text.size()}, invert});
  return segments;
}

/// Joins or drops segments as `behavior` says.
std::vector<ByteRange> arrange(std::vector<Segment> segments, SplitBehavior behavior) {
  const bool from_the_right = behavior == SplitBehavior::kMergedWithNext;
  if (from_the_right) std::reverse(segments.begin(), segments.end());
  std::vector<ByteRange> pieces;
  bool previous_is_match = false;
  for (const Segment& segment : segments) {
    bool join = false;
    switch (behavior) {
      case SplitBehavior::kIsolated:
        break;
      case SplitBehavior::kRemoved:
        if (segment.is_match) continue;
        break;
      case SplitBehavior::kContiguous:
        join = segment.is_match == previous_is_match;
        break;
      case SplitBehavior::kMergedWithPrevious:
      case SplitBehavior::kMergedWithNext:
        join = segment.is_match && !previous_is_match;
        break;
    }
    previous_is_match = segment.is_match;
    if (join && !pieces.empty()) {
      pieces.back().begin = std::min(pieces.back().begin, segment.range.begin);
      pieces.back().end = std::max(pieces.back().end, segment.range.end);
    } else {
      pieces.push_back(segment.range);
    }
  }
  if (from_the_right) std::reverse(pieces.begin(), pieces.end());
  return pieces;
}

SplitBehavior read_behavior(const JsonCursor& value) {
  const std::string name = value.string();
  if (name == "Isolated") return SplitBehavior::kIsolated;
  if (name == "Removed") return SplitBehavior::kRemoved;
  if (name == "Contiguous") return SplitBehavior::kContiguous;
  if (name == "MergedWithPrevious") return SplitBehavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return SplitBehavior::kMergedWithNext;
  value.unsupported(text("the split behavior ", name));
}

}  // namespace

PreTokenizer::PreTokenizer(const JsonCursor& description) {
  add_stages(description);
  if (!ends_in_byte_level_) description.unsupported("a pre-tokenizer that does not end in ByteLevel");
}

void PreTokenizer::add_stages(const JsonCursor& description) {
  if (ends_in_byte_level_) description.unsupported("a pre-tokenizer stage after ByteLevel");
  const std::string type = description["type"].string();
  if (type == "Sequence") {
    description.only_keys({"type", "pretokenizers"});
    const JsonCursor parts = description["pretokenizers"];
    for (size_t i = 0; i < parts.size(); ++i) {
      if (parts.at(i)["type"].string() == "Sequence") parts.at(i).unsupported("a Sequence inside a Sequence");
      add_stages(parts.at(i));
    }
  } else if (type == "ByteLevel") {
    description.only_keys({"type", "add_prefix_space", "trim_offsets", "use_regex"});
    Stage stage;
    stage.add_prefix_space = description.boolean_or("add_prefix_space", true);
    if (description.boolean_or("use_regex", true)) {
      stage.pattern = Pattern::regex(kByteLevelPattern, description.where());
    }
    stages_.push_back(std::move(stage));
    ends_in_byte_level_ = true;
  } else if (type == "Digits") {
    description.only_keys({"type", "individual_digits"});
    Stage stage;
    stage.pattern = Pattern::regex(R"(\p{N})", description.where());
    stage.behavior = description.boolean_or("individual_digits", false) ? SplitBehavior::kIsolated
                                                                        : SplitBehavior::kContiguous;
    stages_.push_back(std::move(stage));
  } else if (type == "Split") {
    add_split(description);
  } else {
    description.unsupported(text("the pre-tokenizer ", type));
  }
}

void PreTokenizer::add_split(const JsonCursor& description) {
  description.only_keys({"type", "pattern", "behavior", "invert"});
  const JsonCursor pattern = description["pattern"];
  pattern.only_keys({"Regex", "String"});
  Stage stage;
  if (const auto regex = pattern.find("Regex")) {
    stage.pattern = Pattern::regex(regex->string(), regex->where());
  } else {
    stage.pattern = Pattern::literal(pattern["String"].string(), pattern.where());
  }
  stage.behavior = read_behavior(description["behavior"]);
  stage.invert = description.boolean_or("invert", false);
  stages_.push_back(std::move(stage));
}

void PreTokenizer::run(size_t stage, std::string_view text, MatchScratch& scratch, PieceSink& sink) const {
  if (text.empty()) return;
  if (stage == stages_.size()) return sink.piece(text);
  const Stage& here = stages_[stage];
  std::string with_space;
  if (here.add_prefix_space && text.front() != ' ') {
    with_space.reserve(text.size() + 1);
    with_space.push_back(' ');
    with_space += text;
    text = with_space;
  }
  if (!here.pattern) {
    run(stage + 1, text, scratch, sink);
  } else if (here.behavior == SplitBehavior::kIsolated) {
    run_isolated(stage, text, scratch, sink);
  } else {
    for (const ByteRange piece :
         arrange(find_segments(*here.pattern, here.invert, text, scratch), here.behavior)) {
      run(stage + 1, text.substr(piece.begin, piece.end - piece.begin), scratch, sink);
    }
  }
}

/// The common case, without a list of segments: a long text has millions.
void PreTokenizer::run_isolated(size_t stage, std::string_view text, MatchScratch& scratch,
                                PieceSink& sink) const {
  const Pattern& pattern = *stages_[stage].pattern;
  size_t at = 0;
  ByteRange match;
  while (at < text.size() && pattern.find(text, at, scratch, match)) {
    run(stage + 1, text.substr(at, match.begin - at), scratch, sink);
    run(stage + 1, text.substr(match.begin, match.end - match.begin), scratch, sink);
    at = match.end;
  }
  run(stage + 1, text.substr(at), scratch, sink);
}

}  // namespace longhalo
