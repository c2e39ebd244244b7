// Test of the audit library of the software twin of libibverbs. This program is linked by DT_RPATH to a copy of
// libibverbs with another name, as auditwheel links the libraries of a wheel. The audit library must replace the copy
// by the twin. The build sets LD_AUDIT for the test. Without it, the copy reports no devices.
#include <dlfcn.h>
#include <infiniband/verbs.h>

#include <cstring>

#include "tests/check.hpp"

int main(int, char** arguments) {
    int device_count = 0;
    CHECK(ibv_get_device_list(&device_count) != nullptr && device_count == 2);
    Dl_info info{};
    CHECK(dladdr(reinterpret_cast<void*>(ibv_get_device_list), &info) != 0);
    // The name of the copy and the usual name lead to the same twin.
    void* const copy = dlopen(arguments[1], RTLD_NOW | RTLD_NOLOAD);
    CHECK(copy != nullptr && copy == dlopen("libibverbs.so.1", RTLD_NOW | RTLD_NOLOAD));
    return 0;
}
