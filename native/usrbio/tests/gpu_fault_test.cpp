// Tests of GPU iovs when a call of the CUDA driver fails. The called function of the client library must return the
// right error code and leak nothing. The tests need the software twin of libcuda (a library that emulates the driver).
// The fault plan of the twin selects the call that fails.
#include <fcntl.h>

#include <fstream>

#include "usrbio/tests/gpu_check.hpp"

namespace {

using namespace gdrkit::usrbio::test;

// Status codes of the CUDA driver (CUresult).
constexpr int invalid_value = 1, out_of_memory = 2, not_supported = 801, unknown_error = 999;

std::size_t count_open_descriptors() {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}

std::size_t count_links(const char* mount) {
    const std::filesystem::path folder = std::string(mount) + "/3fs-virt/iovs";
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
}

// The main function of the second process, whose driver fails once. The first creation (action "create") or
// synchronization (action "synchronize") returns `expected_result`, and later calls succeed. Each iov needs more than
// half of the device memory, so leaked memory makes the next creation fail.
int peer_main(const std::string& action, const char* mount, std::size_t iov_bytes, int expected_result) {
    hf3fs_iov iov{};
    const hf3fs_iov zero_iov{};
    if (action == "create") {
        CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount, iov_bytes, 0, 0), expected_result);
        CHECK(std::memcmp(&iov, &zero_iov, sizeof iov) == 0);
        CHECK_EQUAL(count_links(mount), std::size_t{0});
        if (expected_result == -ENOTSUP && !hf3fs_gdr_available()) {
            return 0; // cuInit() failed, and the library does not call it again in this process.
        }
    }
    for (std::size_t round = 0, descriptor_count_before = 0; round < 2; ++round) {
        CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount, iov_bytes, 0, 0), 0);
        if (action == "synchronize" && round == 0) {
            CHECK_EQUAL(hf3fs_iovsync_gpu(&iov, 0), expected_result);
        }
        CHECK_EQUAL(hf3fs_iovsync_gpu(&iov, 0), 0);
        hf3fs_iovdestroy_gpu(&iov);
        CHECK(std::memcmp(&iov, &zero_iov, sizeof iov) == 0);
        CHECK_EQUAL(count_links(mount), std::size_t{0});
        CHECK(round == 0 || count_open_descriptors() == descriptor_count_before);
        descriptor_count_before = count_open_descriptors();
    }
    return 0;
}

// The first call of `driver_function` fails with `driver_status`. The function of the library for `action` then returns
// `expected_result`.
struct Fault {
    const char* action;
    const char* driver_function;
    int driver_status;
    int expected_result;
};

constexpr Fault faults[] = {
    {"create", "cuInit", unknown_error, -ENOTSUP},
    {"create", "cuDeviceGetCount", unknown_error, -ENODEV},
    {"create", "cuDevicePrimaryCtxRetain", out_of_memory, -ENOMEM},
    {"create", "cuDevicePrimaryCtxRetain", unknown_error, -ENODEV},
    {"create", "cuCtxPushCurrent_v2", unknown_error, -ENODEV},
    {"create", "cuMemAlloc_v2", out_of_memory, -ENOMEM},
    {"create", "cuMemAlloc_v2", invalid_value, -ENOMEM},
    {"create", "cuMemAlloc_v2", not_supported, -ENOTSUP},
    {"create", "cuMemAlloc_v2", unknown_error, -EIO},
    {"create", "cuPointerGetAttribute", unknown_error, -EINVAL},
    {"create", "cuMemGetAddressRange_v2", unknown_error, -EINVAL},
    {"create", "cuPointerSetAttribute", unknown_error, -EIO},
    {"create", "cuIpcGetMemHandle", out_of_memory, -ENOMEM},
    {"create", "cuIpcGetMemHandle", not_supported, -ENOTSUP},
    {"create", "cuIpcGetMemHandle", unknown_error, -EIO},
    {"synchronize", "cuCtxSynchronize", unknown_error, -EIO},
};

} // namespace

int main(int argument_count, char** arguments) {
    if (argument_count == 5) { // This is the second process, which run_peer() started with four arguments.
        return peer_main(arguments[1], arguments[2], std::stoul(arguments[3]), std::stoi(arguments[4]));
    }
    const Mount mount;
    use_device(0);
    u64 free_bytes = 0, total_bytes = 0;
    CHECK_EQUAL(call_cuda("cuMemGetInfo_v2", &free_bytes, &total_bytes), 0);
    const std::string iov_bytes_text = std::to_string(free_bytes / 10 * 6);
    const std::string plan_path = std::string(mount.path()) + "/plan";
    const std::string state_folder = std::string(mount.path()) + "/state";
    // With this file, hf3fs_gdr_available() returns false in the second process only if cuInit() has failed.
    write_reach_file(state_folder, 0, true);
    CHECK_EQUAL(setenv("GDRKIT_STATE", state_folder.c_str(), 1), 0);
    for (const Fault& fault : faults) {
        std::ofstream(plan_path) << "gdrkit-faults 1\n"
                                 << fault.driver_function << " call=1 status=" << fault.driver_status << "\n";
        CHECK_EQUAL(setenv("GDRKIT_TWINS_FAULTS", plan_path.c_str(), 1), 0);
        const int exit_status =
            run_peer({fault.action, mount.path(), iov_bytes_text, std::to_string(fault.expected_result)});
        if (exit_status != 0) {
            std::fprintf(stderr, "%s with %s = %d: the second process exited with %d\n", fault.action,
                         fault.driver_function, fault.driver_status, exit_status);
        }
        CHECK_EQUAL(exit_status, 0);
    }
}
