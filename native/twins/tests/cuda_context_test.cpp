// Contexts: primary ones, created ones, the stack of each thread, and what ends with them.
#include <thread>

#include "cuda_driver.hpp"

using namespace gdrkit::twin::cuda;

namespace {

Handle current() {
    Handle context = 1;
    WORKS("cuCtxGetCurrent", &context);
    return context;
}

void primary_context() {
    Handle context = 0, again = 0;
    unsigned flags = 99;
    int active = -1;
    WORKS("cuDevicePrimaryCtxGetState", 0, &flags, &active);
    CHECK(active == 0 && flags == 0);
    WORKS("cuDevicePrimaryCtxRetain", &context, 0);
    CHECK(current() == 0);
    WORKS("cuDevicePrimaryCtxRetain", &again, 0);
    CHECK(context == again && context != 0);
    WORKS("cuCtxSetCurrent", context);
    WORKS("cuDevicePrimaryCtxRelease_v2", 0);
    WORKS("cuCtxSynchronize");
    const u64 pointer = allocate(100);
    WORKS("cuDevicePrimaryCtxRelease_v2", 0);
    ANSWERS(context_is_destroyed, "cuCtxSynchronize");
    ANSWERS(invalid_context, "cuDevicePrimaryCtxRelease_v2", 0);
    // It comes back under the same handle, without the memory it had.
    WORKS("cuDevicePrimaryCtxRetain", &again, 0);
    CHECK(again == context);
    WORKS("cuCtxSynchronize");
    ANSWERS(not_found, "cuMemGetAddressRange_v2", static_cast<u64*>(nullptr), static_cast<u64*>(nullptr), pointer);
    // Its memory went with the context, so this free is the first one that the program does: an error, no abort.
    ANSWERS(invalid_value, "cuMemFree_v2", pointer);
    WORKS("cuDevicePrimaryCtxReset_v2", 0);
    ANSWERS(context_is_destroyed, "cuCtxSynchronize");
    WORKS("cuDevicePrimaryCtxSetFlags_v2", 0, 0x80U);
    ANSWERS(invalid_value, "cuDevicePrimaryCtxSetFlags_v2", 0, 0x1000U);
    WORKS("cuDevicePrimaryCtxRetain", &again, 0);
    WORKS("cuCtxGetFlags", &flags);
    CHECK(flags == 0x88);
    WORKS("cuCtxSetCurrent", Handle{0});
    WORKS("cuDevicePrimaryCtxRelease_v2", 0);
}

void created_contexts() {
    Handle first = 0, second = 0, popped = 0;
    ANSWERS(invalid_value, "cuCtxCreate_v2", &first, 0x1000U, 0);
    ANSWERS(invalid_device, "cuCtxCreate_v2", &first, 0U, 7);
    WORKS("cuCtxCreate_v2", &first, 0U, 0);
    ContextParameters parameters{};
    WORKS("cuCtxCreate_v4", &second, &parameters, 0U, 1);
    CHECK(first != second && current() == second);
    int device = -1;
    WORKS("cuCtxGetDevice", &device);
    CHECK(device == 1);
    WORKS("cuCtxGetDevice_v2", &device, first);
    CHECK(device == 0);
    u64 first_id = 0, second_id = 0;
    WORKS("cuCtxGetId", first, &first_id);
    WORKS("cuCtxGetId", Handle{0}, &second_id);
    CHECK(first_id != 0 && first_id != second_id);
    unsigned version = 0;
    WORKS("cuCtxGetApiVersion", first, &version);
    CHECK(version == 3020);
    WORKS("cuCtxEnablePeerAccess", first, 0U);
    ANSWERS(peer_access_already_enabled, "cuCtxEnablePeerAccess", first, 0U);
    WORKS("cuCtxDisablePeerAccess", first);
    ANSWERS(peer_access_not_enabled, "cuCtxDisablePeerAccess", first);
    ANSWERS(peer_access_unsupported, "cuCtxEnablePeerAccess", second, 0U);
    WORKS("cuCtxPopCurrent_v2", &popped);
    CHECK(popped == second && current() == first);
    // The stack belongs to the thread.
    std::thread([&] {
        CHECK(current() == 0);
        ANSWERS(invalid_context, "cuCtxGetDevice", &device);
        WORKS("cuCtxPushCurrent_v2", second);
        CHECK(current() == second);
    }).join();
    Handle stream = 0, event = 0;
    WORKS("cuStreamCreate", &stream, 0U);
    WORKS("cuEventCreate", &event, 0U);
    WORKS("cuCtxDestroy_v2", first);
    CHECK(current() == 0);
    WORKS("cuCtxSetCurrent", second);
    ANSWERS(invalid_handle, "cuStreamSynchronize", stream);
    ANSWERS(invalid_handle, "cuStreamDestroy_v2", stream);
    ANSWERS(invalid_handle, "cuEventDestroy_v2", event);
    ANSWERS(invalid_context, "cuCtxPushCurrent_v2", first);
    ANSWERS(invalid_context, "cuCtxDestroy_v2", Handle{0x1234});
    WORKS("cuCtxDestroy_v2", second);
}

void settings() {
    Handle context = begin();
    unsigned flags = 0;
    WORKS("cuCtxSetFlags", 0x80U);
    WORKS("cuCtxGetFlags", &flags);
    CHECK(flags == 0x88);
    ANSWERS(invalid_value, "cuCtxSetFlags", 0x1000U);
    WORKS("cuCtxSetFlags", 0U);
    int least = 9, greatest = 9;
    WORKS("cuCtxGetStreamPriorityRange", &least, &greatest);
    CHECK(least == 0 && greatest == -5);
    u64 limit = 0;
    WORKS("cuCtxSetLimit", 2, u64{123456});
    WORKS("cuCtxGetLimit", &limit, 2);
    CHECK(limit == 123456);
    ANSWERS(unsupported_limit, "cuCtxGetLimit", &limit, 10);
    WORKS("cuFlushGPUDirectRDMAWrites", 0, 100);
    ANSWERS(invalid_value, "cuFlushGPUDirectRDMAWrites", 0, 5);
    ANSWERS(invalid_context, "cuCtxDestroy_v2", context); // a primary context is released
    WORKS("cuDevicePrimaryCtxRelease_v2", 0);
}

void second_destroy_aborts() {
    const int status = status_of_child([] {
        Handle context = 0;
        cu("cuInit", 0U);
        cu("cuCtxCreate_v2", &context, 0U, 0);
        cu("cuCtxDestroy_v2", context);
        cu("cuCtxDestroy_v2", context);
    });
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

} // namespace

int main() {
    second_destroy_aborts();
    WORKS("cuInit", 0U);
    primary_context();
    created_contexts();
    settings();
}
