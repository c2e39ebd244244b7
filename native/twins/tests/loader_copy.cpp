// A library that stands for the copy of libibverbs in a Python wheel: it has another name, and no devices.
#include <infiniband/verbs.h>

extern "C" [[gnu::visibility("default")]] ibv_device** ibv_get_device_list(int* device_count) {
    *device_count = 0;
    return nullptr;
}
