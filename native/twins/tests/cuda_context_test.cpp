// Tests of the software twin of libcuda: primary contexts, created contexts, the context stack of a thread, and the
// objects that are destroyed with a context.
#include <thread>

#include "cuda_driver.hpp"

using namespace gdrkit::twin::cuda;

namespace {

Handle get_current_context() {
    Handle context = 1;
    EXPECT_SUCCESS("cuCtxGetCurrent", &context);
    return context;
}

void test_primary_context_ends_with_last_release() {
    Handle context = 0, context_again = 0;
    unsigned flags = 99;
    int is_active = -1;
    EXPECT_SUCCESS("cuDevicePrimaryCtxGetState", 0, &flags, &is_active);
    CHECK(is_active == 0 && flags == 0);
    EXPECT_SUCCESS("cuDevicePrimaryCtxRetain", &context, 0);
    CHECK(get_current_context() == 0);
    EXPECT_SUCCESS("cuDevicePrimaryCtxRetain", &context_again, 0);
    CHECK(context == context_again && context != 0);
    EXPECT_SUCCESS("cuCtxSetCurrent", context);
    EXPECT_SUCCESS("cuDevicePrimaryCtxRelease_v2", 0);
    EXPECT_SUCCESS("cuCtxSynchronize");
    const u64 pointer = allocate(100);
    EXPECT_SUCCESS("cuDevicePrimaryCtxRelease_v2", 0);
    EXPECT_RESULT(context_is_destroyed, "cuCtxSynchronize");
    EXPECT_RESULT(invalid_context, "cuDevicePrimaryCtxRelease_v2", 0);
    // The new primary context has the same handle, but the memory of the old context was destroyed.
    EXPECT_SUCCESS("cuDevicePrimaryCtxRetain", &context_again, 0);
    CHECK(context_again == context);
    EXPECT_SUCCESS("cuCtxSynchronize");
    EXPECT_RESULT(not_found, "cuMemGetAddressRange_v2", static_cast<u64*>(nullptr), static_cast<u64*>(nullptr),
                  pointer);
    // The memory was destroyed with its context, so cuMemFree fails. The twin aborts only if the program frees the same
    // memory twice.
    EXPECT_RESULT(invalid_value, "cuMemFree_v2", pointer);
    EXPECT_SUCCESS("cuDevicePrimaryCtxReset_v2", 0);
    EXPECT_RESULT(context_is_destroyed, "cuCtxSynchronize");
    // The driver adds CU_CTX_MAP_HOST (0x08) to the flags of a context. 0x1000 is not a flag.
    EXPECT_SUCCESS("cuDevicePrimaryCtxSetFlags_v2", 0, unsigned{context_sync_memops});
    EXPECT_RESULT(invalid_value, "cuDevicePrimaryCtxSetFlags_v2", 0, 0x1000U);
    EXPECT_SUCCESS("cuDevicePrimaryCtxRetain", &context_again, 0);
    EXPECT_SUCCESS("cuCtxGetFlags", &flags);
    CHECK(flags == (context_sync_memops | context_map_host));
    EXPECT_SUCCESS("cuCtxSetCurrent", Handle{0});
    EXPECT_SUCCESS("cuDevicePrimaryCtxRelease_v2", 0);
}

void test_created_context_is_current_until_destroyed() {
    Handle first_context = 0, second_context = 0, popped_context = 0;
    EXPECT_RESULT(invalid_value, "cuCtxCreate_v2", &first_context, 0x1000U, 0);
    EXPECT_RESULT(invalid_device, "cuCtxCreate_v2", &first_context, 0U, 7);
    EXPECT_SUCCESS("cuCtxCreate_v2", &first_context, 0U, 0);
    ContextParameters parameters{};
    EXPECT_SUCCESS("cuCtxCreate_v4", &second_context, &parameters, 0U, 1);
    CHECK(first_context != second_context && get_current_context() == second_context);
    int device = -1;
    EXPECT_SUCCESS("cuCtxGetDevice", &device);
    CHECK(device == 1);
    EXPECT_SUCCESS("cuCtxGetDevice_v2", &device, first_context);
    CHECK(device == 0);
    u64 first_id = 0, second_id = 0;
    EXPECT_SUCCESS("cuCtxGetId", first_context, &first_id);
    EXPECT_SUCCESS("cuCtxGetId", Handle{0}, &second_id);
    CHECK(first_id != 0 && first_id != second_id);
    unsigned api_version = 0;
    EXPECT_SUCCESS("cuCtxGetApiVersion", first_context, &api_version);
    CHECK(api_version == 3020);
    EXPECT_SUCCESS("cuCtxEnablePeerAccess", first_context, 0U);
    EXPECT_RESULT(peer_access_already_enabled, "cuCtxEnablePeerAccess", first_context, 0U);
    EXPECT_SUCCESS("cuCtxDisablePeerAccess", first_context);
    EXPECT_RESULT(peer_access_not_enabled, "cuCtxDisablePeerAccess", first_context);
    // A context cannot enable access to its own device: second_context is also the current context here.
    EXPECT_RESULT(peer_access_unsupported, "cuCtxEnablePeerAccess", second_context, 0U);
    EXPECT_SUCCESS("cuCtxPopCurrent_v2", &popped_context);
    CHECK(popped_context == second_context && get_current_context() == first_context);
    // Each thread has its own context stack.
    std::thread([&] {
        CHECK(get_current_context() == 0);
        EXPECT_RESULT(invalid_context, "cuCtxGetDevice", &device);
        EXPECT_SUCCESS("cuCtxPushCurrent_v2", second_context);
        CHECK(get_current_context() == second_context);
    }).join();
    Handle stream = 0, event = 0;
    EXPECT_SUCCESS("cuStreamCreate", &stream, 0U);
    EXPECT_SUCCESS("cuEventCreate", &event, 0U);
    EXPECT_SUCCESS("cuCtxDestroy_v2", first_context);
    CHECK(get_current_context() == 0);
    EXPECT_SUCCESS("cuCtxSetCurrent", second_context);
    EXPECT_RESULT(invalid_handle, "cuStreamSynchronize", stream);
    EXPECT_RESULT(invalid_handle, "cuStreamDestroy_v2", stream);
    EXPECT_RESULT(invalid_handle, "cuEventDestroy_v2", event);
    EXPECT_RESULT(invalid_context, "cuCtxPushCurrent_v2", first_context);
    EXPECT_RESULT(invalid_context, "cuCtxDestroy_v2", Handle{0x1234}); // not a handle of a context
    EXPECT_SUCCESS("cuCtxDestroy_v2", second_context);
}

void test_context_settings_are_stored() {
    Handle context = use_primary_context();
    unsigned flags = 0;
    EXPECT_SUCCESS("cuCtxSetFlags", unsigned{context_sync_memops});
    EXPECT_SUCCESS("cuCtxGetFlags", &flags);
    CHECK(flags == (context_sync_memops | context_map_host));
    EXPECT_RESULT(invalid_value, "cuCtxSetFlags", 0x1000U);
    // CU_CTX_SCHED_SPIN and CU_CTX_SCHED_YIELD exclude each other.
    EXPECT_RESULT(invalid_value, "cuCtxSetFlags", 3U);
    EXPECT_SUCCESS("cuCtxSetFlags", 0U);
    int least_priority = 9, greatest_priority = 9;
    EXPECT_SUCCESS("cuCtxGetStreamPriorityRange", &least_priority, &greatest_priority);
    CHECK(least_priority == 0 && greatest_priority == -5);
    u64 heap_limit_bytes = 0;
    // 2 is CU_LIMIT_MALLOC_HEAP_SIZE.
    EXPECT_SUCCESS("cuCtxSetLimit", 2, u64{123456});
    EXPECT_SUCCESS("cuCtxGetLimit", &heap_limit_bytes, 2);
    CHECK(heap_limit_bytes == 123456);
    EXPECT_RESULT(invalid_value, "cuCtxGetLimit", &heap_limit_bytes, limit_count);
    EXPECT_SUCCESS("cuFlushGPUDirectRDMAWrites", 0, int{flush_to_owner});
    EXPECT_RESULT(invalid_value, "cuFlushGPUDirectRDMAWrites", 0, 5); // 5 is not a scope
    EXPECT_RESULT(invalid_context, "cuCtxDestroy_v2", context);       // a primary context is released, not destroyed
    EXPECT_SUCCESS("cuDevicePrimaryCtxRelease_v2", 0);
}

void test_second_destroy_aborts() {
    const int wait_status = run_in_child([] {
        Handle context = 0;
        call_driver("cuInit", 0U);
        call_driver("cuCtxCreate_v2", &context, 0U, 0);
        call_driver("cuCtxDestroy_v2", context);
        call_driver("cuCtxDestroy_v2", context);
    });
    CHECK(WIFSIGNALED(wait_status) && WTERMSIG(wait_status) == SIGABRT);
}

} // namespace

int main() {
    test_second_destroy_aborts(); // must run first: a child that is forked after cuInit cannot use the driver
    EXPECT_SUCCESS("cuInit", 0U);
    test_primary_context_ends_with_last_release();
    test_created_context_is_current_until_destroyed();
    test_context_settings_are_stored();
}
