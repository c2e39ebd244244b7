// A program may call the driver until its very end: the destructors of its static objects run after the main thread's
// own data is gone.
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
        // The thread has no context any more, but may take one.
        CHECK(cu("cuCtxGetCurrent", &context) == success && context == 0);
        CHECK(cu("cuMemFree_v2", memory) == invalid_context);
        CHECK(cu("cuDevicePrimaryCtxRetain", &context, 0) == success && cu("cuCtxSetCurrent", context) == success);
        CHECK(cu("cuMemFree_v2", memory) == success);
    }
};

Library library;

} // namespace

int main() {
    begin();
    driver();
    library.memory = allocate(100);
}
