// CHECK and CHECK_EQUAL, the assertions of all native tests. A failed assertion prints its location and aborts. Unlike
// assert(3), they also work in a release build.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            std::fprintf(stderr, "%s:%d: %s: CHECK(%s) failed\n", __FILE__, __LINE__, __func__, #condition);           \
            std::abort();                                                                                              \
        }                                                                                                              \
    } while (false)

#define CHECK_EQUAL(left, right)                                                                                       \
    do {                                                                                                               \
        const auto left_ = (left);                                                                                     \
        const auto right_ = (right);                                                                                   \
        if (!(left_ == right_)) {                                                                                      \
            std::fprintf(stderr, "%s:%d: %s: %s is %lld, not %s = %lld\n", __FILE__, __LINE__, __func__, #left,        \
                         static_cast<long long>(left_), #right, static_cast<long long>(right_));                       \
            std::abort();                                                                                              \
        }                                                                                                              \
    } while (false)
