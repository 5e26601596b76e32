/* Calls add_sub in a Triton server inside this process, through its C API, and times it.
 *
 *     triton_caller REPOSITORY BACKENDS
 *
 * Prints "ready", then reads lines "ELEMENTS CALLS IN_FLIGHT". It makes CALLS calls with two tensors of
 * ELEMENTS floats, IN_FLIGHT at a time, and answers with one line: the nanoseconds that all took together,
 * then, if one is in flight, those of each. The declarations are those of the API's version 1, as far as
 * they are used; there are no headers in the wheel.
 */
#include <pthread.h>
#include <semaphore.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef void Error, Server, Options, Request, Response, Allocator;

extern const char *TRITONSERVER_ErrorMessage(Error *);
extern Error *TRITONSERVER_ServerOptionsNew(Options **);
extern Error *TRITONSERVER_ServerOptionsSetModelRepositoryPath(Options *, const char *);
extern Error *TRITONSERVER_ServerOptionsSetBackendDirectory(Options *, const char *);
extern Error *TRITONSERVER_ServerOptionsSetLogInfo(Options *, bool);
extern Error *TRITONSERVER_ServerOptionsSetLogWarn(Options *, bool);
extern Error *TRITONSERVER_ServerOptionsSetMetrics(Options *, bool);
extern Error *TRITONSERVER_ServerOptionsSetGpuMetrics(Options *, bool);
extern Error *TRITONSERVER_ServerOptionsSetPinnedMemoryPoolByteSize(Options *, uint64_t);
extern Error *TRITONSERVER_ServerNew(Server **, Options *);
extern Error *TRITONSERVER_ServerStop(Server *);
extern Error *TRITONSERVER_ServerDelete(Server *);
extern Error *TRITONSERVER_InferenceRequestNew(Request **, Server *, const char *, int64_t);
extern Error *TRITONSERVER_InferenceRequestDelete(Request *);
extern Error *TRITONSERVER_InferenceRequestAddInput(Request *, const char *, int, const int64_t *,
                                                    uint64_t);
extern Error *TRITONSERVER_InferenceRequestAppendInputData(Request *, const char *, const void *,
                                                           size_t, int, int64_t);
extern Error *TRITONSERVER_InferenceRequestSetReleaseCallback(Request *,
                                                              void (*)(Request *, uint32_t, void *),
                                                              void *);
extern Error *TRITONSERVER_InferenceRequestSetResponseCallback(
    Request *, Allocator *, void *, void (*)(Response *, uint32_t, void *), void *);
extern Error *TRITONSERVER_ServerInferAsync(Server *, Request *, void *);
extern Error *TRITONSERVER_InferenceResponseError(Response *);
extern Error *TRITONSERVER_InferenceResponseDelete(Response *);
extern Error *TRITONSERVER_ResponseAllocatorNew(
    Allocator **,
    Error *(*)(Allocator *, const char *, size_t, int, int64_t, void *, void **, void **, int *,
               int64_t *),
    Error *(*)(Allocator *, void *, void *, size_t, int, int64_t),
    Error *(*)(Allocator *, void *));

enum { FP32 = 11, CPU = 0, MOST_IN_FLIGHT = 256 };

/* A reusable request, with memory of its own for its outputs. */
typedef struct {
    float *input[2], *output[2];
    size_t output_bytes;
    sem_t released, answered;
} Call;

static Server *server;
static Allocator *allocator;
static size_t elements;
static int calls_left;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void check(Error *error, const char *what) {
    if (error == NULL) return;
    fprintf(stderr, "%s: %s\n", what, TRITONSERVER_ErrorMessage(error));
    exit(1);
}

static uint64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (uint64_t)at.tv_sec * 1000000000u + (uint64_t)at.tv_nsec;
}

static Error *allocate(Allocator *a, const char *name, size_t size, int type, int64_t id,
                       void *user, void **buffer, void **buffer_user, int *actual, int64_t *actual_id) {
    Call *call = user;
    (void)a, (void)type, (void)id;
    if (size > call->output_bytes) {
        fprintf(stderr, "an output has %zu bytes, expected %zu\n", size, call->output_bytes);
        exit(1);
    }
    *buffer = call->output[name[6] - '0'];
    *buffer_user = NULL;
    *actual = CPU;
    *actual_id = 0;
    return NULL;
}

static Error *give_back(Allocator *a, void *buffer, void *user, size_t size, int type, int64_t id) {
    (void)a, (void)buffer, (void)user, (void)size, (void)type, (void)id;
    return NULL;
}

static void released(Request *request, uint32_t flags, void *user) {
    (void)request, (void)flags;
    sem_post(&((Call *)user)->released);
}

static void answered(Response *response, uint32_t flags, void *user) {
    (void)flags;
    if (response != NULL) {
        check(TRITONSERVER_InferenceResponseError(response), "response");
        check(TRITONSERVER_InferenceResponseDelete(response), "delete response");
    }
    sem_post(&((Call *)user)->answered);
}

static Request *prepare(Call *call) {
    Request *request;
    int64_t shape[2] = {1, (int64_t)elements};
    size_t size = elements * sizeof(float);
    const char *names[2] = {"INPUT0", "INPUT1"};
    check(TRITONSERVER_InferenceRequestNew(&request, server, "add_sub", -1), "new request");
    for (int i = 0; i < 2; i++) {
        call->input[i] = malloc(size);
        call->output[i] = malloc(size);
        for (size_t k = 0; k < elements; k++) call->input[i][k] = (float)(i + 1);
        memset(call->output[i], 0, size);
        check(TRITONSERVER_InferenceRequestAddInput(request, names[i], FP32, shape, 2), "input");
        check(TRITONSERVER_InferenceRequestAppendInputData(request, names[i], call->input[i], size, CPU, 0),
              "input data");
    }
    call->output_bytes = size;
    sem_init(&call->released, 0, 0);
    sem_init(&call->answered, 0, 0);
    check(TRITONSERVER_InferenceRequestSetReleaseCallback(request, released, call), "release");
    check(TRITONSERVER_InferenceRequestSetResponseCallback(request, allocator, call, answered, call),
          "response callback");
    return request;
}

static void finish(Call *call, Request *request) {
    if (call->output[0][0] != 3.0f || call->output[1][0] != -1.0f) {
        fprintf(stderr, "wrong answer: %f %f\n", call->output[0][0], call->output[1][0]);
        exit(1);
    }
    check(TRITONSERVER_InferenceRequestDelete(request), "delete request");
    for (int i = 0; i < 2; i++) free(call->input[i]), free(call->output[i]);
    sem_destroy(&call->released);
    sem_destroy(&call->answered);
}

static void once(Call *call, Request *request) {
    check(TRITONSERVER_ServerInferAsync(server, request, NULL), "infer");
    sem_wait(&call->answered);
    sem_wait(&call->released);
}

static void *caller(void *unused) {
    Call call;
    Request *request = prepare(&call);
    for (;;) {
        pthread_mutex_lock(&lock);
        bool more = calls_left-- > 0;
        pthread_mutex_unlock(&lock);
        if (!more) break;
        once(&call, request);
    }
    finish(&call, request);
    return unused;
}

static void measure_one(int calls) {
    Call call;
    Request *request = prepare(&call);
    uint64_t *times = malloc((size_t)calls * sizeof *times), begin = now_ns();
    for (int i = 0; i < calls; i++) {
        uint64_t before = now_ns();
        once(&call, request);
        times[i] = now_ns() - before;
    }
    printf("%llu", (unsigned long long)(now_ns() - begin));
    for (int i = 0; i < calls; i++) printf(" %llu", (unsigned long long)times[i]);
    printf("\n");
    free(times);
    finish(&call, request);
}

static void measure_many(int calls, int in_flight) {
    pthread_t threads[MOST_IN_FLIGHT];
    uint64_t begin = now_ns();
    calls_left = calls;
    for (int i = 0; i < in_flight; i++) pthread_create(&threads[i], NULL, caller, NULL);
    for (int i = 0; i < in_flight; i++) pthread_join(threads[i], NULL);
    printf("%llu\n", (unsigned long long)(now_ns() - begin));
}

int main(int count, char **arguments) {
    Options *options;
    int calls, in_flight;
    if (count != 3) return 2;
    check(TRITONSERVER_ServerOptionsNew(&options), "options");
    check(TRITONSERVER_ServerOptionsSetModelRepositoryPath(options, arguments[1]), "repository");
    check(TRITONSERVER_ServerOptionsSetBackendDirectory(options, arguments[2]), "backends");
    check(TRITONSERVER_ServerOptionsSetLogInfo(options, false), "log");
    check(TRITONSERVER_ServerOptionsSetLogWarn(options, false), "log");
    check(TRITONSERVER_ServerOptionsSetMetrics(options, false), "metrics");
    check(TRITONSERVER_ServerOptionsSetGpuMetrics(options, false), "metrics");
    check(TRITONSERVER_ServerOptionsSetPinnedMemoryPoolByteSize(options, 0), "pinned memory");
    check(TRITONSERVER_ServerNew(&server, options), "server");
    check(TRITONSERVER_ResponseAllocatorNew(&allocator, allocate, give_back, NULL), "allocator");
    printf("ready\n");
    fflush(stdout);
    while (scanf("%zu %d %d", &elements, &calls, &in_flight) == 3) {
        if (in_flight > 1) measure_many(calls, in_flight > MOST_IN_FLIGHT ? MOST_IN_FLIGHT : in_flight);
        else measure_one(calls);
        fflush(stdout);
    }
    check(TRITONSERVER_ServerStop(server), "stop");
    check(TRITONSERVER_ServerDelete(server), "delete");
    return 0;
}
