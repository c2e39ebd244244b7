// Functions that use a default stream have two forms. In the ordinary form, stream 0 is the legacy default stream. In
// the per-thread form, which has the suffix _ptsz (functions with a stream argument) or _ptds (functions without a
// stream argument), stream 0 is the default stream of the calling thread. The build compiles the files that include
// this header once for each form.
#pragma once

#include "cudart/entry.hpp"

#ifdef GDRKIT_CUDART_PER_THREAD
#define GDRKIT_STREAM_FORM(name) GDRKIT_CUDART_ENTRY Error name##_ptsz
#define GDRKIT_SYNC_FORM(name) GDRKIT_CUDART_ENTRY Error name##_ptds
#else
#define GDRKIT_STREAM_FORM(name) GDRKIT_CUDART_ENTRY Error name
#define GDRKIT_SYNC_FORM(name) GDRKIT_CUDART_ENTRY Error name
#endif

namespace gdrkit::twin::cudart {
namespace {

#ifdef GDRKIT_CUDART_PER_THREAD
inline constexpr bool is_per_thread = true;
#else
inline constexpr bool is_per_thread = false;
#endif

// Convert the stream argument of a function of this form to the stream for the driver.
inline Handle resolve_stream(Handle stream) {
    return is_per_thread && stream == 0 ? per_thread_stream : stream;
}

// `error` is the result of a call. If the call succeeded, wait for the default stream of the calling thread. Return the
// error of the call or of the wait.
inline Error wait_for_per_thread_stream(Error error) {
    return error == success ? call(&Driver::cuStreamSynchronize, per_thread_stream) : error;
}

} // namespace
} // namespace gdrkit::twin::cudart
