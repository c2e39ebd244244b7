/* Helpers of the examples: exit with an error message, make a deadline, wait for an operation, and call CUDA. */
#pragma once

#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "hf3fs_usrbio_gdr.h"

/* Prints that `subject` (a function, a path or a peer) failed, and exits. `error` is a positive or negative errno. */
static inline void fail(const char* subject, long error) {
    fprintf(stderr, "%s failed: %s\n", subject, strerror((int)(error < 0 ? -error : error)));
    exit(1);
}

/* Returns a time `seconds` after now, because hf3fs_wait_for_ios takes a deadline in CLOCK_REALTIME, not a timeout. */
static inline struct timespec make_deadline(int seconds) {
    struct timespec deadline;
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += seconds;
    return deadline;
}

/* Waits for the completion of the only operation in flight, and returns how many bytes it moved. */
static inline size_t wait_for_completion(const struct hf3fs_ior* ior) {
    struct hf3fs_cqe cqe;
    const struct timespec deadline = make_deadline(60);
    const int count = hf3fs_wait_for_ios(ior, &cqe, 1, 1, &deadline);
    if (count < 0) {
        fail("hf3fs_wait_for_ios", count);
    }
    if (count == 0) {
        fprintf(stderr, "hf3fs_wait_for_ios: no completion within a minute\n");
        exit(1);
    }
    if (cqe.result < 0) {
        fail("the operation", (long)cqe.result);
    }
    return (size_t)cqe.result;
}

/*
 * Returns the function of the CUDA driver with this symbol. A program that is built with the CUDA toolkit can include
 * <cuda.h> and link libcuda instead.
 */
static inline void* find_cuda_function(const char* symbol) {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    void* const function = library == NULL ? NULL : dlsym(library, symbol);
    if (function == NULL) {
        fprintf(stderr, "%s: %s\n", symbol, dlerror());
        exit(1);
    }
    return function;
}

/* Ends the program if `result`, the CUresult of `function`, is not CUDA_SUCCESS (0). */
static inline void check_cuda(const char* function, int result) {
    if (result != 0) {
        fprintf(stderr, "%s failed: %d\n", function, result);
        exit(1);
    }
}

/* Makes the primary context of the device current, as the CUDA runtime does. */
static inline void use_device(int device) {
    int (*init_driver)(unsigned) = (int (*)(unsigned))find_cuda_function("cuInit");
    int (*retain_primary_context)(void**, int) = (int (*)(void**, int))find_cuda_function("cuDevicePrimaryCtxRetain");
    int (*set_current_context)(void*) = (int (*)(void*))find_cuda_function("cuCtxSetCurrent");
    void* context = NULL;
    check_cuda("cuInit", init_driver(0));
    check_cuda("cuDevicePrimaryCtxRetain", retain_primary_context(&context, device));
    check_cuda("cuCtxSetCurrent", set_current_context(context));
}

/* Allocates memory on the current device; see use_device(). */
static inline void* allocate_on_device(size_t size_bytes) {
    int (*allocate)(uint64_t*, size_t) = (int (*)(uint64_t*, size_t))find_cuda_function("cuMemAlloc_v2");
    uint64_t address = 0;
    check_cuda("cuMemAlloc", allocate(&address, size_bytes));
    return (void*)address;
}

static inline void free_on_device(void* pointer) {
    int (*release)(uint64_t) = (int (*)(uint64_t))find_cuda_function("cuMemFree_v2");
    check_cuda("cuMemFree", release((uint64_t)pointer));
}

/* Copies device memory to the host and writes it to standard output. */
static inline void print_device_memory(const void* pointer, size_t bytes) {
    int (*copy)(void*, uint64_t, size_t) = (int (*)(void*, uint64_t, size_t))find_cuda_function("cuMemcpyDtoH_v2");
    void* const host_copy = malloc(bytes == 0 ? 1 : bytes);
    if (host_copy == NULL) {
        fail("malloc", ENOMEM);
    }
    if (bytes != 0) {
        check_cuda("cuMemcpyDtoH", copy(host_copy, (uint64_t)pointer, bytes));
    }
    if (fwrite(host_copy, 1, bytes, stdout) != bytes || fflush(stdout) != 0) {
        fprintf(stderr, "write to standard output failed\n");
        exit(1);
    }
    free(host_copy);
}
