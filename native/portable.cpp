// A replacement of std::condition_variable::wait. Since GCC 12, this function has another symbol version, which the C++
// library of GCC 11 does not have. portable.cmake makes the linker use the replacement.
#include <pthread.h>

#include <condition_variable>
#include <mutex>

extern "C" __attribute__((used)) void
__wrap__ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE(std::condition_variable* condition,
                                                                 std::unique_lock<std::mutex>* lock) {
    pthread_cond_wait(condition->native_handle(), lock->mutex()->native_handle());
}
