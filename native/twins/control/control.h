/* How suites look inside a twin. All twins export these two functions under the version GDRKIT_TWIN_1; get them by
 * dlsym from the library whose state you want, for example libibverbs.so.1. They are no part of what a twin stands for.
 */
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Writes the state of the library as one JSON object, cut off at `size` and ended by NUL like snprintf, and returns the
 * length that the whole needs without the NUL (buffer may be NULL when size is 0):
 *
 *   library  "ibverbs", "cuda" or "hlthunk"
 *   handles  live handles by kind: {"ibv_mr": 2, ...}
 *   calls    how often each function was called, also when a fault made it fail
 *   seed     the seed in use
 *   trace    (ibverbs, hlthunk) the last calls: "<monotonic ns> <function> <arguments> -> <result>"
 *   exports, open_devices (hlthunk) how many dma-bufs and devices are alive
 *   traffic  (ibverbs) by device: bytes and requests that its queue pairs sent, and those that they served for others
 */
int gdrkit_twin_ledger(char* buffer, size_t size);

/* Replaces the fault plan by this text (the format is in DESIGN.md) and begins to count calls from 1 again.
 * Returns 0, or EINVAL and prints one line on stderr that says what was expected; the old plan then stays. */
int gdrkit_twin_faults(const char* plan);

#ifdef __cplusplus
}
#endif
