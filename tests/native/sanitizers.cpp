// Hooks of the sanitizers: where their reports go, which test they name, and what ThreadSanitizer cannot see.
#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>

#include "native/check.h"

// GCC tells by a macro, Clang by a feature.
#if defined(__SANITIZE_THREAD__)
#define HPCOMM_UNDER_TSAN
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define HPCOMM_UNDER_TSAN
#endif
#endif

#ifdef HPCOMM_UNDER_TSAN
#include <dlfcn.h>
#endif

// The runtimes are shared libraries and look these names up, which hidden symbols do not answer.
#define HPCOMM_TEST_HOOK extern "C" __attribute__((visibility("default")))

extern "C" __attribute__((weak)) void __sanitizer_set_report_fd(void* fd);

namespace {

// Tests capture stderr; a report that a test swallows is an exit status without a reason.
const int report_fd = [] {
  const int fd = ::fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3);
  if (fd < 0) {
    return STDERR_FILENO;
  }
  if (__sanitizer_set_report_fd != nullptr) {
    // A descriptor of its own: UBSan beside AddressSanitizer closes it at its first report, and takes stderr instead.
    const int given = ::fcntl(fd, F_DUPFD_CLOEXEC, 3);
    __sanitizer_set_report_fd(reinterpret_cast<void*>(static_cast<std::intptr_t>(given < 0 ? fd : given)));
  }
  return fd;
}();

}  // namespace

extern "C" __attribute__((weak)) void __ubsan_get_current_report_data(const char** kind, const char** message,
                                                                      const char** file, unsigned* line,
                                                                      unsigned* column, char** address);
HPCOMM_TEST_HOOK void __ubsan_on_report();
void __ubsan_on_report() {
  const char* kind = "";
  const char* message = "";
  const char* file = "";
  unsigned line = 0;
  unsigned column = 0;
  char* address = nullptr;
  __ubsan_get_current_report_data(&kind, &message, &file, &line, &column, &address);
  ::dprintf(report_fd, "UndefinedBehaviorSanitizer: %s:%u:%u: %s (%s), in %s\n", file, line, column, message, kind,
            hpcomm::check::running_test());
}

namespace hpcomm::check {

bool under_ubsan() noexcept { return __ubsan_get_current_report_data != nullptr; }
bool under_sanitizer() noexcept { return __sanitizer_set_report_fd != nullptr; }

}  // namespace hpcomm::check

#ifdef HPCOMM_UNDER_TSAN

// The first report ends the run, so that it is the last thing that stands there.
HPCOMM_TEST_HOOK const char* __tsan_default_options();
const char* __tsan_default_options() { return "halt_on_error=1"; }

// Called from whichever thread was caught, inside the runtime: only what is allowed in a signal handler.
HPCOMM_TEST_HOOK void __tsan_on_report(void* report);
void __tsan_on_report(void*) {
  for (const char* part : {"ThreadSanitizer: the report above is of ", hpcomm::check::running_test(), "\n"}) {
    (void)!::write(report_fd, part, std::strlen(part));
  }
}

// libstdc++ counts who holds an exception, and who shares the text of a runtime_error, in its shared library, which
// ThreadSanitizer does not see: the last holder's free looks like a race with another thread's look before it let go.
// Two things let go of an exception: an exception_ptr, which the stack of the report shows by name, and the end of a
// catch block, which it does not.
HPCOMM_TEST_HOOK const char* __tsan_default_suppressions();
const char* __tsan_default_suppressions() {
  return "race:std::__exception_ptr::exception_ptr::_M_release\n"
         "race:std::runtime_error::~runtime_error\n";
}

// Therefore the end of a catch block is never the last holder here: an exception_ptr is.
HPCOMM_TEST_HOOK void __cxa_end_catch();

namespace {

using EndCatch = void (*)();

EndCatch real_end_catch() {
  static const auto real = reinterpret_cast<EndCatch>(::dlsym(RTLD_NEXT, "__cxa_end_catch"));
  return real;
}

// Before there are threads: the guard of the static would order them.
[[maybe_unused]] const EndCatch found_early = real_end_catch();

}  // namespace

void __cxa_end_catch() {
  const std::exception_ptr held = std::current_exception();
  real_end_catch()();
}

#endif
