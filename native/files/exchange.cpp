#include "exchange.hpp"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

namespace trackbed::files {

int exchange_names(const char* path, const char* other) {
#if defined(SYS_renameat2) && defined(RENAME_EXCHANGE)
  return syscall(SYS_renameat2, AT_FDCWD, path, AT_FDCWD, other, RENAME_EXCHANGE) == 0 ? 0 : errno;
#else
  static_cast<void>(path);
  static_cast<void>(other);
  return ENOSYS;
#endif
}

}  // namespace trackbed::files
