// The fault plan: an overlay that says which call of which function fails, and how. The model below stays pristine.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace gdrkit::twin {

// What a rule carries: errno=, status=, or route= (a way that a transfer could go: p2p 1, nvfs 2, posix 3).
enum class FaultKind { errno_value, status, route };

// One name that a plan may use, and what its rules must carry: a code from `code_least` to `code_most`.
struct FaultPoint {
    std::string_view name;
    FaultKind kind;
    int code_most = 4095;
    int code_least = 1; // 0: what is no failure, and yet did nothing.
};

// Declares the fault points of this library and the prefixes that it answers for; called by the library before its
// first `hit`. Reads the plan of the configuration. Returns the error text, empty when the plan is good.
std::string load_faults(std::span<const FaultPoint> points, std::span<const std::string_view> prefixes);

// Replaces the plan by this text (the file format of DESIGN.md); counts begin at 1 again. Returns the error text, empty
// when good.
std::string replace_faults(std::string_view plan);

// Counts a call of `point`, holds it up as long as the plan wants, and returns what the plan wants it to answer,
// nullopt when the call should go through.
std::optional<int> hit(std::string_view point);

// The same for a call that is made often: what no rule names is only counted, without a lock. Lives as long as the
// process.
struct FaultCount;
class FaultSite {
public:
    explicit FaultSite(std::string_view point);
    std::optional<int> hit();
    // Whether the plan that is set now has a rule for this point.
    [[nodiscard]] bool planned() const;

private:
    std::string_view point_;
    FaultCount* count_;
};

// {"ibv_reg_mr": 3, ...}: how often each point was called in this process, as JSON.
std::string calls_json();

// {"ibv_reg_mr": 2, ...}: of each point that the plan has held up, how many calls at most at the same time, as JSON.
std::string held_json();

} // namespace gdrkit::twin
