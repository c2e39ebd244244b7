// Tests that the audit library replaces a copy of libibverbs to which a program is linked by another name and by
// DT_RPATH, as auditwheel links the libraries of a wheel. The test sets LD_AUDIT. Without it, the copy has no devices.
#include <dlfcn.h>
#include <infiniband/verbs.h>

#include <cstring>

#include "tests/check.hpp"

int main(int, char** arguments) {
    int device_count = 0;
    CHECK(ibv_get_device_list(&device_count) != nullptr && device_count == 2);
    Dl_info info{};
    CHECK(dladdr(reinterpret_cast<void*>(ibv_get_device_list), &info) != 0);
    // Another name for the same library leads to the same twin.
    void* const copy = dlopen(arguments[1], RTLD_NOW | RTLD_NOLOAD);
    CHECK(copy != nullptr && copy == dlopen("libibverbs.so.1", RTLD_NOW | RTLD_NOLOAD));
    return 0;
}
