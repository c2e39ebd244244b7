#include "model/fault.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "model/config.hpp"

namespace gdrkit::twin {
namespace {

struct Rule {
    std::uint64_t first = 1;
    std::uint64_t last = UINT64_MAX;
    std::optional<int> code;
    std::chrono::microseconds delay{0};
};

struct Plan {
    std::map<std::string, std::vector<Rule>, std::less<>> rules;
};

// Calls of one point that the plan holds up: now, and at most at the same time.
struct Held {
    int now = 0;
    int most = 0;
};

struct Faults {
    std::mutex mutex;
    std::map<std::string, FaultPoint, std::less<>> points;
    std::vector<std::string> prefixes;
    Plan plan;
    std::map<std::string, std::uint64_t, std::less<>> counts;      // since the library was loaded
    std::map<std::string, std::uint64_t, std::less<>> plan_counts; // since the plan was set
    std::map<std::string, Held, std::less<>> held;                 // since the plan was set
};

Faults& faults() {
    static auto* const all = new Faults;
    return *all;
}

struct Name {
    std::string_view name;
    int code;
};

// The errnos that the kernel and libibverbs give for what the twins do; 524 is the kernel's own ENOTSUPP.
constexpr Name errno_names[] = {
    {"EPERM", EPERM},     {"ENOENT", ENOENT},         {"EIO", EIO},
    {"ENXIO", ENXIO},     {"EBADF", EBADF},           {"EAGAIN", EAGAIN},
    {"ENOMEM", ENOMEM},   {"EACCES", EACCES},         {"EFAULT", EFAULT},
    {"EBUSY", EBUSY},     {"ENODEV", ENODEV},         {"EINVAL", EINVAL},
    {"EMFILE", EMFILE},   {"ENOSPC", ENOSPC},         {"EPIPE", EPIPE},
    {"ENOSYS", ENOSYS},   {"EPROTO", EPROTO},         {"EOVERFLOW", EOVERFLOW},
    {"ENOTSUP", ENOTSUP}, {"EOPNOTSUPP", EOPNOTSUPP}, {"EPROTONOSUPPORT", EPROTONOSUPPORT},
    {"ENOTSUPP", 524},    {"ETIMEDOUT", ETIMEDOUT},   {"ECONNREFUSED", ECONNREFUSED},
};

// Nobody waits longer for a call that a plan holds up: ten seconds.
constexpr std::uint32_t delay_us_most = 10'000'000;

// The prefixes of all twins: a rule that belongs to none of them is nobody's, and a mistake.
constexpr std::array<std::string_view, 5> all_prefixes = {"ibv_", "_ibv_", "wc.", "cu", "hlthunk_"};

template <typename Number> bool parse(std::string_view text, Number* value) {
    auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
    return error == std::errc{} && end == text.data() + text.size() && !text.empty();
}

bool parse_calls(std::string_view text, Rule* rule) {
    if (text == "*") {
        return true;
    }
    const auto dash = text.find('-');
    if (!parse(text.substr(0, dash), &rule->first) || rule->first == 0) {
        return false;
    }
    rule->last = rule->first;
    return dash == std::string_view::npos || (parse(text.substr(dash + 1), &rule->last) && rule->last >= rule->first);
}

bool parse_code(std::string_view text, const FaultPoint& point, int* code) {
    if (point.kind == FaultKind::errno_value) {
        for (const Name& known : errno_names) {
            if (known.name == text) {
                *code = known.code;
                return true;
            }
        }
    }
    return parse(text, code) && *code > 0 && *code <= point.code_most;
}

template <typename Prefixes> bool has_prefix(const Prefixes& prefixes, std::string_view name) {
    return std::any_of(prefixes.begin(), prefixes.end(),
                       [name](std::string_view prefix) { return name.starts_with(prefix); });
}

// One rule; empty when good. A rule of the other library is left to it.
std::string parse_rule(const Faults& all, const std::vector<std::string>& words, Plan* plan) {
    const std::string& name = words[0];
    const auto point = all.points.find(name);
    if (point == all.points.end()) {
        const bool somebodys = has_prefix(all_prefixes, name) && !has_prefix(all.prefixes, name);
        return somebodys ? "" : "'" + name + "' is not a function that can be made to fail";
    }
    const std::string_view code_key = point->second.kind == FaultKind::errno_value ? "errno=" : "status=";
    Rule rule;
    bool have_call = false;
    for (std::size_t index = 1; index < words.size(); ++index) {
        const std::string_view word = words[index];
        if (word.starts_with("call=") && !have_call) {
            have_call = parse_calls(word.substr(5), &rule);
            if (!have_call) {
                return "'" + words[index] + "': expected call=N, call=N-M or call=*";
            }
        } else if (word.starts_with(code_key) && !rule.code) {
            int code = 0;
            if (!parse_code(word.substr(code_key.size()), point->second, &code)) {
                return "'" + words[index] + "': expected a name or number from 1 to " +
                       std::to_string(point->second.code_most) + " after " + std::string(code_key);
            }
            rule.code = code;
        } else if (word.starts_with("delay_us=") && rule.delay.count() == 0) {
            std::uint32_t delay_us = 0;
            if (!parse(word.substr(9), &delay_us) || delay_us == 0 || delay_us > delay_us_most) {
                return "'" + words[index] + "': expected a number from 1 to " + std::to_string(delay_us_most) +
                       " after delay_us=";
            }
            rule.delay = std::chrono::microseconds(delay_us);
        } else {
            return "'" + words[index] + "' is not expected here";
        }
    }
    if (!have_call || (!rule.code && rule.delay.count() == 0)) {
        return "expected '" + name + " call=... " + std::string(code_key) + "... or delay_us=...'";
    }
    plan->rules[name].push_back(rule);
    return "";
}

std::string parse_plan(const Faults& all, std::string_view text, Plan* plan) {
    std::istringstream lines{std::string(text)};
    std::string line;
    bool headed = false;
    for (int number = 1; std::getline(lines, line); ++number) {
        std::istringstream stream(line.substr(0, line.find('#')));
        const std::vector<std::string> words{std::istream_iterator<std::string>(stream), {}};
        if (words.empty()) {
            continue;
        }
        const std::string where = "line " + std::to_string(number) + ": ";
        if (!headed) {
            if (words != std::vector<std::string>{"gdrkit-faults", "1"}) {
                return where + "expected 'gdrkit-faults 1' first";
            }
            headed = true;
        } else if (std::string error = parse_rule(all, words, plan); !error.empty()) {
            return where + error;
        }
    }
    return headed ? "" : "line 1: expected 'gdrkit-faults 1' first";
}

std::string set_plan(Faults* all, std::string_view text) {
    Plan plan;
    std::string error = parse_plan(*all, text, &plan);
    if (error.empty()) {
        all->plan = std::move(plan);
        all->plan_counts.clear();
        all->held.clear();
    }
    return error;
}

// Sleeps as long as the rule says, without the lock, and gives what the rule answers.
std::optional<int> held_up(Faults* all, std::unique_lock<std::mutex>* lock, std::string_view point, const Rule& rule) {
    // By value: the plan, and the counts, may be replaced meanwhile.
    const Rule wanted = rule;
    const std::string name(point);
    if (wanted.delay.count() == 0) {
        return wanted.code;
    }
    Held& held = all->held[name];
    held.most = std::max(held.most, ++held.now);
    lock->unlock();
    std::this_thread::sleep_for(wanted.delay);
    lock->lock();
    if (const auto found = all->held.find(name); found != all->held.end() && found->second.now > 0) {
        --found->second.now;
    }
    return wanted.code;
}

} // namespace

std::string load_faults(std::span<const FaultPoint> points, std::span<const std::string_view> prefixes) {
    Faults& all = faults();
    std::lock_guard lock(all.mutex);
    for (const FaultPoint& point : points) {
        all.points.emplace(point.name, point);
    }
    all.prefixes.assign(prefixes.begin(), prefixes.end());
    const std::string& path = config().fault_plan_path;
    if (path.empty()) {
        return "";
    }
    // Read by the stream, not from its buffer: the buffer throws when the path is that of a directory.
    std::ifstream file(path, std::ios::binary);
    std::string text;
    for (char letter = 0; file.get(letter);) {
        text += letter;
    }
    std::string error = file.is_open() && !file.bad() ? set_plan(&all, text) : "the file cannot be read";
    if (!error.empty()) {
        error = "fault plan " + path + ": " + error;
        std::fprintf(stderr, "gdrkit twin: %s\n", error.c_str());
    }
    return error;
}

std::string replace_faults(std::string_view plan) {
    Faults& all = faults();
    std::lock_guard lock(all.mutex);
    return set_plan(&all, plan);
}

std::optional<int> hit(std::string_view point) {
    Faults& all = faults();
    std::unique_lock lock(all.mutex);
    auto counted = [point](auto& counts) {
        auto found = counts.find(point);
        if (found == counts.end()) {
            found = counts.emplace(point, 0).first;
        }
        return ++found->second;
    };
    counted(all.counts);
    const std::uint64_t call = counted(all.plan_counts);
    if (const auto rules = all.plan.rules.find(point); rules != all.plan.rules.end()) {
        for (const Rule& rule : rules->second) {
            if (rule.first <= call && call <= rule.last) {
                return held_up(&all, &lock, point, rule);
            }
        }
    }
    return std::nullopt;
}

std::string held_json() {
    Faults& all = faults();
    std::lock_guard lock(all.mutex);
    std::string json = "{";
    for (const auto& [name, held] : all.held) {
        json += (json.size() > 1 ? ",\"" : "\"") + name + "\":" + std::to_string(held.most);
    }
    return json + "}";
}

std::string calls_json() {
    Faults& all = faults();
    std::lock_guard lock(all.mutex);
    std::string json = "{";
    for (const auto& [name, count] : all.counts) {
        json += (json.size() > 1 ? ",\"" : "\"") + name + "\":" + std::to_string(count);
    }
    return json + "}";
}

} // namespace gdrkit::twin
