// A library that stands for the copy of libibverbs in a Python wheel, for the test loader_client. It has another name
// than libibverbs, and reports no devices.
#include <infiniband/verbs.h>

extern "C" [[gnu::visibility("default")]] ibv_device** ibv_get_device_list(int* device_count) {
    *device_count = 0;
    return nullptr;
}
