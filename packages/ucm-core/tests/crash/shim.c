/* A library to preload into test processes: it counts the steps that a process passes and strikes at the n-th.
 *
 * A step is a call of ucm_step (native/steps.hpp) or a call of the C library below that concerns a file under a
 * watched path ("call.open", ...). At a step a process can be killed, or (library calls) fail, transfer too
 * little, wait, or be killed halfway. shim.py is its Python side. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { NOTHING, KILL, FAIL, SHORT, DELAY, TORN }; /* shim.py has the same list */
enum { NAME = 64, RULES = 16, STEPS = 256, PATHS = 8, FILES = 4096, PAGE = 4096 };

struct rule {
  char step[NAME]; /* all that begin so, if it ends in '*' */
  long first, last;
  int action, value; /* an errno, or milliseconds */
};
struct counter {
  char step[NAME];
  long count;
};

static struct rule rules[RULES];
static struct counter counters[STEPS];
static char watched[PATHS][PAGE];
static int rule_count, counter_count, watched_count;
static atomic_uchar ours[FILES]; /* descriptors of files under a watched path */
static atomic_flag busy = ATOMIC_FLAG_INIT;

static void lock(void) {
  while (atomic_flag_test_and_set(&busy)) {
  }
}
static void unlock(void) { atomic_flag_clear(&busy); }

/* -- control */

void ucm_shim_watch(const char *path) { snprintf(watched[watched_count++], PAGE, "%s", path); }

void ucm_shim_rule(const char *step, long first, long last, int action, int value) {
  struct rule *rule = &rules[rule_count++];
  snprintf(rule->step, NAME, "%s", step);
  rule->first = first, rule->last = last, rule->action = action, rule->value = value;
}

void ucm_shim_clear(void) { rule_count = counter_count = 0; }

/* Writes "step count" lines; returns how many bytes they need. */
size_t ucm_shim_counts(char *text, size_t size) {
  size_t used = 0;
  for (int i = 0; i < counter_count; ++i)
    used += (size_t)snprintf(text + used, used < size ? size - used : 0, "%s %ld\n", counters[i].step, counters[i].count);
  return used;
}

/* -- steps */

static size_t less(size_t size) { return size >= 2 * PAGE ? size / 2 / PAGE * PAGE : (size + 1) / 2; }

static long count(const char *step) {
  int i = 0;
  while (i < counter_count && strcmp(counters[i].step, step) != 0) ++i;
  if (i == counter_count) {
    if (i == STEPS) return 0;
    snprintf(counters[i].step, NAME, "%s", step);
    counters[counter_count++].count = 0;
  }
  return ++counters[i].count;
}

static int fits(const struct rule *rule, const char *step, long number) {
  const size_t length = strlen(rule->step);
  const int same = length > 0 && rule->step[length - 1] == '*' ? strncmp(rule->step, step, length - 1) == 0
                                                               : strcmp(rule->step, step) == 0;
  return same && number >= rule->first && number <= rule->last;
}

static void die(void) {
  for (;;) syscall(SYS_kill, getpid(), SIGKILL);
}

/* Counts the step and does what the rules say; returns what is left to the caller, with errno set for FAIL. */
static int strike(const char *step) {
  int action = NOTHING, value = 0;
  if (watched_count == 0) return NOTHING;
  lock();
  const long number = count(step);
  for (int i = 0; i < rule_count; ++i)
    if (fits(&rules[i], step, number)) action = rules[i].action, value = rules[i].value;
  unlock();
  if (action == KILL) die();
  if (action == DELAY) nanosleep(&(struct timespec){value / 1000, value % 1000 * 1000000L}, NULL);
  if (action == FAIL) errno = value;
  return action;
}

__attribute__((visibility("default"))) void ucm_step(const char *name) {
  const int error = errno;
  strike(name);
  errno = error;
}

/* An answer of the kernel that does not come through the C library. */
__attribute__((visibility("default"))) int ucm_answer(const char *name, int answer) {
  const int action = strike(name);
  if (action == FAIL) return -errno;
  if (action == SHORT && answer > 1) return (int)less((size_t)answer);
  return answer;
}

/* -- which files are ours */

static int under_watch(const char *path) {
  for (int i = 0; i < watched_count; ++i)
    if (strncmp(path, watched[i], strlen(watched[i])) == 0) return 1;
  return 0;
}
static int is_ours(int fd) { return fd >= 0 && fd < FILES && ours[fd]; }
static int concerns(int directory, const char *path) {
  return path != NULL && (path[0] == '/' ? under_watch(path) : is_ours(directory));
}
static int note(int fd, int mine) {
  if (fd >= 0 && fd < FILES) ours[fd] = (unsigned char)mine;
  return fd;
}
static int is_direct(int fd) { return (syscall(SYS_fcntl, fd, F_GETFL) & O_DIRECT) != 0; }

#define REAL(name) ({ static void *found; if (found == NULL) found = dlsym(RTLD_NEXT, #name); (__typeof__(&name))found; })

/* -- open, close, descriptors */

static int open_at(int directory, const char *path, int flags, mode_t mode) {
  const int mine = concerns(directory, path);
  if (mine && strike(flags & O_DIRECT ? "call.open_direct" : "call.open") == FAIL) {
    if (errno == EINVAL && flags & O_CREAT) { /* a refusal of O_DIRECT comes after the file was made */
      close((int)syscall(SYS_openat, directory, path, flags & ~O_DIRECT, mode));
      errno = EINVAL;
    }
    return -1;
  }
  return note((int)syscall(SYS_openat, directory, path, flags, mode), mine);
}

#define MODE_AFTER(last)                  \
  mode_t mode = 0;                        \
  if (flags & (O_CREAT | __O_TMPFILE)) {  \
    va_list rest;                         \
    va_start(rest, last);                 \
    mode = va_arg(rest, mode_t);          \
    va_end(rest);                         \
  }

#define OPEN(name)                               \
  int name(const char *path, int flags, ...) {   \
    MODE_AFTER(flags)                            \
    return open_at(AT_FDCWD, path, flags, mode); \
  }
#define OPENAT(name)                                            \
  int name(int directory, const char *path, int flags, ...) {   \
    MODE_AFTER(flags)                                           \
    return open_at(directory, path, flags, mode);               \
  }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

int close(int fd) {
  const int failed = is_ours(fd) && strike("call.close") == FAIL, error = errno;
  note(fd, 0);
  const int result = (int)syscall(SYS_close, fd); /* a failed close closes all the same */
  if (failed) errno = error;
  return failed ? -1 : result;
}

static int control(int fd, int command, long argument) {
  if (is_ours(fd) && command == F_OFD_SETLK && strike("call.lock") == FAIL) return -1;
  const int result = (int)syscall(SYS_fcntl, fd, command, argument);
  return command == F_DUPFD || command == F_DUPFD_CLOEXEC ? note(result, is_ours(fd)) : result;
}
#define FCNTL(name)                       \
  int name(int fd, int command, ...) {    \
    va_list rest;                         \
    va_start(rest, command);              \
    const long argument = va_arg(rest, long); \
    va_end(rest);                         \
    return control(fd, command, argument); \
  }
FCNTL(fcntl)
FCNTL(fcntl64)

DIR *opendir(const char *path) {
  if (concerns(AT_FDCWD, path) && strike("call.list") == FAIL) return NULL;
  return REAL(opendir)(path);
}

/* -- transfers */

typedef ssize_t (*moves)(int, const struct iovec *, int, off_t);

static ssize_t move(int fd, const struct iovec *parts, int many, off_t offset, const char *step, moves real_move) {
  const int action = is_ours(fd) ? strike(step) : NOTHING;
  if (action == FAIL) return -1;
  if (action != SHORT && action != TORN) return real_move(fd, parts, many, offset);
  const struct iovec part = {parts->iov_base, many > 1 ? parts->iov_len : less(parts->iov_len)};
  const ssize_t moved = real_move(fd, &part, 1, offset);
  if (action == TORN) die();
  return moved;
}

static ssize_t read_parts(int fd, const struct iovec *parts, int many, off_t offset) {
  return offset < 0 ? syscall(SYS_readv, fd, parts, many) : syscall(SYS_preadv, fd, parts, many, offset, 0);
}
static ssize_t write_parts(int fd, const struct iovec *parts, int many, off_t offset) {
  return offset < 0 ? syscall(SYS_writev, fd, parts, many) : syscall(SYS_pwritev, fd, parts, many, offset, 0);
}
static ssize_t read_some(int fd, const struct iovec *parts, int many, off_t offset) {
  const char *step = is_ours(fd) && is_direct(fd) ? "call.read_direct" : "call.read";
  return move(fd, parts, many, offset, step, read_parts);
}
static ssize_t write_some(int fd, const struct iovec *parts, int many, off_t offset) {
  const char *step = is_ours(fd) && is_direct(fd) ? "call.write_direct" : "call.write";
  return move(fd, parts, many, offset, step, write_parts);
}

#define ONE(data, size) &(struct iovec){(void *)(data), size}, 1
ssize_t read(int fd, void *data, size_t size) { return read_some(fd, ONE(data, size), -1); }
ssize_t pread(int fd, void *data, size_t size, off_t at) { return read_some(fd, ONE(data, size), at); }
ssize_t pread64(int fd, void *data, size_t size, off64_t at) { return read_some(fd, ONE(data, size), at); }
ssize_t preadv(int fd, const struct iovec *parts, int many, off_t at) { return read_some(fd, parts, many, at); }
ssize_t preadv64(int fd, const struct iovec *parts, int many, off64_t at) { return read_some(fd, parts, many, at); }
ssize_t write(int fd, const void *data, size_t size) { return write_some(fd, ONE(data, size), -1); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return write_some(fd, ONE(data, size), at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { return write_some(fd, ONE(data, size), at); }
ssize_t pwritev(int fd, const struct iovec *parts, int many, off_t at) { return write_some(fd, parts, many, at); }
ssize_t pwritev64(int fd, const struct iovec *parts, int many, off64_t at) { return write_some(fd, parts, many, at); }

/* -- the rest: fail before they do anything, or do it */

#define ON_FILE(name, step, arguments, ...)                      \
  int name arguments {                                           \
    if (is_ours(fd) && strike(step) == FAIL) return -1;          \
    return REAL(name)(__VA_ARGS__);                              \
  }
#define ON_PATH(name, step, directory, path, arguments, ...)            \
  int name arguments {                                                  \
    if (concerns(directory, path) && strike(step) == FAIL) return -1;   \
    return REAL(name)(__VA_ARGS__);                                     \
  }
/* Answers with the error instead of errno. */
#define ALLOCATE(name, number)                                           \
  int name(int fd, number begin, number size) {                          \
    if (is_ours(fd) && strike("call.allocate") == FAIL) return errno;    \
    return REAL(name)(fd, begin, size);                                  \
  }

ON_FILE(fsync, "call.fsync", (int fd), fd)
ON_FILE(fdatasync, "call.fsync", (int fd), fd)
ON_FILE(ftruncate, "call.truncate", (int fd, off_t size), fd, size)
ON_FILE(ftruncate64, "call.truncate", (int fd, off64_t size), fd, size)
ON_FILE(fallocate, "call.allocate", (int fd, int mode, off_t begin, off_t size), fd, mode, begin, size)
ON_FILE(fallocate64, "call.allocate", (int fd, int mode, off64_t begin, off64_t size), fd, mode, begin, size)
ALLOCATE(posix_fallocate, off_t)
ALLOCATE(posix_fallocate64, off64_t)
ON_FILE(fstat, "call.stat", (int fd, struct stat *into), fd, into)
ON_FILE(fstat64, "call.stat", (int fd, struct stat64 *into), fd, into)
ON_FILE(futimens, "call.utime", (int fd, const struct timespec times[2]), fd, times)
ON_PATH(rename, "call.rename", AT_FDCWD, old, (const char *old, const char *new), old, new)
ON_PATH(renameat, "call.rename", from, old, (int from, const char *old, int to, const char *new), from, old, to, new)
ON_PATH(unlink, "call.unlink", AT_FDCWD, path, (const char *path), path)
ON_PATH(unlinkat, "call.unlink", at, path, (int at, const char *path, int flags), at, path, flags)
ON_PATH(rmdir, "call.unlink", AT_FDCWD, path, (const char *path), path)
ON_PATH(mkdir, "call.mkdir", AT_FDCWD, path, (const char *path, mode_t mode), path, mode)
ON_PATH(mkdirat, "call.mkdir", at, path, (int at, const char *path, mode_t mode), at, path, mode)
ON_PATH(utimensat, "call.utime", at, path, (int at, const char *path, const struct timespec times[2], int flags), at, path,
        times, flags)
ON_PATH(stat64, "call.stat", AT_FDCWD, path, (const char *path, struct stat64 *into), path, into)
ON_PATH(lstat64, "call.stat", AT_FDCWD, path, (const char *path, struct stat64 *into), path, into)
ON_PATH(fstatat, "call.stat", at, path, (int at, const char *path, struct stat *into, int flags), at, path, into, flags)
ON_PATH(fstatat64, "call.stat", at, path, (int at, const char *path, struct stat64 *into, int flags), at, path, into,
        flags)
