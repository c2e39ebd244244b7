// The configuration parameters of cuFile. A program can set them while the driver is closed. They take effect when the
// driver is opened.
#pragma once

#include <cstddef>

#include "cufile/driver.hpp"

namespace gdrkit::twin::cufile {

// The members of CUFileSizeTConfigParameter_t and CUFileBoolConfigParameter_t that the twin reads.
enum SizeParameter {
    size_profile_stats = 0,
    size_max_direct_io_kb = 5,
    size_max_device_cache_kb = 6,
    size_per_buffer_cache_kb = 7,
    size_max_pinned_kb = 8,
    size_batch_entries = 9,
    size_poll_threshold_kb = 10,
    size_batch_timeout_ms = 11,
    size_parameter_count = 12,
};
enum BoolParameter { bool_poll_mode = 0, bool_allow_compat = 1, bool_force_compat = 2, bool_parameter_count = 14 };

// Determine the settings of compat mode and the level of the statistics when the driver is opened. Return the settings
// of compat mode. A value that the program has set by a call overrides the environment variable, which overrides
// cufile.json. The variable CUFILE_ENV_PATH_JSON contains the path of this file.
CompatSettings apply_parameters();
// Return the value that the program has set by a call, else the default. For the two parameters of compat mode, after
// apply_parameters(), return the effective value, which can come from the environment or cufile.json.
std::size_t get_size_parameter(int index);
bool get_bool_parameter(int index);
// Set a parameter. Throw CufileError (invalid_value) if a size is outside its limits.
void set_size_parameter(int index, std::size_t value);
void set_bool_parameter(int index, bool value);

} // namespace gdrkit::twin::cufile
