// The function that portable.cmake calls instead of std::condition_variable::wait of the C++ library. It does the same.
#include <pthread.h>

#include <condition_variable>
#include <mutex>

extern "C" __attribute__((used)) void
__wrap__ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE(std::condition_variable* condition,
                                                                 std::unique_lock<std::mutex>* lock) {
    pthread_cond_wait(condition->native_handle(), lock->mutex()->native_handle());
}
