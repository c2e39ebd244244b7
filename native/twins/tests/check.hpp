// The whole test framework: a check that prints where it failed and ends the process with 1.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            std::fprintf(stderr, "%s:%d: CHECK(%s) does not hold\n", __FILE__, __LINE__, #condition);                  \
            std::exit(1);                                                                                              \
        }                                                                                                              \
    } while (0)
