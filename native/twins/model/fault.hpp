// Fault injection. A fault plan is a text file whose rules say which call of which function fails, is delayed, or stops
// the process. Every exported function of a twin calls this code first; the emulation itself contains no faults.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace gdrkit::twin {

// The key by which a rule sets the result of a call: errno=, status=, or route=. The value of route= is the path of a
// cuFile transfer: p2p (code 1), nvfs (2) or posix (3).
enum class FaultKind { errno_value, status, route };

// A name that a plan may use: a function, or a step inside of a function, such as cufile.route. The result in a rule
// for this name has the type `kind` and is from code_min to code_max.
struct FaultPoint {
    std::string_view name;
    FaultKind kind;
    int code_max = 4095;  // by default the largest errno of the kernel (MAX_ERRNO)
    int code_min = 1;     // 0 for a point whose rule may report success although the call does nothing
    bool has_nic = false; // a rule may have nic=, because each call belongs to one or two NICs
};

// Declare the fault points of this library and the name prefixes that it owns, and read the plan named by the
// configuration. The library calls load_faults before its first call of find_injected_fault. Return an error text, or
// an empty string if the plan is valid.
std::string load_faults(std::span<const FaultPoint> points, std::span<const std::string_view> prefixes);

// Replace the plan by this text (native/twins/DESIGN.md describes the format). The next call of each point is call 1 of
// the new plan. Return an error text, or an empty string if the plan is valid.
std::string replace_faults(std::string_view plan);

// Count a call of the fault point, and delay it or stop the process if the plan says so. Return the result that the
// plan injects, or nullopt if the call shall be carried out. `nics` are the names of the NICs to which the call
// belongs: a rule with nic= applies only to calls of that NIC.
std::optional<int> find_injected_fault(std::string_view point_name, std::span<const std::string_view> nics = {});

// The counter of one fault point. It is never destroyed.
struct FaultCount;

// A place in the code that calls find_injected_fault often. An object of this class finds the counter of its fault
// point only once. If no rule names the point, a call is counted without a lock.
class FaultSite {
public:
    explicit FaultSite(std::string_view point_name);
    // Do the same as the function find_injected_fault, for this point.
    std::optional<int> find_injected_fault(std::span<const std::string_view> nics = {});
    // Return whether the current plan has a rule for this point.
    [[nodiscard]] bool has_rule() const;

private:
    std::string_view point_name_;
    FaultCount* count_;
};

// Return the number of calls of each point in this process as JSON, for example {"ibv_reg_mr": 3}.
std::string format_calls_json();

// Return as JSON, for each point with delayed calls, the largest number of calls that were delayed at the same time.
std::string format_delayed_calls_json();

} // namespace gdrkit::twin
