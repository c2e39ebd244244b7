// Reads the log level from the environment, and writes lines to stderr.
#include "usrbio/client/log.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace gdrkit::usrbio {

namespace {

// Parses the value of HF3FS_USRBIO_LIB_LOG. 3FS also accepts longer values ("DBG3:default=..."), which begin with the
// level.
LogLevel parse_level(const char* value) noexcept {
    const std::string_view text = value == nullptr ? "" : value;
    if (text.starts_with("DBG") || text.starts_with("DEBUG")) {
        return LogLevel::debug;
    }
    if (text.starts_with("INFO")) {
        return LogLevel::info;
    }
    if (text.starts_with("ERR") || text.starts_with("CRITICAL") || text.starts_with("FATAL")) {
        return LogLevel::error;
    }
    return text == "OFF" ? LogLevel::off : LogLevel::warning;
}

} // namespace

LogLevel read_log_level() noexcept {
    return parse_level(std::getenv("HF3FS_USRBIO_LIB_LOG"));
}

void log_line(LogLevel level, const char* format, ...) noexcept {
    if (!is_log_enabled(level)) {
        return;
    }
    static constexpr const char* level_names[] = {"DBG", "INFO", "WARN", "ERR"};
    char line[1024];
    int length = std::snprintf(line, sizeof(line), "hf3fs_usrbio %s: ", level_names[static_cast<int>(level)]);
    std::va_list arguments;
    va_start(arguments, format);
    const int message_length =
        std::vsnprintf(line + length, sizeof(line) - 1 - static_cast<std::size_t>(length), format, arguments);
    va_end(arguments);
    length = std::min(length + std::max(message_length, 0), static_cast<int>(sizeof(line)) - 2);
    line[length] = '\n';
    // The result is ignored, because a failure of the log cannot be logged.
    [[maybe_unused]] const ssize_t written_bytes = write(STDERR_FILENO, line, static_cast<std::size_t>(length) + 1);
}

} // namespace gdrkit::usrbio
