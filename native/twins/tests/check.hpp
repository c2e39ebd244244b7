// The assertion of the tests of the software twins: CHECK prints the failed condition and ends the process with exit
// code 1.
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
