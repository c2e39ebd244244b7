// Configuration parameters of cuFile, which calls, environment variables and cufile.json can set.

#include "cufile/parameters.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "cufile/entry.hpp"
#include "cufile/statistics.hpp"

namespace gdrkit::twin::cufile {
namespace {

struct SizeLimits {
    std::size_t default_value, min, max;
};

// Defaults and limits of cuFile 1.15 on an H200; index: CUFileSizeTConfigParameter_t. A maximum of 0 means that the
// real library derives the maximum from the GPU. The twin does not check such a maximum.
constexpr SizeLimits size_limits[size_parameter_count] = {
    {0, 0, 3},                 // profile_stats
    {128, 1, 256},             // execution_max_io_queue_depth
    {4, 0, 32},                // execution_max_io_threads
    {1024, 4, 4294967295},     // execution_min_io_threshold_size_kb
    {4, 0, 8},                 // execution_max_request_parallelism
    {16384, 64, 16384},        // properties_max_direct_io_size_kb
    {131072, 0, 0},            // properties_max_device_cache_size_kb
    {1024, 64, 16384},         // properties_per_buffer_cache_size_kb
    {33554432, 64, 0},         // properties_max_device_pinned_mem_size_kb
    {128, 1, 256},             // properties_io_batchsize
    {4, 4, 18014398509481980}, // pollthreshold_size_kb
    {5, 1, 1000},              // properties_batch_io_timeout_ms
};
// Defaults of cuFile; index: CUFileBoolConfigParameter_t. The default of the parameters from 5 on is false.
constexpr bool bool_defaults[bool_parameter_count] = {
    false, // properties_use_poll_mode
    true,  // properties_allow_compat_mode
    false, // force_compat_mode
    false, // fs_misc_api_check_aggressive
    true,  // execution_parallel_io
};
constexpr int removed_bool_parameter = 5; // CUFILE_PARAM_PROFILE_NVTX, which cuFile no longer has

enum StringParameter { string_logging_level = 0, string_log_path = 1, string_log_folder = 2, string_transport = 3 };
constexpr int string_parameter_count = 4;

struct Parameters {
    std::mutex mutex;
    // A parameter without a value has its default.
    std::optional<std::size_t> size_values[size_parameter_count];
    std::optional<bool> bool_values[bool_parameter_count];
    // Index: StringParameter.
    std::string string_values[string_parameter_count] = {"WARN", "", "", "DC_V1"};
    // The parameters that cufile.json calls posix_pool_slab_size_kb and posix_pool_slab_count. The twin does not read
    // them from this file.
    std::vector<std::size_t> slab_sizes_kb = {4, 1024, 16384}, slab_counts = {128, 64, 64};
};

Parameters& parameters() {
    static auto* const instance = new Parameters;
    return *instance;
}

std::optional<bool> read_bool_variable(const char* name) {
    const char* const text = std::getenv(name);
    if (text == nullptr) {
        return std::nullopt;
    }
    return std::strcmp(text, "1") == 0 || std::strcmp(text, "true") == 0;
}

// Replace each comment of cufile.json by a space. Comments are as in C++: from // to the end of the line, or
// between /* and */. Inside a JSON string, these characters do not begin a comment.
std::string remove_comments(std::string_view text) {
    std::string kept_text;
    bool is_in_string = false;
    while (!text.empty()) {
        const bool is_line_comment = !is_in_string && text.starts_with("//");
        std::size_t consumed_bytes = 1;
        if (is_line_comment || (!is_in_string && text.starts_with("/*"))) {
            const auto end = is_line_comment ? text.find('\n') : text.find("*/", 2);
            consumed_bytes = end == std::string_view::npos ? text.size() : end + (is_line_comment ? 1 : 2);
            kept_text += ' ';
        } else {
            if (is_in_string && text.front() == '\\') {
                consumed_bytes = std::min<std::size_t>(2, text.size());
            } else if (text.front() == '"') {
                is_in_string = !is_in_string;
            }
            kept_text += text.substr(0, consumed_bytes);
        }
        text.remove_prefix(consumed_bytes);
    }
    return kept_text;
}

// Return the text of cufile.json without comments.
std::string read_configuration() {
    const char* const path = std::getenv("CUFILE_ENV_PATH_JSON");
    std::ifstream file(path == nullptr ? "/etc/cufile.json" : path);
    std::ostringstream text;
    text << file.rdbuf(); // if the read fails, such as for a folder, `text` has the part before the failure
    return remove_comments(text.str());
}

// Return the value of a key in cufile.json, or an empty text if the key is not in the file. The function does not parse
// JSON but searches the text. This is enough, because the twin reads only numbers and flags, whose keys occur only
// once.
std::string find_json_value(std::string_view text, std::string_view key) {
    constexpr std::string_view spaces = " \t\r\n";
    const std::string quoted_key = "\"" + std::string(key) + "\"";
    auto key_begin = text.find(quoted_key);
    while (key_begin != std::string_view::npos) {
        text.remove_prefix(key_begin + quoted_key.size());
        const auto colon = text.find_first_not_of(spaces);
        // If no colon follows, the found string is a value and not a key.
        if (colon != std::string_view::npos && text[colon] == ':') {
            const auto value_begin = text.find_first_not_of(spaces, colon + 1);
            return value_begin == std::string_view::npos
                       ? ""
                       : std::string(
                             text.substr(value_begin, text.find_first_of(" \t\r\n,}", value_begin) - value_begin));
        }
        key_begin = text.find(quoted_key);
    }
    return "";
}

// Return the value that a call of the program has set, else the value of the environment variable, else the value in
// cufile.json (`json_value`, empty if there is none), else the default.
bool resolve_bool(const std::optional<bool>& value_set_by_call, const char* variable_name,
                  const std::string& json_value, bool default_value) {
    if (value_set_by_call) {
        return *value_set_by_call;
    }
    if (const auto value_of_variable = read_bool_variable(variable_name)) {
        return *value_of_variable;
    }
    return json_value.empty() ? default_value : json_value == "true";
}

// Implement cuFileGetParameterSizeT or cuFileGetParameterBool for a type with `parameter_count` parameters.
template <typename Value>
Error get_parameter(std::string_view symbol, Value* value, int index, int parameter_count, Value (*read_value)(int)) {
    return run_entry(symbol, [&] {
        // Only a bool parameter was removed. The parameter is a bool if `parameter_count` is bool_parameter_count.
        if (value == nullptr || index < 0 || index >= parameter_count ||
            (parameter_count == bool_parameter_count && index == removed_bool_parameter)) {
            throw CufileError{invalid_value};
        }
        *value = read_value(index);
    });
}

void require_driver_closed() {
    if (is_open()) {
        throw CufileError{driver_already_open};
    }
}

} // namespace

std::size_t get_size_parameter(int index) {
    Parameters& all_parameters = parameters();
    std::lock_guard lock(all_parameters.mutex);
    return all_parameters.size_values[index].value_or(size_limits[index].default_value);
}

bool get_bool_parameter(int index) {
    Parameters& all_parameters = parameters();
    std::lock_guard lock(all_parameters.mutex);
    return all_parameters.bool_values[index].value_or(bool_defaults[index]);
}

namespace {

void store_size_parameter(int index, std::size_t value) {
    Parameters& all_parameters = parameters();
    std::lock_guard lock(all_parameters.mutex);
    all_parameters.size_values[index] = value;
}

} // namespace

void set_size_parameter(int index, std::size_t value) {
    const SizeLimits& limits = size_limits[index];
    if (value < limits.min || (limits.max != 0 && value > limits.max)) {
        throw CufileError{invalid_value};
    }
    store_size_parameter(index, value);
}

void set_bool_parameter(int index, bool value) {
    Parameters& all_parameters = parameters();
    std::lock_guard lock(all_parameters.mutex);
    all_parameters.bool_values[index] = value;
}

CompatSettings apply_parameters() {
    const std::string config_text = read_configuration();
    Parameters& all_parameters = parameters();
    std::lock_guard lock(all_parameters.mutex);
    CompatSettings settings;
    settings.allow_compat =
        resolve_bool(all_parameters.bool_values[bool_allow_compat], "CUFILE_ALLOW_COMPAT_MODE",
                     find_json_value(config_text, "allow_compat_mode"), bool_defaults[bool_allow_compat]);
    settings.force_compat =
        resolve_bool(all_parameters.bool_values[bool_force_compat], "CUFILE_FORCE_COMPAT_MODE",
                     find_json_value(config_text, "force_compat_mode"), bool_defaults[bool_force_compat]);
    // From now on get_bool_parameter returns the effective values.
    all_parameters.bool_values[bool_allow_compat] = settings.allow_compat;
    all_parameters.bool_values[bool_force_compat] = settings.force_compat;
    const char* const level_from_environment = std::getenv("CUFILE_STATS_LEVEL");
    const std::string requested_level =
        level_from_environment != nullptr ? level_from_environment : find_json_value(config_text, "cufile_stats");
    if (all_parameters.size_values[size_profile_stats]) {
        set_default_level(static_cast<int>(*all_parameters.size_values[size_profile_stats]));
    } else if (!requested_level.empty()) {
        set_default_level(std::atoi(requested_level.c_str()));
    }
    return settings;
}

GDRKIT_CUFILE_ENTRY Error cuFileGetParameterSizeT(int index, std::size_t* value) {
    return get_parameter("cuFileGetParameterSizeT", value, index, size_parameter_count, get_size_parameter);
}

GDRKIT_CUFILE_ENTRY Error cuFileGetParameterBool(int index, bool* value) {
    return get_parameter("cuFileGetParameterBool", value, index, bool_parameter_count, get_bool_parameter);
}

GDRKIT_CUFILE_ENTRY Error cuFileGetParameterMinMaxValue(int index, std::size_t* min, std::size_t* max) {
    return run_entry("cuFileGetParameterMinMaxValue", [&] {
        if (min == nullptr || max == nullptr || index <= size_profile_stats || index >= size_parameter_count) {
            throw CufileError{invalid_value};
        }
        *min = size_limits[index].min;
        *max = size_limits[index].max;
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileGetParameterString(int index, char* value, int capacity_bytes) {
    return run_entry("cuFileGetParameterString", [&] {
        Parameters& all_parameters = parameters();
        std::lock_guard lock(all_parameters.mutex);
        if (value == nullptr || index < 0 || index >= string_parameter_count || capacity_bytes <= 0 ||
            all_parameters.string_values[index].size() >= static_cast<std::size_t>(capacity_bytes)) {
            throw CufileError{invalid_value};
        }
        std::memcpy(value, all_parameters.string_values[index].c_str(), all_parameters.string_values[index].size() + 1);
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileSetParameterSizeT(int index, std::size_t value) {
    return run_entry("cuFileSetParameterSizeT", [&] {
        require_driver_closed();
        if (index < 0 || index >= size_parameter_count) {
            throw CufileError{invalid_value};
        }
        // Store the value even if it is outside the limits that cuFileGetParameterMinMaxValue reports.
        // libcufile 1.15, 1.18 and 1.20 do the same.
        store_size_parameter(index, value);
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileSetParameterBool(int index, bool value) {
    return run_entry("cuFileSetParameterBool", [&] {
        require_driver_closed();
        if (index < 0 || index >= bool_parameter_count || index == removed_bool_parameter) {
            throw CufileError{invalid_value};
        }
        set_bool_parameter(index, value);
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileSetParameterString(int index, const char* value) {
    return run_entry("cuFileSetParameterString", [&] {
        require_driver_closed();
        if (value == nullptr || index < 0 || index >= string_parameter_count) {
            throw CufileError{invalid_value};
        }
        Parameters& all_parameters = parameters();
        std::lock_guard lock(all_parameters.mutex);
        all_parameters.string_values[index] = value;
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileSetParameterPosixPoolSlabArray(const std::size_t* sizes_kb, const std::size_t* counts,
                                                               int array_length) {
    return run_entry("cuFileSetParameterPosixPoolSlabArray", [&] {
        require_driver_closed();
        if (sizes_kb == nullptr || counts == nullptr || array_length <= 0) {
            throw CufileError{invalid_value};
        }
        Parameters& all_parameters = parameters();
        std::lock_guard lock(all_parameters.mutex);
        all_parameters.slab_sizes_kb.assign(sizes_kb, sizes_kb + array_length);
        all_parameters.slab_counts.assign(counts, counts + array_length);
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileGetParameterPosixPoolSlabArray(std::size_t* sizes_kb, std::size_t* counts,
                                                               int array_length) {
    return run_entry("cuFileGetParameterPosixPoolSlabArray", [&] {
        Parameters& all_parameters = parameters();
        std::lock_guard lock(all_parameters.mutex);
        if (sizes_kb == nullptr || counts == nullptr || array_length < 0 ||
            static_cast<std::size_t>(array_length) != all_parameters.slab_sizes_kb.size()) {
            throw CufileError{invalid_value};
        }
        std::copy(all_parameters.slab_sizes_kb.begin(), all_parameters.slab_sizes_kb.end(), sizes_kb);
        std::copy(all_parameters.slab_counts.begin(), all_parameters.slab_counts.end(), counts);
    });
}

} // namespace gdrkit::twin::cufile
