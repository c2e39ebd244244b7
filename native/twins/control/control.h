/* The control interface of the twins, with which tests query a twin's state and replace its fault plan. Every twin
 * but the twins of NVML and of the CUDA runtime exports the first two functions. The twins of libibverbs, librdmacm and
 * libhl-thunk give them the symbol version GDRKIT_TWIN_1. Look the functions up by dlsym in the library whose state you
 * want, for example libibverbs.so.1. They are not part of the interface that the twin emulates.
 */
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Write the state of the library as a JSON object. Like snprintf, truncate it to `size` bytes including the final NUL
 * and return the full length without the NUL. `buffer` may be NULL if `size` is 0.
 *
 *   library  "ibverbs", "rdmacm", "cuda", "cufile" or "hlthunk"
 *   handles  number of live handles by kind: {"ibv_mr": 2, ...}
 *   calls    number of calls of each function, including calls that failed by an injected fault
 *   seed     seed of the random numbers
 *   delayed  (ibverbs, rdmacm, cufile) for each delayed function, the largest number of calls delayed at the same time
 *   trace    (ibverbs, hlthunk) the last calls: "<monotonic ns> <function> <arguments> -> <result>"
 *   exports, open_devices (hlthunk) numbers of live dma-bufs and of open devices
 *   traffic  (ibverbs) for each device: bytes and requests that its queue pairs sent, and that they served for peers
 */
int gdrkit_twin_ledger(char* buffer, size_t size);

/* Replace the fault plan by this text, in the format that native/twins/DESIGN.md describes. The next call of each
 * function is call 1 of the new plan. Return 0. If the text is malformed, keep the old plan, print one line on stderr
 * that names the expected input, and return EINVAL. */
int gdrkit_twin_faults(const char* plan);

/* Only the twin of CUDA exports this function. If this process has a context on a GPU, store the number of bytes of
 * GPU memory that the process uses on it, and return 1; else return 0. `physical_number` is the index of the GPU among
 * all GPUs of the machine; CUDA_VISIBLE_DEVICES does not change it. */
int gdrkit_twin_gpu_usage(int physical_number, unsigned long long* used_bytes);

#ifdef __cplusplus
}
#endif
