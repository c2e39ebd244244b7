/* The control interface of the twins, with which tests query a twin's state and replace its fault plan. Every twin
 * but the twin of NVML exports the first two functions under the version GDRKIT_TWIN_1. Look them up by dlsym in the
 * library whose state you want, for example libibverbs.so.1. They are not part of the interface that the twin emulates.
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

/* Replace the fault plan by this text, in the format of DESIGN.md, and restart the call counts at 1. Return 0; or
 * return EINVAL, print one line on stderr that names the expected input, and keep the old plan. */
int gdrkit_twin_faults(const char* plan);

/* Only the twin of CUDA exports this function. Return 1 if this process has a context on the GPU with this number in
 * the machine, and store the bytes of GPU memory that the process uses; else return 0. */
int gdrkit_twin_gpu_usage(int number, unsigned long long* used_bytes);

#ifdef __cplusplus
}
#endif
