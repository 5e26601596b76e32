/* A driver of CUDA for machines that have no GPU: the functions that moonpool uses, over memfds.
 *
 * Device memory is ordinary memory that the processor may look at, so a test can read it and a model of a test can
 * compute in it. What the real driver refuses is refused here, by the same numbers: a missing context, sizes and
 * descriptors that are no device memory, handles opened by their own process or by one that may not look into the
 * exporter. As the real one it begins with a thread that gets a name, a descriptor that stays open, a hundred GiB of
 * addresses and a socket with an abstract name; where one is refused, so is its start.
 *
 * Work is queued on streams. By default it is done in the call. With FAKE_CUDA_DELAY_US every piece of work starts so
 * much later, on a thread for each stream, so that whoever forgets to wait sees bytes that are not there yet, or
 * overwrites some that are still to be read. Events of other processes are counters in a page that both have mapped. A
 * kernel is always late: it takes its time after the call. No PTX is run; two names of kernels are known, `spin` and
 * `poke`, and what those of tests/card/cuda.py do is done here.
 *
 * FAKE_CUDA_DEVICES         how many devices there are (1)
 * FAKE_CUDA_NAME            what they are called; with another name than "Fake GPU", tests take them for a card's
 * FAKE_CUDA_MEMORY_BYTES    what each has, for each process (1 GiB)
 * FAKE_CUDA_DELAY_US        see above (0)
 * FAKE_CUDA_BY_CHANCE       only every other piece of work is late, by chance: where all is late alike, much is in
 *                           order that nobody ordered
 * FAKE_CUDA_VERSION         the version of CUDA that it reports (12020)
 * FAKE_CUDA_NO_DESCRIPTORS  memory cannot be exported as a descriptor
 * FAKE_CUDA_NO_EXPORT       the same, although the attributes of the device say that it can be
 * FAKE_CUDA_NO_HANDLES      memory cannot be shared by handle
 * FAKE_CUDA_NO_EVENTS       events cannot be shared between processes
 * CUDA_VISIBLE_DEVICES      as for the real one, with numbers alone
 *
 * Built with: cc -shared -fPIC -O1 -pthread -o libcuda.so.1 fake_driver.c
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef uint64_t Allocation;

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_IMAGE = 200, INVALID_CONTEXT = 201, MAP_FAILED_HERE = 205, OPERATING_SYSTEM = 304, INVALID_HANDLE = 400,
    NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700,
    ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, NOT_SUPPORTED = 801,
};
static const struct { int number; const char *name, *text; } ERRORS[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {MAP_FAILED_HERE, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
    {OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        "part or all of the requested memory range is already mapped"},
    {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        "pointer does not correspond to a registered memory region"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};

#define MAX_DEVICES 16
#define GRANULARITY ((size_t)2 << 20)
#define PAGE ((size_t)4096)
#define LEGACY 1
#define PER_THREAD 2
#define MAGIC 0x6d6f6f6e66616b65ull

/* ---- things ---- */

typedef struct Context { int ordinal, is_active; } Context;

/* What both processes of an event see of it: how often it was recorded, and which of those are done. Each is a thing of
 * its own, since an event may be recorded on a quick stream while an earlier record on a slow one is still waited for.
 * */
#define RECORDS 256
typedef struct { _Atomic uint64_t magic, recorded, done[RECORDS]; } Page;

typedef struct Event {
    struct Event *next;
    Context *context; /* of whoever made it, NULL for one that was opened */
    unsigned flags;
    int fd;           /* of the page where it is interprocess */
    Page *page;
    int holds;        /* work in flight that refers to it */
    int is_destroyed;
} Event;

typedef struct Work {
    struct Work *next;
    enum { COPY, SET, RECORD, WAIT, CALL, SPIN, POKE, WRITE_WORD, WAIT_WORD } kind;
    void *target;
    const void *source;
    void *staged;     /* bytes of memory that is not pinned, taken at once */
    size_t size;
    int value;
    Event *event;
    uint64_t count;
    void (*call)(void *);
    struct timespec start;
} Work;

typedef struct Stream {
    struct Stream *next;
    Context *context;
    unsigned flags;
    Work *first, **last;
    uint64_t queued, done;
    int is_running, is_destroyed;
    pthread_cond_t changed;
} Stream;

typedef struct Range {
    struct Range *next;
    enum { RESERVED, ALLOCATED, OPENED, REGISTERED } kind;
    char *base;
    size_t size;
    int ordinal, fd, holds;
    int is_mapped, access; /* CU_MEM_ACCESS_FLAGS: 1 to read, 2 more to write */
    uint64_t token, object;
} Range;

typedef struct Object {
    struct Object *next;
    Allocation handle;
    size_t size;
    int ordinal, fd, is_imported, is_released, mappings;
} Object;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_condattr_t monotonic;
static int is_initialized, device_count_here, physical[MAX_DEVICES];
static pid_t initialized_in;
static long delay_us;
static int by_chance;
static int fault;
static size_t memory_bytes, used_bytes[MAX_DEVICES];
static Context contexts[MAX_DEVICES];
static Stream legacy[MAX_DEVICES];
static Stream *streams;
static Event *events;
static Range *ranges;
static Object *objects;
static Allocation next_handle = 100;
static uint64_t next_token = 1;
static __thread Context *stack[64];
static __thread int depth;

/* ---- what tests ask ---- */

#define MAX_NAMES 128
static struct { const char *name; long count; } calls[MAX_NAMES];

static int names;

#define ENTER() \
    static int slot_ = -1; \
    do { \
        pthread_mutex_lock(&lock); \
        if (slot_ < 0) calls[slot_ = names++].name = __func__; \
        calls[slot_].count++; \
    } while (0)
#define LEAVE(result) do { CUresult r_ = (result); pthread_mutex_unlock(&lock); return r_; } while (0)
/* A fork of a process that has used the driver cannot use it. */
#define NEEDS_INIT() do { if (!is_initialized || initialized_in != getpid()) LEAVE(NOT_INITIALIZED); } while (0)
#define NEEDS_CONTEXT() do { NEEDS_INIT(); if (depth == 0) LEAVE(INVALID_CONTEXT); if (fault) LEAVE(fault); } while (0)

/* How often a function was called in this process. */
long fakeCalls(const char *name) {
    long found = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < names; i++)
        if (!strcmp(calls[i].name, name)) found = calls[i].count;
    pthread_mutex_unlock(&lock);
    return found;
}

/* How many streams, events, memory objects and address ranges there are in this process. */
void fakeLive(long found[4]) {
    memset(found, 0, 4 * sizeof *found);
    pthread_mutex_lock(&lock);
    for (Stream *each = streams; each; each = each->next) found[0] += !each->is_destroyed;
    for (Event *each = events; each; each = each->next) found[1] += !each->is_destroyed;
    for (Object *each = objects; each; each = each->next) found[2] += !each->is_released;
    for (Range *each = ranges; each; each = each->next) found[3]++;
    pthread_mutex_unlock(&lock);
}

/* From now on, work starts so many microseconds after it was queued; all of it, or every other piece. */
void fakeDelay(long microseconds, int is_by_chance) {
    pthread_mutex_lock(&lock);
    delay_us = microseconds;
    by_chance = is_by_chance;
    pthread_mutex_unlock(&lock);
}

/* What a kernel that touches what is not there does to its process: from now on all that needs a context fails; 0
 * undoes it. */
void fakeFault(int number) {
    pthread_mutex_lock(&lock);
    fault = number;
    pthread_mutex_unlock(&lock);
}

/* ---- helpers, all under the lock ---- */

static Context *current(void) { return depth ? stack[depth - 1] : NULL; }

static Range *range_at(const void *address) {
    for (Range *each = ranges; each; each = each->next)
        if ((const char *)address >= each->base && (const char *)address < each->base + each->size) return each;
    return NULL;
}

static Range *range_from(const void *address, int kind) {
    Range *found = range_at(address);
    return found && found->base == address && (int)found->kind == kind ? found : NULL;
}

static int lies_within(const void *address, size_t size, int is_device, int is_written) {
    Range *found = range_at(address);
    if (!found || size > (size_t)(found->base + found->size - (const char *)address)) return 0;
    if (found->kind == REGISTERED) return !is_device;
    return is_device && (found->kind != RESERVED || (found->is_mapped && (found->access & (is_written ? 2 : 1))));
}

static Range *add_range(int kind, void *base, size_t size, int ordinal, int fd) {
    Range *range = calloc(1, sizeof *range);
    *range = (Range){
        .next = ranges, .kind = kind, .base = base, .size = size, .ordinal = ordinal, .fd = fd, .holds = 1};
    return ranges = range;
}

static void remove_range(Range *range) {
    for (Range **at = &ranges; *at; at = &(*at)->next)
        if (*at == range) { *at = range->next; free(range); return; }
}

static Object *object_of(Allocation handle) {
    for (Object *each = objects; each; each = each->next)
        if (each->handle == handle) return each;
    return NULL;
}

static void drop_object(Object *object) {
    if (!object->is_released || object->mappings) return;
    if (!object->is_imported) used_bytes[object->ordinal] -= object->size;
    close(object->fd);
    for (Object **at = &objects; *at; at = &(*at)->next)
        if (*at == object) { *at = object->next; free(object); return; }
}

static int is_event(Event *event) {
    for (Event *each = events; each; each = each->next)
        if (each == event) return !each->is_destroyed;
    return 0;
}

static void drop_event(Event *event) {
    if (!event->is_destroyed || event->holds) return;
    munmap(event->page, PAGE);
    if (event->fd >= 0) close(event->fd);
    for (Event **at = &events; *at; at = &(*at)->next)
        if (*at == event) { *at = event->next; free(event); return; }
}

static Stream *stream_of(Stream *handle) {
    if ((uintptr_t)handle <= PER_THREAD) return current() ? &legacy[current()->ordinal] : NULL;
    for (Stream *each = streams; each; each = each->next)
        if (each == handle) return each->is_destroyed ? NULL : each;
    return NULL;
}

static struct timespec in_us(long microseconds) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    now.tv_nsec += microseconds * 1000;
    now.tv_sec += now.tv_nsec / 1000000000;
    now.tv_nsec %= 1000000000;
    return now;
}

/* ---- work ---- */

static int is_done(Event *event, uint64_t count) { return atomic_load(&event->page->done[count % RECORDS]) >= count; }

/* CUstreamWaitValue_flags: greater or equal, equal, and, nor. */
static int is_there(const Work *work) {
    uint32_t found = atomic_load((_Atomic uint32_t *)work->target), wanted = (uint32_t)work->value;
    switch (work->count) {
        case 0: return (int32_t)(found - wanted) >= 0;
        case 1: return found == wanted;
        case 2: return (found & wanted) != 0;
        default: return ~(found | wanted) != 0;
    }
}

static int is_due(const Work *work) {
    if (work->kind == WAIT_WORD) return is_there(work);
    return work->kind != WAIT || is_done(work->event, work->count);
}

/* Without the lock: the bytes are nobody's of ours. */
static void perform(Work *work) {
    if (work->kind == SPIN) {
        struct timespec left = {.tv_sec = work->count / 1000000000, .tv_nsec = work->count % 1000000000};
        while (nanosleep(&left, &left) && errno == EINTR);
    }
    if (work->kind == WRITE_WORD) atomic_store((_Atomic uint32_t *)work->target, (uint32_t)work->value);
    if (work->kind == COPY) memmove(work->target, work->staged ? work->staged : work->source, work->size);
    if (work->kind == SET) memset(work->target, work->value, work->size);
    if (work->kind == CALL) work->call(work->target);
}

static void finish(Stream *stream, Work *work) {
    if (work->kind == POKE) {
        /* A kernel that writes where nothing is breaks the context. */
        if (lies_within(work->target, 4, 1, 1)) memset(work->target, 1, 1);
        else fault = ILLEGAL_ADDRESS;
    }
    if (work->kind == RECORD) atomic_store(&work->event->page->done[work->count % RECORDS], work->count);
    if (work->event) { work->event->holds--; drop_event(work->event); }
    free(work->staged);
    free(work);
    stream->done++;
    pthread_cond_broadcast(&stream->changed);
}

static void forget_stream(Stream *stream) {
    for (Stream **at = &streams; *at; at = &(*at)->next)
        if (*at == stream) { *at = stream->next; pthread_cond_destroy(&stream->changed); free(stream); return; }
}

static void *run(void *argument) {
    Stream *stream = argument;
    pthread_mutex_lock(&lock);
    while (stream->first) {
        Work *work = stream->first;
        pthread_mutex_unlock(&lock);
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &work->start, NULL);
        /* What is waited for may never come: its process may be gone. */
        for (int pause_us = 50; !is_due(work); pause_us += pause_us < 5000 ? 10 : 0) usleep(pause_us);
        perform(work);
        pthread_mutex_lock(&lock);
        stream->first = work->next;
        if (!stream->first) stream->last = &stream->first;
        finish(stream, work);
    }
    stream->is_running = 0;
    if (stream->is_destroyed) forget_stream(stream);
    pthread_mutex_unlock(&lock);
    return NULL;
}

/* Takes the work over. The legacy stream waits for the blocking ones, and they for it, as with the real driver. */
static void enqueue(Stream *stream, Work *work);

static void wait_for(Stream *stream, Stream *other) {
    if (!other->first) return;
    Event *event = calloc(1, sizeof *event);
    *event = (Event){.next = events, .fd = -1, .is_destroyed = 1, .holds = 2,
                     .page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)};
    events = event;
    Work *record = calloc(1, sizeof *record), *wait = calloc(1, sizeof *wait);
    *record = (Work){.kind = RECORD, .event = event, .count = 1};
    *wait = (Work){.kind = WAIT, .event = event, .count = 1};
    record->next = NULL;
    record->start = in_us(0);
    *other->last = record;
    other->last = &record->next;
    other->queued++;
    wait->start = in_us(0);
    *stream->last = wait;
    stream->last = &wait->next;
    stream->queued++;
}

static long next_delay(void) {
    static unsigned state;
    if (!by_chance) return delay_us;
    if (!state) state = getpid() * 2654435761u | 1;
    state = state * 1664525u + 1013904223u;
    return state >> 31 ? delay_us : 0;
}

static void enqueue(Stream *stream, Work *work) {
    int is_legacy = stream == &legacy[stream->context->ordinal];
    for (Stream *each = streams; is_legacy && each; each = each->next)
        if (each->context == stream->context && !(each->flags & 1)) wait_for(stream, each);
    if (!is_legacy && !(stream->flags & 1)) wait_for(stream, &legacy[stream->context->ordinal]);
    if (work->event) work->event->holds++;
    long delay = work->kind == WAIT || work->kind == WAIT_WORD ? 0 : next_delay();
    int is_kernel = work->kind == SPIN || work->kind == POKE;
    if (delay == 0 && !stream->first && is_due(work) && !is_kernel) {
        stream->queued++;
        pthread_mutex_unlock(&lock);
        perform(work);
        pthread_mutex_lock(&lock);
        finish(stream, work);
        return;
    }
    work->start = in_us(delay);
    work->next = NULL;
    *stream->last = work;
    stream->last = &work->next;
    stream->queued++;
    if (!stream->is_running) {
        pthread_t thread;
        stream->is_running = 1;
        pthread_create(&thread, NULL, run, stream);
        pthread_detach(thread);
    }
}

static void drain(Stream *stream) {
    uint64_t target = stream->queued;
    while (stream->done < target) pthread_cond_wait(&stream->changed, &lock);
}

static void start_stream(Stream *stream, Context *context, unsigned flags) {
    stream->context = context;
    stream->flags = flags;
    stream->last = &stream->first;
    pthread_cond_init(&stream->changed, &monotonic);
}

/* ---- library and devices ---- */

CUresult cuGetErrorName(int number, const char **found) {
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (ERRORS[i].number == number) { *found = ERRORS[i].name; return SUCCESS; }
    *found = NULL;
    return INVALID_VALUE;
}

CUresult cuGetErrorString(int number, const char **found) {
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (ERRORS[i].number == number) { *found = ERRORS[i].text; return SUCCESS; }
    *found = NULL;
    return INVALID_VALUE;
}

static long setting(const char *name, long usual) {
    const char *text = getenv(name);
    return text && *text ? atol(text) : usual;
}

static void *idle(void *descriptor) {
    struct pollfd waited = {.fd = *(int *)descriptor};
    for (;;) poll(&waited, 1, -1);
    return NULL;
}

/* What libcuda does when it begins, as far as a sandbox or a limit could refuse it. */
static int begin(void) {
    static int lasting;
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    struct stat space = {0};
    stat("/proc/self/ns/pid", &space); /* two processes may have one number in two namespaces */
    snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "fake-cuda-uvmfd-%lu-%d", (unsigned long)space.st_ino,
        getpid());
    int end = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    int is_listening = end >= 0 && !bind(end, (struct sockaddr *)&name, sizeof name) && !listen(end, 16);
    if (end >= 0) close(end); /* the real one keeps it */
    pthread_t thread;
    if (!is_listening || (lasting = memfd_create("fake-cuda-lasting", MFD_CLOEXEC)) < 0) return 0;
    if (pthread_create(&thread, NULL, idle, &lasting) || pthread_setname_np(thread, "cuda-EvtHandlr")) return 0;
    return mmap(NULL, (size_t)100 << 30, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) != MAP_FAILED;
}

CUresult cuInit(unsigned flags) {
    ENTER();
    if (flags) LEAVE(INVALID_VALUE);
    if (is_initialized && initialized_in != getpid()) LEAVE(NOT_INITIALIZED);
    if (is_initialized) LEAVE(device_count_here ? SUCCESS : NO_DEVICE);
    int there = setting("FAKE_CUDA_DEVICES", 1);
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (there > MAX_DEVICES) there = MAX_DEVICES;
    if (visible == NULL) {
        for (; device_count_here < there; device_count_here++) physical[device_count_here] = device_count_here;
    } else {
        char *end;
        for (long each = strtol(visible, &end, 10); end != visible && each >= 0 && each < there;
             each = strtol(visible, &end, 10)) {
            physical[device_count_here++] = each;
            visible = *end == ',' ? end + 1 : end;
        }
    }
    delay_us = setting("FAKE_CUDA_DELAY_US", delay_us);
    by_chance = setting("FAKE_CUDA_BY_CHANCE", by_chance);
    memory_bytes = setting("FAKE_CUDA_MEMORY_BYTES", 1l << 30);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    for (int i = 0; i < device_count_here; i++) {
        contexts[i].ordinal = i;
        start_stream(&legacy[i], &contexts[i], 0);
    }
    is_initialized = 1;
    initialized_in = getpid();
    if (device_count_here && !begin()) { is_initialized = device_count_here = 0; LEAVE(OPERATING_SYSTEM); }
    LEAVE(device_count_here ? SUCCESS : NO_DEVICE);
}

CUresult cuDriverGetVersion(int *found) { *found = setting("FAKE_CUDA_VERSION", 12020); return SUCCESS; }

static int has_no_descriptors(void) { return getenv("FAKE_CUDA_NO_DESCRIPTORS") || getenv("FAKE_CUDA_NO_EXPORT"); }

CUresult cuDeviceGetCount(int *found) {
    ENTER(); NEEDS_INIT();
    *found = device_count_here;
    LEAVE(SUCCESS);
}

CUresult cuDeviceGet(CUdevice *found, int ordinal) {
    ENTER(); NEEDS_INIT();
    if (ordinal < 0 || ordinal >= device_count_here) LEAVE(INVALID_DEVICE);
    *found = ordinal;
    LEAVE(SUCCESS);
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    ENTER(); NEEDS_INIT();
    if (device < 0 || device >= device_count_here) LEAVE(INVALID_DEVICE);
    const char *called = getenv("FAKE_CUDA_NAME");
    snprintf(name, length, "%s %d", called ? called : "Fake GPU", physical[device]);
    LEAVE(SUCCESS);
}

CUresult cuDeviceGetAttribute(int *found, int attribute, CUdevice device) {
    ENTER(); NEEDS_INIT();
    if (device < 0 || device >= device_count_here) LEAVE(INVALID_DEVICE);
    *found = attribute == 41 || attribute == 99 || attribute == 102 || attribute == 113;
    if (attribute == 103) *found = !getenv("FAKE_CUDA_NO_DESCRIPTORS");
    if (attribute == 125) *found = !getenv("FAKE_CUDA_NO_EVENTS");
    LEAVE(SUCCESS);
}

CUresult cuDeviceGetPCIBusId(char *name, int length, CUdevice device) {
    ENTER(); NEEDS_INIT();
    if (device < 0 || device >= device_count_here) LEAVE(INVALID_DEVICE);
    snprintf(name, length, "0000:%02X:00.0", 16 + physical[device]);
    LEAVE(SUCCESS);
}

CUresult cuDeviceGetUuid_v2(unsigned char *found, CUdevice device) {
    ENTER(); NEEDS_INIT();
    if (device < 0 || device >= device_count_here) LEAVE(INVALID_DEVICE);
    memset(found, 0, 16);
    found[15] = physical[device];
    LEAVE(SUCCESS);
}

CUresult cuDeviceTotalMem_v2(size_t *found, CUdevice device) {
    ENTER(); NEEDS_INIT();
    if (device < 0 || device >= device_count_here) LEAVE(INVALID_DEVICE);
    *found = memory_bytes;
    LEAVE(SUCCESS);
}

CUresult cuDevicePrimaryCtxRetain(Context **found, CUdevice device) {
    ENTER(); NEEDS_INIT();
    if (device < 0 || device >= device_count_here) LEAVE(INVALID_DEVICE);
    contexts[device].is_active = 1;
    *found = &contexts[device];
    LEAVE(SUCCESS);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
    ENTER(); NEEDS_INIT();
    if (device < 0 || device >= device_count_here) LEAVE(INVALID_DEVICE);
    *flags = 0;
    *is_active = contexts[device].is_active;
    LEAVE(SUCCESS);
}

CUresult cuCtxPushCurrent_v2(Context *context) {
    ENTER(); NEEDS_INIT();
    if (context < contexts || context >= contexts + device_count_here || depth == 64) LEAVE(INVALID_CONTEXT);
    stack[depth++] = context;
    LEAVE(SUCCESS);
}

CUresult cuCtxPopCurrent_v2(Context **found) {
    ENTER(); NEEDS_INIT();
    if (depth == 0) LEAVE(INVALID_CONTEXT);
    *found = stack[--depth];
    LEAVE(SUCCESS);
}

CUresult cuCtxGetCurrent(Context **found) {
    ENTER(); NEEDS_INIT();
    *found = current();
    LEAVE(SUCCESS);
}

CUresult cuCtxSynchronize(void) {
    ENTER(); NEEDS_CONTEXT();
    for (Stream *each = streams; each; each = each->next)
        if (each->context == current()) drain(each);
    drain(&legacy[current()->ordinal]);
    LEAVE(SUCCESS);
}

/* ---- streams ---- */

CUresult cuStreamCreate(Stream **found, unsigned flags) {
    ENTER(); NEEDS_CONTEXT();
    if (flags > 1) LEAVE(INVALID_VALUE);
    Stream *stream = calloc(1, sizeof *stream);
    start_stream(stream, current(), flags);
    stream->next = streams;
    *found = streams = stream;
    LEAVE(SUCCESS);
}

CUresult cuStreamDestroy_v2(Stream *handle) {
    ENTER(); NEEDS_CONTEXT();
    Stream *stream = stream_of(handle);
    if (!stream || (uintptr_t)handle <= PER_THREAD) LEAVE(INVALID_HANDLE);
    stream->is_destroyed = 1;
    if (!stream->is_running) forget_stream(stream);
    LEAVE(SUCCESS);
}

CUresult cuStreamWaitEvent(Stream *handle, Event *event, unsigned flags) {
    ENTER(); NEEDS_CONTEXT();
    Stream *stream = stream_of(handle);
    if (!stream || !is_event(event)) LEAVE(INVALID_HANDLE);
    if (flags) LEAVE(INVALID_VALUE);
    Work *work = calloc(1, sizeof *work);
    *work = (Work){.kind = WAIT, .event = event, .count = atomic_load(&event->page->recorded)};
    enqueue(stream, work);
    LEAVE(SUCCESS);
}

CUresult cuStreamQuery(Stream *handle) {
    ENTER(); NEEDS_CONTEXT();
    Stream *stream = stream_of(handle);
    if (!stream) LEAVE(INVALID_HANDLE);
    LEAVE(stream->done < stream->queued ? NOT_READY : SUCCESS);
}

CUresult cuStreamSynchronize(Stream *handle) {
    ENTER(); NEEDS_CONTEXT();
    Stream *stream = stream_of(handle);
    if (!stream) LEAVE(INVALID_HANDLE);
    drain(stream);
    LEAVE(fault);
}

/* A function of the processor's in a stream: what stands for a kernel here. */
CUresult cuLaunchHostFunc(Stream *handle, void (*call)(void *), void *argument) {
    ENTER(); NEEDS_CONTEXT();
    Stream *stream = stream_of(handle);
    if (!stream || !call) LEAVE(stream ? INVALID_VALUE : INVALID_HANDLE);
    Work *work = calloc(1, sizeof *work);
    *work = (Work){.kind = CALL, .call = call, .target = argument};
    enqueue(stream, work);
    LEAVE(SUCCESS);
}

static CUresult queue_word(Stream *handle, CUdeviceptr address, uint32_t value, unsigned flags, int kind) {
    Stream *stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    if (address % 4 || flags > (kind == WAIT_WORD ? 3u : 1u)
        || !lies_within((void *)address, 4, 1, kind == WRITE_WORD))
        return INVALID_VALUE;
    Work *work = calloc(1, sizeof *work);
    *work = (Work){.kind = kind, .target = (void *)address, .value = (int)value, .count = flags};
    enqueue(stream, work);
    return SUCCESS;
}

CUresult cuStreamWriteValue32_v2(Stream *stream, CUdeviceptr address, uint32_t value, unsigned flags) {
    ENTER(); NEEDS_CONTEXT();
    LEAVE(queue_word(stream, address, value, flags, WRITE_WORD));
}

CUresult cuStreamWaitValue32_v2(Stream *stream, CUdeviceptr address, uint32_t value, unsigned flags) {
    ENTER(); NEEDS_CONTEXT();
    LEAVE(queue_word(stream, address, value, flags, WAIT_WORD));
}

/* ---- kernels ---- */

static const struct { const char *entry; int kind; } KERNELS[] = {{".entry spin(", SPIN}, {".entry poke(", POKE}};

CUresult cuModuleLoadData(char **found, const char *image) {
    ENTER(); NEEDS_CONTEXT();
    if (!strstr(image, ".version")) LEAVE(INVALID_IMAGE);
    *found = strdup(image);
    LEAVE(SUCCESS);
}

CUresult cuModuleGetFunction(const int **found, const char *module, const char *name) {
    ENTER(); NEEDS_CONTEXT();
    for (size_t i = 0; i < sizeof KERNELS / sizeof *KERNELS; i++)
        if (!strncmp(KERNELS[i].entry + 7, name, strlen(name)) && KERNELS[i].entry[7 + strlen(name)] == '('
            && strstr(module, KERNELS[i].entry)) {
            *found = &KERNELS[i].kind;
            LEAVE(SUCCESS);
        }
    LEAVE(NOT_FOUND);
}

CUresult cuLaunchKernel(const int *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream *handle,
                        void **arguments, void **extra) {
    ENTER(); NEEDS_CONTEXT();
    (void)shared_bytes;
    Stream *stream = stream_of(handle);
    if (!stream) LEAVE(INVALID_HANDLE);
    if (!grid_x || !grid_y || !grid_z || !block_x || !block_y || !block_z || !arguments || extra) LEAVE(INVALID_VALUE);
    uint64_t argument;
    memcpy(&argument, arguments[0], sizeof argument);
    Work *work = calloc(1, sizeof *work);
    *work = (Work){.kind = *function, .target = (void *)argument, .count = argument};
    enqueue(stream, work);
    LEAVE(SUCCESS);
}

/* ---- events ---- */

CUresult cuEventCreate(Event **found, unsigned flags) {
    ENTER(); NEEDS_CONTEXT();
    if (flags > 7 || ((flags & 4) && !(flags & 2))) LEAVE(INVALID_VALUE);
    int fd = -1;
    if (flags & 4) {
        if (getenv("FAKE_CUDA_NO_EVENTS")) LEAVE(NOT_SUPPORTED);
        fd = memfd_create("fake-cuda-event", MFD_CLOEXEC);
        if (fd < 0 || ftruncate(fd, PAGE)) { if (fd >= 0) close(fd); LEAVE(OUT_OF_MEMORY); }
    }
    Page *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, fd, 0);
    if (page == MAP_FAILED) { if (fd >= 0) close(fd); LEAVE(OUT_OF_MEMORY); }
    atomic_store(&page->magic, MAGIC);
    Event *event = calloc(1, sizeof *event);
    *event = (Event){.next = events, .context = current(), .flags = flags, .fd = fd, .page = page};
    *found = events = event;
    LEAVE(SUCCESS);
}

CUresult cuEventDestroy_v2(Event *event) {
    ENTER(); NEEDS_CONTEXT();
    if (!is_event(event)) LEAVE(INVALID_HANDLE);
    event->is_destroyed = 1;
    drop_event(event);
    LEAVE(SUCCESS);
}

CUresult cuEventRecord(Event *event, Stream *handle) {
    ENTER(); NEEDS_CONTEXT();
    Stream *stream = stream_of(handle);
    if (!stream || !is_event(event)) LEAVE(INVALID_HANDLE);
    if (event->context && event->context != stream->context) LEAVE(INVALID_HANDLE);
    Work *work = calloc(1, sizeof *work);
    *work = (Work){.kind = RECORD, .event = event, .count = atomic_fetch_add(&event->page->recorded, 1) + 1};
    enqueue(stream, work);
    LEAVE(SUCCESS);
}

CUresult cuEventQuery(Event *event) {
    ENTER(); NEEDS_CONTEXT();
    if (!is_event(event)) LEAVE(INVALID_HANDLE);
    LEAVE(is_done(event, atomic_load(&event->page->recorded)) ? SUCCESS : NOT_READY);
}

CUresult cuEventSynchronize(Event *event) {
    ENTER(); NEEDS_CONTEXT();
    if (!is_event(event)) LEAVE(INVALID_HANDLE);
    uint64_t target = atomic_load(&event->page->recorded);
    event->holds++;
    pthread_mutex_unlock(&lock);
    while (!is_done(event, target)) usleep(50);
    pthread_mutex_lock(&lock);
    event->holds--;
    drop_event(event);
    LEAVE(SUCCESS);
}

/* ---- handles: who made them, and where to find what they stand for in that process ---- */

typedef struct { uint64_t magic, kind, token, size; int32_t pid, fd, device, unused; char rest[16]; } Handle;

static int open_handle(const Handle *handle, uint64_t kind) {
    char path[64];
    if (handle->magic != MAGIC || handle->kind != kind) return -INVALID_HANDLE;
    if (handle->pid == getpid()) return -INVALID_CONTEXT;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle->pid, handle->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    return fd < 0 ? -MAP_FAILED_HERE : fd;
}

CUresult cuIpcGetEventHandle(Handle *found, Event *event) {
    ENTER(); NEEDS_CONTEXT();
    if (!is_event(event) || event->fd < 0 || !event->context) LEAVE(INVALID_HANDLE);
    *found = (Handle){.magic = MAGIC, .kind = 'e', .pid = getpid(), .fd = event->fd};
    LEAVE(SUCCESS);
}

CUresult cuIpcOpenEventHandle(Event **found, Handle handle) {
    ENTER(); NEEDS_CONTEXT();
    int fd = open_handle(&handle, 'e');
    if (fd < 0) LEAVE(-fd);
    Page *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (page == MAP_FAILED) LEAVE(MAP_FAILED_HERE);
    if (atomic_load(&page->magic) != MAGIC) { munmap(page, PAGE); LEAVE(INVALID_HANDLE); }
    Event *event = calloc(1, sizeof *event);
    *event = (Event){.next = events, .flags = 6, .fd = -1, .page = page};
    *found = events = event;
    LEAVE(SUCCESS);
}

/* ---- memory as of old ---- */

/* The mode of the file says that it is device memory, and of which device: a contained process may not look into /proc.
 * */
static int new_memory(int ordinal, size_t size) {
    int fd = memfd_create("fake-cuda-memory", MFD_CLOEXEC);
    if (fd >= 0 && (ftruncate(fd, size) || fchmod(fd, S_ISVTX | S_IRUSR | S_IWUSR | physical[ordinal])))
        { close(fd); fd = -1; }
    return fd;
}

static int device_in(mode_t mode) {
    if (!S_ISREG(mode) || (mode & (S_ISVTX | S_IXUSR)) != S_ISVTX) return -INVALID_VALUE;
    for (int i = 0; i < device_count_here; i++) if (physical[i] == (int)(mode & 077)) return i;
    return -NOT_SUPPORTED;
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    ENTER(); NEEDS_CONTEXT();
    *total = memory_bytes;
    *free_bytes = memory_bytes - used_bytes[current()->ordinal];
    LEAVE(SUCCESS);
}

CUresult cuMemAlloc_v2(CUdeviceptr *found, size_t size) {
    ENTER(); NEEDS_CONTEXT();
    if (size == 0) LEAVE(INVALID_VALUE);
    int ordinal = current()->ordinal;
    size_t whole = (size + PAGE - 1) & ~(PAGE - 1);
    if (whole < size || whole > memory_bytes - used_bytes[ordinal]) LEAVE(OUT_OF_MEMORY);
    int fd = new_memory(ordinal, whole);
    if (fd < 0) LEAVE(OUT_OF_MEMORY);
    char *base = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) { close(fd); LEAVE(OUT_OF_MEMORY); }
    /* New device memory holds whatever was there before. */
    memset(base, 0xA5, whole < GRANULARITY ? whole : GRANULARITY);
    add_range(ALLOCATED, base, whole, ordinal, fd)->token = next_token++;
    used_bytes[ordinal] += whole;
    *found = (CUdeviceptr)base;
    LEAVE(SUCCESS);
}

CUresult cuMemFree_v2(CUdeviceptr address) {
    ENTER(); NEEDS_CONTEXT();
    Range *range = range_from((void *)address, ALLOCATED);
    if (!range) LEAVE(INVALID_VALUE);
    for (Stream *each = streams; each; each = each->next) if (!each->is_destroyed) drain(each);
    drain(&legacy[range->ordinal]);
    used_bytes[range->ordinal] -= range->size;
    munmap(range->base, range->size);
    close(range->fd);
    remove_range(range);
    LEAVE(SUCCESS);
}

CUresult cuIpcGetMemHandle(Handle *found, CUdeviceptr address) {
    ENTER(); NEEDS_CONTEXT();
    if (getenv("FAKE_CUDA_NO_HANDLES")) LEAVE(NOT_SUPPORTED);
    Range *range = range_from((void *)address, ALLOCATED);
    if (!range) LEAVE(INVALID_VALUE);
    *found = (Handle){.magic = MAGIC, .kind = 'm', .token = range->token, .size = range->size, .pid = getpid(),
                      .fd = range->fd, .device = physical[range->ordinal]};
    LEAVE(SUCCESS);
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *found, Handle handle, unsigned flags) {
    ENTER(); NEEDS_CONTEXT();
    if (flags != 1) LEAVE(INVALID_VALUE);
    for (Range *each = ranges; each; each = each->next)
        if (each->kind == OPENED && each->token == handle.token && each->object == (uint64_t)handle.pid) {
            each->holds++;
            *found = (CUdeviceptr)each->base;
            LEAVE(SUCCESS);
        }
    int fd = open_handle(&handle, 'm');
    if (fd < 0) LEAVE(-fd);
    struct stat facts;
    char *base = MAP_FAILED;
    if (!fstat(fd, &facts) && (uint64_t)facts.st_size == handle.size)
        base = mmap(NULL, handle.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (base == MAP_FAILED) LEAVE(MAP_FAILED_HERE);
    Range *range = add_range(OPENED, base, handle.size, current()->ordinal, -1);
    range->token = handle.token;
    range->object = handle.pid;
    *found = (CUdeviceptr)base;
    LEAVE(SUCCESS);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    ENTER(); NEEDS_CONTEXT();
    Range *range = range_from((void *)address, OPENED);
    if (!range) LEAVE(INVALID_VALUE);
    if (--range->holds == 0) {
        munmap(range->base, range->size);
        remove_range(range);
    }
    LEAVE(SUCCESS);
}

/* ---- memory by object, address and map ---- */

typedef struct { int type, id; } Location;
typedef struct { int type, handle_types; Location location; void *win32; unsigned char flags[8]; } Properties;
typedef struct { Location location; int flags; } Access;

static int is_good(const Properties *properties) {
    return properties->type == 1 && properties->location.type == 1 && properties->location.id >= 0 &&
           properties->location.id < device_count_here && (properties->handle_types & ~1) == 0;
}

CUresult cuMemGetAllocationGranularity(size_t *found, const Properties *properties, int option) {
    ENTER(); NEEDS_INIT();
    if (!is_good(properties) || option < 0 || option > 1) LEAVE(INVALID_VALUE);
    *found = GRANULARITY;
    LEAVE(SUCCESS);
}

CUresult cuMemCreate(Allocation *found, size_t size, const Properties *properties, unsigned long long flags) {
    ENTER(); NEEDS_CONTEXT();
    if (!is_good(properties) || flags || size == 0 || size % GRANULARITY) LEAVE(INVALID_VALUE);
    if (properties->handle_types && getenv("FAKE_CUDA_NO_DESCRIPTORS")) LEAVE(NOT_SUPPORTED);
    int ordinal = properties->location.id;
    if (size > memory_bytes - used_bytes[ordinal]) LEAVE(OUT_OF_MEMORY);
    int fd = new_memory(ordinal, size);
    if (fd < 0) LEAVE(OUT_OF_MEMORY);
    char rubbish[4096];
    memset(rubbish, 0xA5, sizeof rubbish);
    if (pwrite(fd, rubbish, sizeof rubbish, 0) < 0) { close(fd); LEAVE(OUT_OF_MEMORY); }
    Object *object = calloc(1, sizeof *object);
    *object = (Object){.next = objects, .handle = next_handle++, .size = size, .ordinal = ordinal, .fd = fd};
    objects = object;
    used_bytes[ordinal] += size;
    *found = object->handle;
    LEAVE(SUCCESS);
}

CUresult cuMemRelease(Allocation handle) {
    ENTER(); NEEDS_INIT();
    Object *object = object_of(handle);
    if (!object || object->is_released) LEAVE(INVALID_VALUE);
    object->is_released = 1;
    drop_object(object);
    LEAVE(SUCCESS);
}

CUresult cuMemExportToShareableHandle(void *found, Allocation handle, int type, unsigned long long flags) {
    ENTER(); NEEDS_INIT();
    Object *object = object_of(handle);
    if (!object || object->is_released || flags) LEAVE(INVALID_VALUE);
    if (type != 1 || has_no_descriptors()) LEAVE(NOT_SUPPORTED);
    int fd = fcntl(object->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) LEAVE(OUT_OF_MEMORY);
    *(int *)found = fd;
    LEAVE(SUCCESS);
}

CUresult cuMemImportFromShareableHandle(Allocation *found, void *descriptor, int type) {
    ENTER(); NEEDS_CONTEXT();
    int fd = (int)(intptr_t)descriptor;
    struct stat facts;
    if (type != 1 || fd < 0 || fstat(fd, &facts)) LEAVE(INVALID_VALUE);
    int ordinal = device_in(facts.st_mode);
    if (ordinal < 0) LEAVE(-ordinal);
    fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) LEAVE(OUT_OF_MEMORY);
    Object *object = calloc(1, sizeof *object);
    *object = (Object){.next = objects, .handle = next_handle++, .size = facts.st_size, .ordinal = ordinal, .fd = fd,
                       .is_imported = 1};
    objects = object;
    *found = object->handle;
    LEAVE(SUCCESS);
}

CUresult cuMemGetAllocationPropertiesFromHandle(Properties *found, Allocation handle) {
    ENTER(); NEEDS_INIT();
    Object *object = object_of(handle);
    if (!object || object->is_released) LEAVE(INVALID_VALUE);
    *found = (Properties){.type = 1, .handle_types = 1, .location = {1, object->ordinal}};
    LEAVE(SUCCESS);
}

CUresult cuMemAddressReserve(CUdeviceptr *found, size_t size, size_t alignment, CUdeviceptr wish,
    unsigned long long flags) {
    ENTER(); NEEDS_CONTEXT();
    (void)wish;
    if (size == 0 || size % GRANULARITY || flags || (alignment & (alignment - 1))) LEAVE(INVALID_VALUE);
    char *base = mmap(NULL, size + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) LEAVE(OUT_OF_MEMORY);
    char *aligned = (char *)(((uintptr_t)base + GRANULARITY - 1) & ~(GRANULARITY - 1));
    if (aligned > base) munmap(base, aligned - base);
    if (aligned < base + GRANULARITY) munmap(aligned + size, base + GRANULARITY - aligned);
    add_range(RESERVED, aligned, size, 0, -1);
    *found = (CUdeviceptr)aligned;
    LEAVE(SUCCESS);
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    ENTER(); NEEDS_INIT();
    Range *range = range_from((void *)address, RESERVED);
    if (!range || range->size != size || range->is_mapped) LEAVE(INVALID_VALUE);
    munmap(range->base, range->size);
    remove_range(range);
    LEAVE(SUCCESS);
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, Allocation handle, unsigned long long flags) {
    ENTER(); NEEDS_CONTEXT();
    Range *range = range_from((void *)address, RESERVED);
    Object *object = object_of(handle);
    if (!range || !object || object->is_released || offset || flags || size != range->size || size > object->size
        || range->is_mapped)
        LEAVE(INVALID_VALUE);
    if (mmap(range->base, size, PROT_NONE, MAP_SHARED | MAP_FIXED, object->fd, 0) == MAP_FAILED) LEAVE(OUT_OF_MEMORY);
    range->is_mapped = 1;
    range->access = 0;
    range->ordinal = object->ordinal;
    range->object = handle;
    object->mappings++;
    LEAVE(SUCCESS);
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    ENTER(); NEEDS_CONTEXT();
    Range *range = range_from((void *)address, RESERVED);
    if (!range || range->size != size || !range->is_mapped) LEAVE(INVALID_VALUE);
    mmap(range->base, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    range->is_mapped = range->access = 0;
    Object *object = object_of(range->object);
    object->mappings--;
    drop_object(object);
    LEAVE(SUCCESS);
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const Access *access, size_t how_many) {
    ENTER(); NEEDS_CONTEXT();
    Range *range = range_from((void *)address, RESERVED);
    if (!range || range->size != size || !range->is_mapped || how_many != 1) LEAVE(INVALID_VALUE);
    if (access->location.type != 1 || access->location.id < 0 || access->location.id >= device_count_here)
        LEAVE(INVALID_DEVICE);
    int protection = access->flags == 3 ? PROT_READ | PROT_WRITE : access->flags == 1 ? PROT_READ : PROT_NONE;
    if (mprotect(range->base, size, protection)) LEAVE(INVALID_VALUE);
    range->access = access->flags;
    LEAVE(SUCCESS);
}

/* ---- copies ---- */

CUresult cuMemHostRegister_v2(void *address, size_t size, unsigned flags) {
    ENTER(); NEEDS_CONTEXT();
    (void)flags;
    if (!address || !size) LEAVE(INVALID_VALUE);
    for (Range *each = ranges; each; each = each->next)
        if (each->kind == REGISTERED && (char *)address < each->base + each->size
            && each->base < (char *)address + size)
            LEAVE(ALREADY_REGISTERED);
    add_range(REGISTERED, address, size, current()->ordinal, -1);
    LEAVE(SUCCESS);
}

CUresult cuMemHostUnregister(void *address) {
    ENTER(); NEEDS_CONTEXT();
    Range *range = range_from(address, REGISTERED);
    if (!range) LEAVE(NOT_REGISTERED);
    remove_range(range);
    LEAVE(SUCCESS);
}

static CUresult copy(Stream *handle, void *target, const void *source, size_t size, int to_device, int from_device) {
    Stream *stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    if (size == 0) return SUCCESS;
    if ((to_device && !lies_within(target, size, 1, 1)) || (from_device && !lies_within(source, size, 1, 0)))
        return INVALID_VALUE;
    Work *work = calloc(1, sizeof *work);
    *work = (Work){.kind = COPY, .target = target, .source = source, .size = size};
    if (!from_device && !lies_within(source, size, 0, 0)) {
        /* Ordinary memory that is not pinned is read before the call returns. */
        work->staged = malloc(size);
        memcpy(work->staged, source, size);
    }
    int waits = !to_device && !lies_within(target, size, 0, 0);
    enqueue(stream, work);
    if (waits) drain(stream); /* and written before it returns */
    return SUCCESS;
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void *source, size_t size, Stream *stream) {
    ENTER(); NEEDS_CONTEXT();
    LEAVE(copy(stream, (void *)target, source, size, 1, 0));
}

CUresult cuMemcpyDtoHAsync_v2(void *target, CUdeviceptr source, size_t size, Stream *stream) {
    ENTER(); NEEDS_CONTEXT();
    LEAVE(copy(stream, target, (const void *)source, size, 0, 1));
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr target, CUdeviceptr source, size_t size, Stream *stream) {
    ENTER(); NEEDS_CONTEXT();
    LEAVE(copy(stream, (void *)target, (const void *)source, size, 1, 1));
}

CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t size, Stream *stream) {
    ENTER(); NEEDS_CONTEXT();
    Range *to = range_at((void *)target), *from = range_at((void *)source);
    LEAVE(copy(stream, (void *)target, (const void *)source, size, to && to->kind != REGISTERED, from
        && from->kind != REGISTERED));
}

CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t size, Stream *handle) {
    ENTER(); NEEDS_CONTEXT();
    Stream *stream = stream_of(handle);
    if (!stream) LEAVE(INVALID_HANDLE);
    if (!lies_within((void *)target, size, 1, 1)) LEAVE(INVALID_VALUE);
    Work *work = calloc(1, sizeof *work);
    *work = (Work){.kind = SET, .target = (void *)target, .value = value, .size = size};
    enqueue(stream, work);
    LEAVE(SUCCESS);
}

CUresult cuPointerGetAttribute(void *found, int attribute, CUdeviceptr address) {
    ENTER(); NEEDS_INIT();
    Range *range = range_at((void *)address);
    if (!range || (range->kind == RESERVED && !range->is_mapped)) LEAVE(INVALID_VALUE);
    if (attribute == 2) *(unsigned *)found = range->kind == REGISTERED ? 1 : 2;
    else if (attribute == 9) *(int *)found = range->ordinal;
    else LEAVE(INVALID_VALUE);
    LEAVE(SUCCESS);
}
