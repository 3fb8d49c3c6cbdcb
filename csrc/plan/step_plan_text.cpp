// A StepPlan as a person draws it: one row of issue entries per rank.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <iterator>

#include "base/error.h"
#include "plan/action.h"
#include "plan/step_plan.h"
#include "plan/verify.h"

namespace hpcomm::plan {

namespace {

constexpr std::size_t kRowWidth = 110;

constexpr const char* kLegend =
    "F forward, B backward, I input gradient, W weight gradient, S send activation, s send gradient, r receive,\n"
    "R reduce bucket, T reduce tied gradients, L loss; the number is the microbatch (of R the bucket, of T the tie);\n"
    "B3{R1 R0}: issued while B3 runs; (S1 S2): issued as one group\n";

struct Style {
  bool stages = false;  // name the stage in front: a rank holds several
};

char letter(const Action& action) {
  switch (action.kind) {
    case ActionKind::kForward:
      return 'F';
    case ActionKind::kBackward:
      return 'B';
    case ActionKind::kInputGrad:
      return 'I';
    case ActionKind::kWeightGrad:
      return 'W';
    case ActionKind::kSend:
      return action.payload == Payload::kGradient ? 's' : 'S';
    case ActionKind::kRecv:
      return 'r';
    case ActionKind::kReduce:
      return 'R';
    case ActionKind::kLoss:
      return 'L';
    case ActionKind::kTied:
      return 'T';
  }
  return '?';
}

std::vector<std::string> tokens(const std::vector<Action>& actions, Style style);

std::string token(const Action& action, Style style) {
  std::string text = style.stages && action.stage >= 0 ? str(action.stage, letter(action)) : str(letter(action));
  if (action.kind == ActionKind::kReduce || action.kind == ActionKind::kTied) {
    text += str(action.bucket);
  } else if (action.kind != ActionKind::kLoss) {
    text += str(action.microbatch);
  }
  // A skip connection gives a stage several messages per microbatch.
  if (std::abs(action.stage - action.peer_stage) > 1) {
    if (action.kind == ActionKind::kSend) {
      text += str(">", action.peer_stage);
    } else if (action.kind == ActionKind::kRecv) {
      text += str("<", action.peer_stage);
    }
  }
  std::string separator = "{";
  for (const std::string& inner : tokens(action.inside, style)) {
    text += separator + inner;
    separator = " ";
  }
  return action.inside.empty() ? text : text + "}";
}

// One per action; the members of a group share a pair of parentheses.
std::vector<std::string> tokens(const std::vector<Action>& actions, Style style) {
  std::vector<std::string> result;
  for (std::size_t i = 0; i < actions.size(); ++i) {
    const int group = actions[i].group;
    std::string text = token(actions[i], style);
    if (group != -1) {
      text = (i == 0 || actions[i - 1].group != group ? "(" : "") + text;
      text += i + 1 == actions.size() || actions[i + 1].group != group ? ")" : "";
    }
    result.push_back(std::move(text));
  }
  return result;
}

// Breaks between entries; a continued row repeats the bar under an empty label.
std::string wrap(const std::string& label, const std::vector<std::string>& tokens) {
  std::string text;
  std::string line = label + " |";
  const std::size_t empty = line.size();
  for (const std::string& next : tokens) {
    if (line.size() > empty && line.size() + 1 + next.size() > kRowWidth) {
      text += line + "\n";
      line = std::string(label.size(), ' ') + " |";
    }
    line += " " + next;
  }
  return text + line + "\n";
}

std::string count_by_lane(const StepPlan& plan) {
  std::string text;
  for (const Lane lane : {Lane::kForward, Lane::kBackward, Lane::kGradient, Lane::kScalar, Lane::kTensor}) {
    const auto count = std::count_if(plan.communicators.begin(), plan.communicators.end(),
                                     [&](const CommunicatorSpec& spec) { return spec.lane == lane; });
    if (count > 0) {
      text += str(text.empty() ? "" : ", ", count, " ", to_string(lane));
    }
  }
  return text.empty() ? "none" : text;
}

}  // namespace

std::string StepPlan::to_text() const {
  HPCOMM_REQUIRE(dp >= 1 && tp >= 1, "dp is ", dp, ", tp is ", tp);
  const std::int64_t copies = std::int64_t{dp} * tp;  // of a plan that nobody has checked
  const Style style{.stages = num_stages() > pp};
  std::vector<std::string> labels;
  std::vector<std::vector<std::string>> rows;
  // The copies of a pipeline rank are neighbours in the mesh; as long as nobody edits them, their rows are
  // equal.
  for (int first = 0; first < std::ssize(lists);) {
    std::vector<std::string> row = plan::tokens(plan::actions(*this, first), style);
    int next = first + 1;
    while (next < std::ssize(lists) && next % copies != 0 && plan::tokens(plan::actions(*this, next), style) == row) {
      ++next;
    }
    labels.push_back(next == first + 1 ? str("rank ", first) : str("rank ", first, "-", next - 1));
    rows.push_back(std::move(row));
    first = next;
  }
  std::size_t width = 0;
  for (const std::string& label : labels) {
    width = std::max(width, label.size());
  }
  std::string text;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    text += wrap(labels[i] + std::string(width - labels[i].size(), ' '), rows[i]);
  }
  std::array<char, 17> hex{};
  std::snprintf(hex.data(), hex.size(), "%016llx", static_cast<unsigned long long>(hash()));
  return text + kLegend + "start order: " + start_order_text(start_order, false) + "\n" +
         str("pp ", pp, " x dp ", dp, tp == 1 ? "" : str(" x tp ", tp), ", ", num_stages(), " stages, ",
             num_microbatches, " microbatches, ", operations.size(),
             " operations, communicators: ", count_by_lane(*this), ", hash ", hex.data(), "\n");
}

}  // namespace hpcomm::plan
