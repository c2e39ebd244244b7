// Functions of hl-thunk that the twin does not implement. Each has no effect and reports EOPNOTSUPP by its convention
// (see functions.def). Here each convention is a macro that generates the function.
#include <cerrno>

#include "hlthunk/hlthunk_abi.hpp"

namespace gdrkit::twin::gaudi {

#define implemented(symbol)
#define cannot_fail(symbol)
#define minus_errno(symbol)                                                                                            \
    GDRKIT_HLTHUNK_ENTRY int symbol();                                                                                 \
    int symbol() {                                                                                                     \
        errno = EOPNOTSUPP;                                                                                            \
        return -EOPNOTSUPP;                                                                                            \
    }
#define null(symbol)                                                                                                   \
    GDRKIT_HLTHUNK_ENTRY void* symbol();                                                                               \
    void* symbol() {                                                                                                   \
        errno = EOPNOTSUPP;                                                                                            \
        return nullptr;                                                                                                \
    }
#define nothing(symbol)                                                                                                \
    GDRKIT_HLTHUNK_ENTRY void symbol();                                                                                \
    void symbol() {                                                                                                    \
        errno = EOPNOTSUPP;                                                                                            \
    }
#define X(symbol, convention) convention(symbol)
#include "hlthunk/functions.def"
#undef X
#undef implemented
#undef cannot_fail
#undef minus_errno
#undef null
#undef nothing

} // namespace gdrkit::twin::gaudi
