// The log of the calls that a client made to a twin, which tests read.

#include "model/trace.hpp"

#include <time.h>

#include <cstdarg>
#include <cstdio>
#include <deque>
#include <mutex>

namespace gdrkit::twin {
namespace {

constexpr std::size_t max_calls = 512;

struct CallLog {
    std::mutex mutex;
    std::deque<std::string> lines;
};

CallLog& call_log() {
    static auto* const log = new CallLog;
    return *log;
}

// Put a dot in place of every character that is not ASCII or that JSON would have to escape. Such characters come from
// the client, because some arguments are its strings.
std::string to_printable(const char* text) {
    std::string line = text;
    for (char& character : line) {
        if (character < ' ' || character > '~' || character == '"' || character == '\\') {
            character = '.';
        }
    }
    return line;
}

} // namespace

void trace(const char* format, ...) {
    char text[512];
    std::va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    const long long now_ns = now.tv_sec * 1'000'000'000LL + now.tv_nsec;
    CallLog& log = call_log();
    std::lock_guard lock(log.mutex);
    log.lines.push_back(std::to_string(now_ns) + " " + to_printable(text));
    if (log.lines.size() > max_calls) {
        log.lines.pop_front();
    }
}

std::string trace_json() {
    CallLog& log = call_log();
    std::lock_guard lock(log.mutex);
    std::string json = "[";
    for (const std::string& line : log.lines) {
        json += (json.size() > 1 ? ",\"" : "\"") + line + "\"";
    }
    return json + "]";
}

} // namespace gdrkit::twin
