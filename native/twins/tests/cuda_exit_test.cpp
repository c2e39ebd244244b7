// Test of the software twin of libcuda: destructors of static objects may call the driver while the program exits. They
// run after the C++ runtime destroyed the thread-local data of the main thread, which include the context stack.
#include "cuda_driver.hpp"

using namespace gdrkit::twin::cuda;

namespace {

// A static object that frees device memory in its destructor.
struct MemoryOwner {
    u64 memory = 0;
    ~MemoryOwner() {
        Handle context = 1;
        if (memory == 0) {
            return;
        }
        // The thread has lost its context stack, but can make a context current again.
        CHECK(call_driver("cuCtxGetCurrent", &context) == success && context == 0);
        CHECK(call_driver("cuMemFree_v2", memory) == invalid_context);
        CHECK(call_driver("cuDevicePrimaryCtxRetain", &context, 0) == success &&
              call_driver("cuCtxSetCurrent", context) == success);
        CHECK(call_driver("cuMemFree_v2", memory) == success);
    }
};

MemoryOwner memory_owner;

} // namespace

int main() {
    use_primary_context();
    driver_library();
    memory_owner.memory = allocate(100);
}
