/* Notes the calls of a library for which the sandbox has tables: what it opens, asks of devices, and makes. A line for
 * each new one.
 *
 * Built with `cc -shared -fPIC -o calls.so calls.c` and loaded by LD_PRELOAD. Lines go to descriptor 200 from
 * `calls_begin` on: the call, the number of its error or 0, its arguments, and a path, with tabs between them.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

enum { TO = 200, SEEN = 1 << 16 };
static atomic_int is_on;
static atomic_uchar seen[SEEN];

void calls_begin(void) { is_on = 1; }

static void note(const char *call, int failed, const char *format, ...) {
    if (!is_on) return;
    int error = errno;
    char line[4200];
    int length = snprintf(line, sizeof line, "%s\t%d\t", call, failed ? error : 0);
    va_list values;
    va_start(values, format);
    length += vsnprintf(line + length, sizeof line - length, format, values);
    va_end(values);
    if (length > (int)sizeof line - 2) length = sizeof line - 2;
    line[length++] = '\n';
    unsigned hash = 2166136261u;
    for (int i = 0; i < length; i++) hash = (hash ^ (unsigned char)line[i]) * 16777619u;
    if (!atomic_exchange(&seen[hash % SEEN], 1)) {
        ssize_t written = write(TO, line, length);
        (void)written;
    }
    errno = error;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define MODE(last) va_list rest_; va_start(rest_, last); int mode = va_arg(rest_, int); va_end(rest_)

int open(const char *path, int flags, ...) {
    MODE(flags);
    int found = REAL(open)(path, flags, mode);
    note("open", found < 0, "%#x\t%s", flags, path);
    return found;
}

int open64(const char *path, int flags, ...) {
    MODE(flags);
    int found = REAL(open64)(path, flags, mode);
    note("open", found < 0, "%#x\t%s", flags, path);
    return found;
}

int openat(int folder, const char *path, int flags, ...) {
    MODE(flags);
    int found = REAL(openat)(folder, path, flags, mode);
    note("open", found < 0, "%#x\t%s", flags, path);
    return found;
}

int openat64(int folder, const char *path, int flags, ...) {
    MODE(flags);
    int found = REAL(openat64)(folder, path, flags, mode);
    note("open", found < 0, "%#x\t%s", flags, path);
    return found;
}

/* What programs with checks of the compiler call. */
int __open_2(const char *path, int flags) { return open(path, flags, 0); }
int __open64_2(const char *path, int flags) { return open64(path, flags, 0); }

static int flags_of(const char *mode) { return strchr(mode, '+') ? O_RDWR : *mode == 'r' ? O_RDONLY : O_WRONLY; }

FILE *fopen(const char *path, const char *mode) {
    FILE *found = REAL(fopen)(path, mode);
    note("open", !found, "%#x\t%s", flags_of(mode), path);
    return found;
}

FILE *fopen64(const char *path, const char *mode) {
    FILE *found = REAL(fopen64)(path, mode);
    note("open", !found, "%#x\t%s", flags_of(mode), path);
    return found;
}

DIR *opendir(const char *path) {
    DIR *found = REAL(opendir)(path);
    note("open", !found, "%#x\t%s", O_DIRECTORY, path);
    return found;
}

int ioctl(int fd, unsigned long request, ...) {
    va_list rest;
    va_start(rest, request);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    int result = REAL(ioctl)(fd, request, argument);
    if (is_on) {
        int error = errno;
        char link[64], path[256] = "";
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(link, path, sizeof path - 1);
        path[length > 0 ? length : 0] = 0;
        errno = error;
        note("ioctl", result < 0, "%#lx\t%s", request, path);
    }
    return result;
}

int socket(int domain, int type, int protocol) {
    int found = REAL(socket)(domain, type, protocol);
    note("socket", found < 0, "%#x %#x %#x\t", domain, type, protocol);
    return found;
}

int bind(int fd, const struct sockaddr *address, socklen_t size) {
    int result = REAL(bind)(fd, address, size);
    note("bind", result < 0, "\t");
    return result;
}

int connect(int fd, const struct sockaddr *address, socklen_t size) {
    int result = REAL(connect)(fd, address, size);
    note("connect", result < 0, "\t");
    return result;
}

int memfd_create(const char *name, unsigned flags) {
    int found = REAL(memfd_create)(name, flags);
    note("memfd_create", found < 0, "\t");
    return found;
}

void *mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset) {
    void *found = REAL(mmap)(address, size, protection, flags, fd, offset);
    note("mmap", found == MAP_FAILED, "%#x %#x\t", protection, flags);
    return found;
}

void *mmap64(void *address, size_t size, int protection, int flags, int fd, off64_t offset) {
    void *found = REAL(mmap64)(address, size, protection, flags, fd, offset);
    note("mmap", found == MAP_FAILED, "%#x %#x\t", protection, flags);
    return found;
}
