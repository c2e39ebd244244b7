// The log of the library, which goes to stderr. The environment variable HF3FS_USRBIO_LIB_LOG sets the level.
//
// error: a call failed. warning: a call works, but not as well as it could. info: an object was created, published,
// registered or destroyed; one line also says by which method the agent gets the memory. debug: each operation, each
// submission and each completion.
#pragma once

namespace gdrkit::usrbio {

enum class LogLevel { debug, info, warning, error, off };

// Returns the level that the environment variable sets.
LogLevel read_log_level() noexcept;

// hf3fs_prep_io calls this function for each operation, so the function is inline. No line has the level `off`, so this
// level disables the whole log.
inline bool is_log_enabled(LogLevel level) noexcept {
    static const LogLevel level_min = read_log_level();
    return level >= level_min;
}

// Writes one line by one system call, so that no line of another thread appears inside it.
void log_line(LogLevel level, const char* format, ...) noexcept __attribute__((format(printf, 2, 3)));

} // namespace gdrkit::usrbio
