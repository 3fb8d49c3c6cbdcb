/* Preloaded: in the rank that SLOW_RANK names a connection is accepted SLOW_MS milliseconds late, so that the other end
 * has long been done with it. Built by tests/test_slow_peers.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

static void nap(void) {
  const char* rank = getenv("RANK");
  const char* slow = getenv("SLOW_RANK");
  const char* ms = getenv("SLOW_MS");
  if (rank == NULL || slow == NULL || ms == NULL || strcmp(rank, slow) != 0) {
    return;
  }
  struct timespec time = {atoi(ms) / 1000, atoi(ms) % 1000 * 1000000L};
  nanosleep(&time, NULL);
}

int accept(int fd, struct sockaddr* address, socklen_t* length) {
  int (*next)(int, struct sockaddr*, socklen_t*) = dlsym(RTLD_NEXT, "accept");
  int connection = next(fd, address, length);
  if (connection >= 0) {
    nap();
  }
  return connection;
}

int accept4(int fd, struct sockaddr* address, socklen_t* length, int flags) {
  int (*next)(int, struct sockaddr*, socklen_t*, int) = dlsym(RTLD_NEXT, "accept4");
  int connection = next(fd, address, length, flags);
  if (connection >= 0) {
    nap();
  }
  return connection;
}
