// Test that a program may call the driver until it exits: destructors of static objects run after the thread-local data
// of the main thread is destroyed.
#include "cuda_driver.hpp"

using namespace gdrkit::twin::cuda;

namespace {

struct Library {
    u64 memory = 0;
    ~Library() {
        Handle context = 1;
        if (memory == 0) {
            return;
        }
        // The thread has lost its context stack, but can make a context current again.
        CHECK(cu("cuCtxGetCurrent", &context) == success && context == 0);
        CHECK(cu("cuMemFree_v2", memory) == invalid_context);
        CHECK(cu("cuDevicePrimaryCtxRetain", &context, 0) == success && cu("cuCtxSetCurrent", context) == success);
        CHECK(cu("cuMemFree_v2", memory) == success);
    }
};

Library library;

} // namespace

int main() {
    init_device();
    driver();
    library.memory = allocate(100);
}
