/* gRPC over HTTP/2, for Python and without I/O: bytes of a peer go in, events and bytes for it come out. The server's
 * side, and as much of the client's as the load generator needs.
 *
 * HTTP/2 itself is libnghttp2's, which is found when the program runs. What is used of its stable interface
 * (libnghttp2.so.14) is declared here, so a compiler alone builds this file. This uses Python's stable ABI.
 *
 * Theory of operation.
 *
 * Who. A session belongs to one thread and never calls Python code: `feed` and `out` collect events in a list, which
 * the caller handles after they have returned. So no callback can change a session while nghttp2 works on it. But what
 * they drop may have a destructor in Python, as a lease has, and other threads may run then, with sessions of their
 * own. So all that a session works with is its own. nghttp2 keeps a pointer to the `Stream` of each of its streams. A
 * `Stream` is made when the headers of a request begin and freed when nghttp2 closes the stream, or with the session;
 * `streams` lists all of them for that.
 *
 * Large messages. At the first bytes of one, `feed` stops and says COMING, with these bytes and the size. The caller
 * may `place` the message in memory of its own, and feeds the same buffer again. nghttp2 is done with the piece of DATA
 * at which it stopped, so the session itself notes where the rest of that piece lies in the buffer (`stopped`). While
 * nghttp2 waits for the rest of a DATA frame that goes into such memory, `room` is that memory: the caller may receive
 * into it and feed it, and nothing is copied. `room` never reaches beyond the frame, as the next one's head must not
 * lie where others write.
 *
 * In. The five bytes before a message say how long it is. Memory is taken once they have come and were compared with
 * the limit. When a message is complete, what follows it on this stream is held as bytes until `take` asks for the next
 * one. The windows are credited for bytes that went into a message, and not for those that are held. So a client that
 * sends more than is read waits, after one window for each of its streams and one for all of them, and never holds more
 * of our memory than that.
 *
 * Out. `send` keeps a message until nghttp2 has frames for it, and `out` returns frames of `PART` bytes at most, so
 * that the caller can stop when the client does not read. Small pieces of messages are copied into the frames, and
 * large ones are views of the message. The event SENT says that the last byte of a message has left so.
 *
 * Floods. Frames that ask for nothing, and streams that are reset, cost little for the client and much for the server.
 * A session has a budget for each, which `replenish` refills once a second. A client that exceeds one gets GOAWAY, and
 * nothing more of it is read. Headers have a limit in bytes as they come out of the decompression; names and values
 * beyond it are dropped unread. */
#include "sources.h"

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>

/* --- What is used of nghttp2.h --- */

typedef struct nghttp2_session nghttp2_session;
typedef struct nghttp2_session_callbacks nghttp2_session_callbacks;
typedef struct nghttp2_option nghttp2_option;
typedef struct { uint8_t *name, *value; size_t namelen, valuelen; uint8_t flags; } nghttp2_nv;
/* Every frame begins with its head, and nothing else of a frame is read here. */
typedef struct { size_t length; int32_t stream_id; uint8_t type, flags, reserved; } nghttp2_frame_hd;
typedef union { int fd; void *ptr; } nghttp2_data_source;
typedef ssize_t (*read_callback)(nghttp2_session *, int32_t, uint8_t *, size_t, uint32_t *, nghttp2_data_source *,
    void *);
typedef struct { nghttp2_data_source source; read_callback read; } nghttp2_data_provider;
typedef struct { int32_t settings_id; uint32_t value; } nghttp2_settings_entry;

enum { DATA = 0, HEADERS = 1, SETTINGS = 4, PING = 6, WINDOW_UPDATE = 8 };
enum { RESET = 3, END_STREAM = 1, ACK = 1, PADDED = 8 };
enum { ERR_WOULDBLOCK = -504, ERR_DEFERRED = -508, ERR_TEMPORAL = -521, ERR_PAUSE = -526, ERR_CALLBACK = -902 };
enum { DATA_EOF = 1, DATA_NO_END_STREAM = 2, DATA_NO_COPY = 4 };
enum { NO_ERROR = 0, ENHANCE_YOUR_CALM = 11 };
enum { CANCEL = 8 };
enum {
    ENABLE_PUSH = 2,
    MAX_CONCURRENT_STREAMS = 3,
    INITIAL_WINDOW_SIZE = 4,
    MAX_FRAME_SIZE = 5,
    MAX_HEADER_LIST_SIZE = 6
};

typedef int (*on_frame_callback)(nghttp2_session *, const nghttp2_frame_hd *, void *);
typedef int (*on_header_callback)(nghttp2_session *, const nghttp2_frame_hd *, const uint8_t *, size_t,
    const uint8_t *, size_t, uint8_t, void *);
typedef int (*on_chunk_callback)(nghttp2_session *, uint8_t, int32_t, const uint8_t *, size_t, void *);
typedef int (*on_close_callback)(nghttp2_session *, int32_t, uint32_t, void *);
typedef ssize_t (*read_length_callback)(nghttp2_session *, uint8_t, int32_t, int32_t, int32_t, uint32_t, void *);
typedef ssize_t (*send_callback)(nghttp2_session *, const uint8_t *, size_t, int, void *);
typedef int (*send_data_callback)(nghttp2_session *, nghttp2_frame_hd *, const uint8_t *, size_t,
    nghttp2_data_source *, void *);

#define FUNCTIONS(X) \
    X(int, session_callbacks_new, (nghttp2_session_callbacks **)) \
    X(void, session_callbacks_set_send_callback, (nghttp2_session_callbacks *, send_callback)) \
    X(void, session_callbacks_set_send_data_callback, (nghttp2_session_callbacks *, send_data_callback)) \
    X(void, session_callbacks_set_data_source_read_length_callback, \
        (nghttp2_session_callbacks *, read_length_callback)) \
    X(void, session_callbacks_set_on_begin_frame_callback, (nghttp2_session_callbacks *, on_frame_callback)) \
    X(void, session_callbacks_set_on_begin_headers_callback, (nghttp2_session_callbacks *, on_frame_callback)) \
    X(void, session_callbacks_set_on_frame_recv_callback, (nghttp2_session_callbacks *, on_frame_callback)) \
    X(void, session_callbacks_set_on_frame_send_callback, (nghttp2_session_callbacks *, on_frame_callback)) \
    X(void, session_callbacks_set_on_header_callback, (nghttp2_session_callbacks *, on_header_callback)) \
    X(void, session_callbacks_set_on_data_chunk_recv_callback, (nghttp2_session_callbacks *, on_chunk_callback)) \
    X(void, session_callbacks_set_on_stream_close_callback, (nghttp2_session_callbacks *, on_close_callback)) \
    X(int, option_new, (nghttp2_option **)) \
    X(void, option_del, (nghttp2_option *)) \
    X(void, option_set_no_closed_streams, (nghttp2_option *, int)) \
    X(void, option_set_no_auto_window_update, (nghttp2_option *, int)) \
    X(int, session_server_new2, (nghttp2_session **, const nghttp2_session_callbacks *, void *, \
        const nghttp2_option *)) \
    X(int, session_client_new2, (nghttp2_session **, const nghttp2_session_callbacks *, void *, \
        const nghttp2_option *)) \
    X(void, session_del, (nghttp2_session *)) \
    X(ssize_t, session_mem_recv, (nghttp2_session *, const uint8_t *, size_t)) \
    X(int, session_send, (nghttp2_session *)) \
    X(int, session_want_read, (nghttp2_session *)) \
    X(int, session_want_write, (nghttp2_session *)) \
    X(int, session_set_local_window_size, (nghttp2_session *, uint8_t, int32_t, int32_t)) \
    X(int, session_set_stream_user_data, (nghttp2_session *, int32_t, void *)) \
    X(void *, session_get_stream_user_data, (nghttp2_session *, int32_t)) \
    X(int, session_consume_connection, (nghttp2_session *, size_t)) \
    X(int, session_consume_stream, (nghttp2_session *, int32_t, size_t)) \
    X(int, session_resume_data, (nghttp2_session *, int32_t)) \
    X(int, session_terminate_session, (nghttp2_session *, uint32_t)) \
    X(int32_t, session_get_last_proc_stream_id, (nghttp2_session *)) \
    X(int, submit_settings, (nghttp2_session *, uint8_t, const nghttp2_settings_entry *, size_t)) \
    X(int32_t, submit_request, (nghttp2_session *, const void *, const nghttp2_nv *, size_t, \
        const nghttp2_data_provider *, void *)) \
    X(int, submit_response, (nghttp2_session *, int32_t, const nghttp2_nv *, size_t, const nghttp2_data_provider *)) \
    X(int, submit_trailer, (nghttp2_session *, int32_t, const nghttp2_nv *, size_t)) \
    X(int, submit_rst_stream, (nghttp2_session *, uint8_t, int32_t, uint32_t)) \
    X(int, submit_ping, (nghttp2_session *, uint8_t, const uint8_t *)) \
    X(int, submit_goaway, (nghttp2_session *, uint8_t, int32_t, uint32_t, const uint8_t *, size_t)) \
    X(const char *, strerror, (int))

static struct {
#define DECLARE(result, name, parameters) result (*name) parameters;
    FUNCTIONS(DECLARE)
} ng;
static nghttp2_session_callbacks *callbacks;

/* --- A session and its streams --- */

enum { EVENT_HEAD, EVENT_MESSAGE, EVENT_END, EVENT_CLOSED, EVENT_REFUSED, EVENT_SENT, EVENT_PING, EVENT_GREETED,
    EVENT_COMING };
enum { MOST_STREAMS = 1024, MOST_HEAD = 16 << 10, FRAME = 1 << 20 };
enum { STREAM_WINDOW = 4 << 20, WINDOW = 32 << 20 };
/* What `out` returns at once, and frames that may be copied behind that. */
enum { PART = 256 << 10, BEHIND_PART = 64 << 10, DATA_FRAME = 60 << 10 };
/* Pieces that leave as views: for shorter ones, a view costs more than a copy. */
enum { VIEWED = 4 << 10 };
/* Messages that may be placed, and how much of one the caller looks at. */
enum { PLACED = 64 << 10, LOOKED_AT = 4 << 10 };
/* Less than this is received with what follows it. */
enum { LEAST_ROOM = 16 << 10 };
static const long MOST_RESETS = 1000, RESETS_A_SECOND = 200, IDLE_FRAMES_A_SECOND = 10000;
/* In place of the compression of a message: it is coming. */
static const int COMING = 2;
/* Statuses of gRPC. */
enum { RESOURCE_EXHAUSTED = 8, INTERNAL = 13 };
static const long long NO_TIMEOUT = -1, BAD_TIMEOUT = -2;

/* A piece of a message: its prefix if it is the first one, and bytes of the caller's. */
typedef struct Piece {
    struct Piece *next;
    Py_buffer bytes;
    size_t sent, prefix_size;
    char prefix[5];
    int is_awaited;
} Piece;

typedef struct Stream {
    struct Stream *next, **link;
    int32_t id;
    char *head;
    size_t head_size, head_capacity;
    long long timeout_ns;
    int is_head_too_large, has_head, has_all;
    /* The message that is coming, and what came behind it. */
    uint8_t prefix[5];
    size_t prefix_size;
    PyObject *message;
    Py_buffer place;
    char *at;
    size_t filled, size;
    int is_wanted, is_refused, has_come;
    char *held;
    size_t held_from, held_to, held_capacity;
    /* Messages for the client. */
    Piece *first, **last;
    size_t unsent;
    int has_begun, is_finished, is_deferred;
    char status[12];
    PyObject *details;
} Stream;

/* What one call of `out` writes, and makes objects of before it returns. Behind the first view, `parts` has all before
 * `parted`, and `viewed` is the size of the views in it. */
typedef struct {
    size_t size, parted, viewed;
    PyObject *parts;
    char bytes[PART + BEHIND_PART];
} Output;

typedef struct {
    PyObject_HEAD
    nghttp2_session *ng;
    /* Of the call of `out` that runs. */
    Output *output;
    Stream *streams;
    PyObject *events;
    size_t max_message, unsent;
    unsigned long long sent; /* bytes of messages, until now */
    long idle_frames, resets;
    int is_client, compresses, has_failed, is_flooded, is_greeted, has_sent;
    /* The buffer that is being fed, how much of it nghttp2 has had, and the bytes of a stream that wait for the
     * caller's next `feed`. */
    const uint8_t *fed;
    size_t fed_size, stopped_from, stopped_to;
    int32_t stopped;
    /* The bytes that the DATA frame which is coming still lacks, and its stream once it has begun to fill a placed
     * message. */
    size_t frame_left;
    int32_t filling;
} Session;

static void event(Session *s, PyObject *each) {
    if (each == nullptr || (s->events == nullptr && (s->events = PyList_New(0)) == nullptr)
        || PyList_Append(s->events, each))
        s->has_failed = 1;
    Py_XDECREF(each);
}

static PyObject *taken_events(Session *s) {
    PyObject *events = s->events;
    s->events = nullptr;
    return events != nullptr ? events : PyList_New(0);
}

static void free_chain(Piece *piece) {
    for (Piece *next; piece != nullptr; piece = next) {
        next = piece->next;
        PyBuffer_Release(&piece->bytes);
        PyMem_Free(piece);
    }
}

static void free_pieces(Session *s, Stream *st) {
    free_chain(st->first);
    s->unsent -= st->unsent;
    st->first = nullptr;
    st->unsent = 0;
}

/* Give away the message that is coming, or has come. */
static PyObject *taken_message(Stream *st) {
    PyObject *message = st->message;
    PyBuffer_Release(&st->place);
    st->message = nullptr;
    st->prefix_size = 0;
    st->is_wanted = st->has_come = 0;
    return message;
}

static void free_stream(Session *s, Stream *st) {
    *st->link = st->next;
    if (st->next != nullptr) st->next->link = st->link;
    free_pieces(s, st);
    PyMem_Free(st->head);
    PyMem_Free(st->held);
    Py_XDECREF(taken_message(st));
    Py_XDECREF(st->details);
    PyMem_Free(st);
}

static Stream *find(Session *s, int32_t id) {
    return id > 0 ? static_cast<Stream *>(ng.session_get_stream_user_data(s->ng, id)) : nullptr;
}

static void credit(Session *s, int32_t id, size_t size) {
    if (size == 0) return;
    if (ng.session_consume_connection(s->ng, size) || ng.session_consume_stream(s->ng, id, size)) s->has_failed = 1;
}

/* --- What comes in --- */

static int on_begin_frame(nghttp2_session *session, const nghttp2_frame_hd *frame, void *user) {
    Session *s = static_cast<Session *>(user);
    (void)session;
    s->filling = 0;
    s->frame_left = frame->type == DATA && !(frame->flags & PADDED) ? frame->length : 0;
    int is_useful = frame->type == HEADERS || frame->type == WINDOW_UPDATE || frame->type == RESET ||
                    (frame->type == DATA && (frame->length != 0 || frame->flags & END_STREAM));
    if (!is_useful && !s->is_client && --s->idle_frames < 0) s->is_flooded = 1;
    return 0;
}

static Stream *add_stream(Session *s) {
    Stream *st = static_cast<Stream *>(PyMem_Calloc(1, sizeof *st));
    if (st == nullptr) return nullptr;
    st->timeout_ns = NO_TIMEOUT;
    st->is_wanted = 1;
    st->last = &st->first;
    st->next = s->streams;
    st->link = &s->streams;
    if (st->next != nullptr) st->next->link = &st->next;
    s->streams = st;
    return st;
}

static int on_begin_headers(nghttp2_session *session, const nghttp2_frame_hd *frame, void *user) {
    Session *s = static_cast<Session *>(user);
    if (find(s, frame->stream_id) != nullptr) return 0; /* trailers */
    Stream *st = add_stream(s);
    if (st == nullptr) return ERR_TEMPORAL;
    st->id = frame->stream_id;
    if (ng.session_set_stream_user_data(session, st->id, st)) {
        free_stream(s, st);
        return ERR_TEMPORAL;
    }
    return 0;
}

/* At most eight digits and a unit, see gRPC's "grpc-timeout". */
static long long timeout_of(const uint8_t *text, size_t size) {
    static const char units[] = "HMSmun";
    static const long long unit_ns[] = {3600000000000, 60000000000, 1000000000, 1000000, 1000, 1};
    long long value = 0;
    if (size < 2 || size > 9) return BAD_TIMEOUT;
    for (size_t i = 0; i + 1 < size; i++) {
        if (text[i] < '0' || text[i] > '9') return BAD_TIMEOUT;
        value = value * 10 + (text[i] - '0');
    }
    const void *unit = memchr(units, text[size - 1], sizeof units - 1);
    if (unit == nullptr) return BAD_TIMEOUT;
    long long each = unit_ns[static_cast<const char *>(unit) - units];
    return value > INT64_MAX / each ? INT64_MAX : value * each;
}

static int on_header(nghttp2_session *session, const nghttp2_frame_hd *frame, const uint8_t *name, size_t name_size,
                     const uint8_t *value, size_t value_size, uint8_t flags, void *user) {
    Session *s = static_cast<Session *>(user);
    Stream *st = find(s, frame->stream_id);
    (void)session, (void)flags;
    /* A client wants to know the trailers, too. */
    if (st == nullptr || (st->has_head && !s->is_client) || st->is_head_too_large) return 0;
    /* Apart from the rest, as it is another one each time, and the rest is not. */
    if (name_size == 12 && memcmp(name, "grpc-timeout", 12) == 0) {
        st->timeout_ns = timeout_of(value, value_size);
        return 0;
    }
    size_t size = st->head_size + name_size + value_size + 2;
    if (size > MOST_HEAD) {
        st->is_head_too_large = 1;
        return 0;
    }
    if (size > st->head_capacity) {
        size_t capacity = size < 256 ? 512 : 2 * size;
        char *head = static_cast<char *>(PyMem_Realloc(st->head, capacity));
        if (head == nullptr) {
            st->is_head_too_large = 1;
            return 0;
        }
        st->head = head;
        st->head_capacity = capacity;
    }
    char *at = st->head + st->head_size;
    memcpy(at, name, name_size);
    at[name_size] = 0;
    memcpy(at + name_size + 1, value, value_size);
    at[name_size + 1 + value_size] = 0;
    st->head_size = size;
    return 0;
}

static void end_head(Session *s, Stream *st) {
    st->has_head = 1;
    if (st->is_head_too_large)
        event(s, Py_BuildValue("iiOL", static_cast<int>(EVENT_HEAD), (int)st->id, Py_None, st->timeout_ns));
    else
        event(s, Py_BuildValue("iiy#L", static_cast<int>(EVENT_HEAD), (int)st->id, st->head,
            (Py_ssize_t)st->head_size, st->timeout_ns));
    PyMem_Free(st->head);
    st->head = nullptr;
    st->head_size = st->head_capacity = 0;
}

static int on_frame(nghttp2_session *session, const nghttp2_frame_hd *frame, void *user) {
    Session *s = static_cast<Session *>(user);
    (void)session;
    if (s->is_flooded) return 0;
    if (frame->type == SETTINGS && !s->is_greeted) {
        s->is_greeted = 1;
        event(s, Py_BuildValue("(i)", static_cast<int>(EVENT_GREETED)));
    } else if (frame->type == PING) {
        event(s, Py_BuildValue("iii", static_cast<int>(EVENT_PING), frame->flags & ACK, s->has_sent));
        s->has_sent = 0;
    } else if (frame->type == HEADERS || frame->type == DATA) {
        Stream *st = find(s, frame->stream_id);
        if (st == nullptr) return 0;
        if (!st->has_head || st->head != nullptr) end_head(s, st);
        if (frame->flags & END_STREAM) {
            st->has_all = 1;
            event(s, Py_BuildValue("ii", static_cast<int>(EVENT_END), (int)st->id));
        }
    }
    return s->has_failed ? ERR_CALLBACK : 0;
}

enum { NEEDS_MORE, IS_COMPLETE, IS_REFUSED, IS_COMING };

/* Put bytes into the message that is coming, up to its end. */
static int fill(Session *s, Stream *st, const uint8_t *data, size_t size, size_t *used, int *code) {
    size_t part = 5 - st->prefix_size;
    if (part > size) part = size;
    memcpy(st->prefix + st->prefix_size, data, part);
    st->prefix_size += part;
    *used = part;
    if (st->prefix_size < 5) return NEEDS_MORE;
    if (st->message == nullptr) {
        const uint8_t *p = st->prefix;
        st->size = (size_t)p[1] << 24 | (size_t)p[2] << 16 | (size_t)p[3] << 8 | p[4];
        *code = p[0] > 1 ? INTERNAL : RESOURCE_EXHAUSTED;
        if (p[0] > 1 || st->size > s->max_message) return IS_REFUSED;
        if (st->size > PLACED && p[0] == 0 && !st->has_come) {
            if (part == size) return NEEDS_MORE;
            st->has_come = 1;
            return IS_COMING;
        }
        /* Large memory stays untouched until its bytes have come. */
        st->message = PyBytes_FromStringAndSize(nullptr, (Py_ssize_t)st->size);
        if (st->message == nullptr) {
            PyErr_Clear();
            return IS_REFUSED;
        }
        st->at = PyBytes_AsString(st->message);
        st->filled = 0;
    }
    part = st->size - st->filled;
    if (part > size - *used) part = size - *used;
    if (part && st->at + st->filled != reinterpret_cast<const char *>(data) + *used)
        memcpy(st->at + st->filled, data + *used, part);
    st->filled += part;
    *used += part;
    return st->filled == st->size ? IS_COMPLETE : NEEDS_MORE;
}

static int hold(Stream *st, const uint8_t *data, size_t size) {
    if (size == 0) return 0;
    size_t kept = st->held_to - st->held_from;
    if (st->held_to + size > st->held_capacity) {
        if (kept) memmove(st->held, st->held + st->held_from, kept);
        st->held_from = 0;
        st->held_to = kept;
        if (kept + size > st->held_capacity) {
            size_t capacity = 2 * (kept + size);
            char *held = static_cast<char *>(PyMem_Realloc(st->held, capacity));
            if (held == nullptr) return -1;
            st->held = held;
            st->held_capacity = capacity;
        }
    }
    memcpy(st->held + st->held_to, data, size);
    st->held_to += size;
    return 0;
}

/* Take bytes of a stream, or note the rest of them for the next `feed` of this buffer. */
static int take_chunk(Session *s, int32_t id, const uint8_t *data, size_t size) {
    Stream *st = find(s, id);
    size_t used = 0, part = 0;
    int code = 0;
    if (st == nullptr || st->is_refused || s->is_flooded) {
        credit(s, id, size);
        return s->has_failed ? ERR_CALLBACK : 0;
    }
    while (used < size && st->is_wanted && !st->is_refused) {
        int result = fill(s, st, data + used, size - used, &part, &code);
        used += part;
        if (result == IS_COMPLETE) {
            PyObject *message = taken_message(st);
            event(s, Py_BuildValue("iiNi", static_cast<int>(EVENT_MESSAGE), (int)id, message, (int)st->prefix[0]));
        } else if (result == IS_REFUSED) {
            st->is_refused = 1;
            event(s, Py_BuildValue("iiin", static_cast<int>(EVENT_REFUSED), (int)id, code, (Py_ssize_t)st->size));
        } else if (result == IS_COMING) {
            size_t first = size - used;
            if (first > LOOKED_AT) first = LOOKED_AT;
            event(s, Py_BuildValue("iiy#n", static_cast<int>(EVENT_COMING), (int)id, data + used, (Py_ssize_t)first,
                (Py_ssize_t)st->size));
            credit(s, id, used);
            s->stopped = id;
            s->stopped_from = (size_t)(data + used - s->fed);
            s->stopped_to = (size_t)(data + size - s->fed);
            return s->has_failed ? ERR_CALLBACK : ERR_PAUSE;
        }
    }
    if (st->is_refused)
        used = size;
    else if (hold(st, data + used, size - used))
        s->has_failed = 1;
    credit(s, id, used);
    return s->has_failed ? ERR_CALLBACK : 0;
}

static int on_chunk(nghttp2_session *session, uint8_t flags, int32_t id, const uint8_t *data, size_t size, void *user) {
    Session *s = static_cast<Session *>(user);
    (void)session, (void)flags;
    s->frame_left = size < s->frame_left ? s->frame_left - size : 0;
    s->filling = id;
    return take_chunk(s, id, data, size);
}

static int on_close(nghttp2_session *session, int32_t id, uint32_t code, void *user) {
    Session *s = static_cast<Session *>(user);
    Stream *st = find(s, id);
    if (code != NO_ERROR && !s->is_client && --s->resets < 0) s->is_flooded = 1;
    if (st == nullptr) return 0;
    if (st->held_to > st->held_from && ng.session_consume_connection(session, st->held_to - st->held_from))
        s->has_failed = 1;
    if (st->has_head || s->is_client) {
        event(s, Py_BuildValue("iiI", static_cast<int>(EVENT_CLOSED), (int)id, (unsigned)code));
    }
    ng.session_set_stream_user_data(session, id, nullptr);
    free_stream(s, st);
    return s->has_failed ? ERR_CALLBACK : 0;
}

/* --- What goes out --- */

/* The output of the last call, for the next one of any session: the memory is large. */
static Output *spare_output;

static Output *take_output(void) {
    Output *output = spare_output;
    spare_output = nullptr;
    if (output == nullptr) output = static_cast<Output *>(PyMem_Malloc(sizeof *output));
    if (output == nullptr) return nullptr;
    output->size = output->parted = output->viewed = 0;
    output->parts = nullptr;
    return output;
}

static void leave_output(Output *output) {
    if (spare_output == nullptr)
        spare_output = output;
    else
        PyMem_Free(output);
}

/* Make a part of the bytes that were written since the last one. */
static int end_part(Output *o) {
    if (o->parts == nullptr && (o->parts = PyList_New(0)) == nullptr) return -1;
    if (o->size == o->parted) return 0;
    PyObject *part = PyBytes_FromStringAndSize(o->bytes + o->parted, (Py_ssize_t)(o->size - o->parted));
    int code = part == nullptr ? -1 : PyList_Append(o->parts, part);
    Py_XDECREF(part);
    o->parted = o->size;
    return code;
}

static int put_view(Output *o, const Piece *piece, size_t from, size_t size) {
    if (end_part(o)) return -1;
    PyObject *whole = PyMemoryView_FromObject(piece->bytes.obj);
    PyObject *part =
        whole == nullptr ? nullptr : PySequence_GetSlice(whole, (Py_ssize_t)from, (Py_ssize_t)(from + size));
    int code = part == nullptr ? -1 : PyList_Append(o->parts, part);
    Py_XDECREF(whole);
    Py_XDECREF(part);
    o->viewed += size;
    return code;
}

static int put(Output *o, const void *data, size_t size) {
    if (o->size + size > sizeof o->bytes) return ERR_CALLBACK;
    memcpy(o->bytes + o->size, data, size);
    o->size += size;
    return 0;
}

static ssize_t on_send(nghttp2_session *session, const uint8_t *data, size_t size, int flags, void *user) {
    Output *o = static_cast<Session *>(user)->output;
    (void)session, (void)flags;
    if (o->size + o->viewed >= PART) return ERR_WOULDBLOCK;
    /* A block of headers may be larger than the room behind a part. The rest of it follows. */
    size_t room = sizeof o->bytes - o->size;
    if (size > room) size = room;
    put(o, data, size);
    return (ssize_t)size;
}

static int on_send_data(nghttp2_session *session, nghttp2_frame_hd *frame, const uint8_t *head, size_t size,
                        nghttp2_data_source *source, void *user) {
    Session *s = static_cast<Session *>(user);
    Stream *st = static_cast<Stream *>(source->ptr);
    Output *o = s->output;
    (void)session, (void)frame;
    if (o->size + o->viewed >= PART) return ERR_WOULDBLOCK;
    if (put(o, head, 9)) return ERR_CALLBACK;
    while (size) {
        Piece *piece = st->first;
        size_t whole = piece->prefix_size + (size_t)piece->bytes.len, part = whole - piece->sent;
        if (piece->sent < piece->prefix_size) part = piece->prefix_size - piece->sent;
        if (part > size) part = size;
        if (piece->sent < piece->prefix_size) {
            if (put(o, piece->prefix + piece->sent, part)) return ERR_CALLBACK;
        } else {
            size_t from = piece->sent - piece->prefix_size;
            const char *bytes = static_cast<const char *>(piece->bytes.buf) + from;
            if (part < VIEWED ? put(o, bytes, part) : put_view(o, piece, from, part)) return ERR_CALLBACK;
        }
        piece->sent += part;
        size -= part;
        st->unsent -= part;
        s->unsent -= part;
        s->sent += part;
        if (piece->sent == whole) {
            st->first = piece->next;
            if (st->first == nullptr) st->last = &st->first;
            if (piece->is_awaited) event(s, Py_BuildValue("ii", static_cast<int>(EVENT_SENT), (int)st->id));
            PyBuffer_Release(&piece->bytes);
            PyMem_Free(piece);
        }
    }
    s->has_sent = 1;
    return s->has_failed ? ERR_CALLBACK : 0;
}

static nghttp2_nv header(const char *name, const char *value, size_t size) {
    nghttp2_nv each = {(uint8_t *)name, (uint8_t *)value, strlen(name), size, 0};
    return each;
}

static size_t add_status(const Stream *st, nghttp2_nv *headers, size_t count) {
    headers[count++] = header("grpc-status", st->status, strlen(st->status));
    if (st->details != nullptr) {
        char *text;
        Py_ssize_t size;
        PyBytes_AsStringAndSize(st->details, &text, &size);
        headers[count++] = header("grpc-message", text, (size_t)size);
    }
    return count;
}

/* A frame of copies fits behind a part. */
static ssize_t on_read_length(nghttp2_session *session, uint8_t type, int32_t id, int32_t window, int32_t stream_window,
                              uint32_t frame, void *user) {
    (void)session, (void)type, (void)id, (void)user;
    ssize_t most = window < stream_window ? window : stream_window;
    if (most > DATA_FRAME) most = DATA_FRAME;
    return most < (ssize_t)frame ? most : (ssize_t)frame;
}

static ssize_t on_read(nghttp2_session *session, int32_t id, uint8_t *buffer, size_t most, uint32_t *flags,
                       nghttp2_data_source *source, void *user) {
    Stream *st = static_cast<Stream *>(source->ptr);
    size_t size = st->unsent < most ? st->unsent : most;
    (void)buffer;
    if (size == st->unsent && st->is_finished) {
        nghttp2_nv trailers[2];
        size_t count = static_cast<Session *>(user)->is_client ? 0 : add_status(st, trailers, 0);
        *flags |= count ? DATA_EOF | DATA_NO_END_STREAM : DATA_EOF;
        if (count && ng.submit_trailer(session, id, trailers, count)) return ERR_CALLBACK;
    } else if (size == 0) {
        st->is_deferred = 1;
        return ERR_DEFERRED;
    }
    *flags |= DATA_NO_COPY;
    return (ssize_t)size;
}

/* A client that has its status need not send the rest of its messages. */
static int on_frame_sent(nghttp2_session *session, const nghttp2_frame_hd *frame, void *user) {
    Session *s = static_cast<Session *>(user);
    if (frame->type == HEADERS) s->has_sent = 1;
    if (frame->type != HEADERS || !(frame->flags & END_STREAM)) return 0;
    Stream *st = find(s, frame->stream_id);
    if (st == nullptr || st->has_all) return 0;
    return ng.submit_rst_stream(session, 0, frame->stream_id, NO_ERROR) ? ERR_CALLBACK : 0;
}

/* --- Methods --- */

static PyObject *failed(int code) {
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ConnectionError, code < 0 ? ng.strerror(code) : "the session has failed");
    return nullptr;
}

static PyObject *feed(Session *s, PyObject *const *arguments, Py_ssize_t count) {
    Py_buffer data;
    if (count != 2) return PyErr_Format(PyExc_TypeError, "feed(buffer, size)");
    Py_ssize_t size = PyLong_AsSsize_t(arguments[1]);
    if (size == -1 && PyErr_Occurred()) return nullptr;
    if (PyObject_GetBuffer(arguments[0], &data, PyBUF_SIMPLE)) return nullptr;
    if (size < 0 || size > data.len) {
        PyBuffer_Release(&data);
        return PyErr_Format(PyExc_ValueError, "the buffer has %zd bytes, not %zd", data.len, size);
    }
    ssize_t result = 0;
    s->fed = static_cast<const uint8_t *>(data.buf);
    if (s->stopped) {
        int32_t id = s->stopped;
        s->stopped = 0;
        /* Another buffer than the last time is the caller's mistake, and is not read beyond its end. */
        if (s->stopped_to > (size_t)size || s->fed_size > (size_t)size)
            PyErr_SetString(PyExc_ValueError, "after COMING, feed takes the same buffer again");
        else
            result = take_chunk(s, id, s->fed + s->stopped_from, s->stopped_to - s->stopped_from);
    }
    if (result == 0 && !s->is_flooded && !PyErr_Occurred()) {
        result = ng.session_mem_recv(s->ng, s->fed + s->fed_size, (size_t)size - s->fed_size);
        if (result >= 0) s->fed_size += (size_t)result;
    }
    if (!s->stopped) s->fed_size = 0;
    PyBuffer_Release(&data);
    if (PyErr_Occurred()) return nullptr;
    if ((result < 0 && result != ERR_PAUSE) || s->has_failed) return failed((int)result);
    if (s->is_flooded && ng.session_terminate_session(s->ng, ENHANCE_YOUR_CALM)) return failed(0);
    return Py_BuildValue("NO", taken_events(s), s->stopped ? Py_False : Py_True);
}

static PyObject *room(Session *s, PyObject *unused) {
    (void)unused;
    Stream *st = find(s, s->filling);
    if (st == nullptr || st->message == nullptr || st->place.obj == nullptr || st->is_refused || s->stopped
        || s->is_flooded)
        Py_RETURN_NONE;
    size_t size = st->size - st->filled < s->frame_left ? st->size - st->filled : s->frame_left;
    if (size < LEAST_ROOM) Py_RETURN_NONE;
    PyObject *whole = PyMemoryView_FromObject(st->message);
    PyObject *found = whole == nullptr
        ? nullptr : PySequence_GetSlice(whole, (Py_ssize_t)st->filled, (Py_ssize_t)(st->filled + size));
    Py_XDECREF(whole);
    return found;
}

static int id_of(PyObject *number) {
    long id = PyLong_AsLong(number);
    return id < 0 || id > INT32_MAX ? 0 : (int)id;
}

static PyObject *filled(Session *s, PyObject *number) {
    Stream *st = find(s, id_of(number));
    return PyErr_Occurred() ? nullptr : PyLong_FromSize_t(st == nullptr ? 0 : st->filled);
}

static PyObject *out(Session *s, PyObject *unused) {
    (void)unused;
    /* A destructor that uses the session in which a message ends, for example. */
    if (s->output != nullptr) return PyErr_Format(PyExc_RuntimeError, "out was called while it runs");
    Output *o = s->output = take_output();
    if (o == nullptr) return PyErr_NoMemory();
    int code = ng.session_send(s->ng);
    if (code == 0 && o->parts != nullptr && end_part(o)) code = ERR_CALLBACK;
    PyObject *found = o->parts;
    size_t size = o->size + o->viewed;
    if (found == nullptr && code == 0) found = PyBytes_FromStringAndSize(o->bytes, (Py_ssize_t)o->size);
    s->output = nullptr;
    leave_output(o);
    PyObject *events = code || s->has_failed || found == nullptr ? nullptr : taken_events(s);
    if (events == nullptr) {
        Py_XDECREF(found);
        return failed(code);
    }
    int is_over = !ng.session_want_read(s->ng) && !ng.session_want_write(s->ng);
    return Py_BuildValue("NnNO", found, (Py_ssize_t)size, events, is_over ? Py_True : Py_False);
}

static PyObject *take(Session *s, PyObject *number) {
    int id = id_of(number), result = NEEDS_MORE, code = 0;
    if (PyErr_Occurred()) return nullptr;
    Stream *st = find(s, id);
    if (st == nullptr || st->is_refused) Py_RETURN_NONE;
    size_t used = 0, part = 0;
    st->is_wanted = 1;
    while (result == NEEDS_MORE && st->held_from + used < st->held_to) {
        const uint8_t *from = (uint8_t *)st->held + st->held_from + used;
        result = fill(s, st, from, st->held_to - st->held_from - used, &part, &code);
        used += part;
    }
    if (result == IS_REFUSED) {
        st->is_refused = 1;
        used = st->held_to - st->held_from;
    }
    st->held_from += used;
    if (st->held_from == st->held_to) {
        PyMem_Free(st->held);
        st->held = nullptr;
        st->held_from = st->held_to = st->held_capacity = 0;
    }
    credit(s, id, used);
    if (s->has_failed) return failed(0);
    if (result == IS_REFUSED) return Py_BuildValue("Oin", Py_None, code, (Py_ssize_t)st->size);
    if (result == NEEDS_MORE) Py_RETURN_NONE;
    if (result == IS_COMING) {
        size_t first = st->held_to - st->held_from;
        if (first > LOOKED_AT) first = LOOKED_AT;
        return Py_BuildValue("y#in", st->held + st->held_from, (Py_ssize_t)first, COMING, (Py_ssize_t)st->size);
    }
    PyObject *message = taken_message(st);
    return Py_BuildValue("Nin", message, (int)st->prefix[0], (Py_ssize_t)st->size);
}

/* place(stream, memory) */
static PyObject *place(Session *s, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "place(stream, memory)");
    Stream *st = find(s, id_of(arguments[0]));
    if (PyErr_Occurred()) return nullptr;
    if (st == nullptr || st->message != nullptr || !st->has_come) Py_RETURN_FALSE;
    if (PyObject_GetBuffer(arguments[1], &st->place, PyBUF_WRITABLE)) return nullptr;
    if ((size_t)st->place.len != st->size) {
        PyErr_Format(PyExc_ValueError, "the message has %zd bytes, and its memory %zd", (Py_ssize_t)st->size,
            st->place.len);
        PyBuffer_Release(&st->place);
        return nullptr;
    }
    Py_INCREF(arguments[1]);
    st->message = arguments[1];
    st->at = static_cast<char *>(st->place.buf);
    st->filled = 0;
    Py_RETURN_TRUE;
}

/* Add a message, which is an object with bytes or a tuple of them. */
static int add_message(Session *s, Stream *st, PyObject *message, int is_compressed, int is_awaited) {
    Piece *first = nullptr, **last = &first, *piece, *newest = nullptr;
    size_t size = 0;
    int is_tuple = PyTuple_Check(message);
    Py_ssize_t count = is_tuple ? PyTuple_Size(message) : 1;
    for (Py_ssize_t i = 0; i < count; i++) {
        piece = static_cast<Piece *>(PyMem_Calloc(1, sizeof *piece));
        if (piece == nullptr) PyErr_NoMemory();
        if (piece == nullptr || PyObject_GetBuffer(is_tuple ? PyTuple_GetItem(message, i) : message, &piece->bytes,
            PyBUF_SIMPLE)) {
            PyMem_Free(piece);
            free_chain(first);
            return -1;
        }
        if (piece->bytes.len == 0 && first != nullptr) {
            PyBuffer_Release(&piece->bytes);
            PyMem_Free(piece);
            continue;
        }
        size += (size_t)piece->bytes.len;
        *last = piece;
        last = &piece->next;
        newest = piece;
    }
    if (first == nullptr || size > UINT32_MAX) {
        PyErr_Format(PyExc_OverflowError, "a message of %zd bytes in %zd pieces", (Py_ssize_t)size, count);
        free_chain(first);
        return -1;
    }
    newest->is_awaited = is_awaited;
    first->prefix_size = sizeof first->prefix;
    first->prefix[0] = (char)is_compressed;
    for (int i = 0; i < 4; i++) first->prefix[1 + i] = (char)(size >> (24 - 8 * i));
    *st->last = first;
    st->last = last;
    st->unsent += sizeof first->prefix + size;
    s->unsent += sizeof first->prefix + size;
    return 0;
}

static int begin(Session *s, Stream *st) {
    nghttp2_nv headers[6];
    size_t count = 0;
    headers[count++] = header(":status", "200", 3);
    headers[count++] = header("content-type", "application/grpc", 16);
    nghttp2_data_provider provider;
    provider.source.ptr = st;
    provider.read = on_read;
    int has_messages = st->first != nullptr || !st->is_finished;
    if (has_messages) {
        headers[count++] = header("grpc-accept-encoding", "identity, deflate, gzip", 23);
        if (s->compresses) headers[count++] = header("grpc-encoding", "gzip", 4);
    } else {
        count = add_status(st, headers, count);
    }
    st->has_begun = 1;
    return ng.submit_response(s->ng, st->id, headers, count, has_messages ? &provider : nullptr);
}

/* send(stream, message or None, is compressed, is awaited, status or -1, details or None) */
static PyObject *send_message(Session *s, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 6)
        return PyErr_Format(PyExc_TypeError, "send(stream, message, is_compressed, is_awaited, status, details)");
    Stream *st = find(s, id_of(arguments[0]));
    long is_compressed = PyLong_AsLong(arguments[2]), is_awaited = PyLong_AsLong(arguments[3]),
        status = PyLong_AsLong(arguments[4]);
    if (PyErr_Occurred()) return nullptr;
    if (arguments[5] != Py_None && !PyObject_TypeCheck(arguments[5], &PyBytes_Type))
        return PyErr_Format(PyExc_TypeError, "details are bytes or None");
    if (st == nullptr || st->is_finished) Py_RETURN_FALSE;
    if (arguments[1] != Py_None && add_message(s, st, arguments[1], is_compressed != 0, is_awaited != 0))
        return nullptr;
    if (status >= 0) {
        st->is_finished = 1;
        snprintf(st->status, sizeof st->status, "%d", (int)(status % 100));
        if (arguments[5] != Py_None) {
            Py_INCREF(arguments[5]);
            st->details = arguments[5];
        }
    }
    int code = 0;
    if (!st->has_begun) {
        code = begin(s, st);
    } else if (st->is_deferred) {
        st->is_deferred = 0;
        code = ng.session_resume_data(s->ng, st->id);
    }
    if (code) return failed(code);
    Py_RETURN_TRUE;
}

/* request(headers, message, is last, is wanted): of a client */
static PyObject *request(Session *s, PyObject *const *arguments, Py_ssize_t count) {
    enum { MOST = 64 };
    nghttp2_nv headers[MOST];
    if (count != 4 || !PyTuple_Check(arguments[0]) || PyTuple_Size(arguments[0]) > MOST)
        return PyErr_Format(PyExc_TypeError, "request(up to %d headers, message, is_last, is_wanted)",
                            static_cast<int>(MOST));
    long is_last = PyLong_AsLong(arguments[2]), is_wanted = PyLong_AsLong(arguments[3]);
    Py_ssize_t size = PyTuple_Size(arguments[0]);
    for (Py_ssize_t i = 0; i < size; i++) {
        char *name, *value;
        Py_ssize_t value_size;
        if (!PyArg_ParseTuple(PyTuple_GetItem(arguments[0], i), "yy#", &name, &value, &value_size)) return nullptr;
        headers[i] = header(name, value, (size_t)value_size);
    }
    if (PyErr_Occurred()) return nullptr;
    if (!s->is_client) return PyErr_Format(PyExc_ValueError, "a server sends no requests");
    Stream *st = add_stream(s);
    if (st == nullptr) return PyErr_NoMemory();
    st->is_finished = is_last != 0;
    st->has_begun = 1;
    /* What nobody wants is dropped as it comes. */
    st->is_refused = !is_wanted;
    nghttp2_data_provider provider;
    provider.source.ptr = st;
    provider.read = on_read;
    int32_t id = 0;
    if (!add_message(s, st, arguments[1], 0, 0)) {
        id = ng.submit_request(s->ng, nullptr, headers, (size_t)size, &provider, st);
    }
    if (id <= 0) {
        free_stream(s, st);
        return failed(id);
    }
    st->id = id;
    return PyLong_FromLong(id);
}

static PyObject *cancel(Session *s, PyObject *number) {
    int id = id_of(number);
    if (PyErr_Occurred()) return nullptr;
    int code = find(s, id) == nullptr ? 0 : ng.submit_rst_stream(s->ng, 0, id, CANCEL);
    if (code) return failed(code);
    Py_RETURN_NONE;
}

static PyObject *ping(Session *s, PyObject *unused) {
    (void)unused;
    int code = ng.submit_ping(s->ng, 0, nullptr);
    if (code) return failed(code);
    Py_RETURN_NONE;
}

static PyObject *goaway(Session *s, PyObject *const *arguments, Py_ssize_t count) {
    char *text;
    Py_ssize_t size;
    if (count != 2) return PyErr_Format(PyExc_TypeError, "goaway(code, text)");
    long code = PyLong_AsLong(arguments[0]);
    if (PyErr_Occurred() || PyBytes_AsStringAndSize(arguments[1], &text, &size)) return nullptr;
    int32_t last = ng.session_get_last_proc_stream_id(s->ng);
    int result = ng.submit_goaway(s->ng, 0, last, (uint32_t)code, (uint8_t *)text, (size_t)size);
    if (result) return failed(result);
    Py_RETURN_NONE;
}

static PyObject *replenish(Session *s, PyObject *unused) {
    (void)unused;
    s->idle_frames = IDLE_FRAMES_A_SECOND;
    s->resets = s->resets + RESETS_A_SECOND < MOST_RESETS ? s->resets + RESETS_A_SECOND : MOST_RESETS;
    return Py_BuildValue("nK", (Py_ssize_t)s->unsent, s->sent);
}

static int init(PyObject *self, PyObject *arguments, PyObject *names) {
    static const char *keywords[] = {"max_message_bytes", "compresses", "is_client", nullptr};
    Session *s = reinterpret_cast<Session *>(self);
    Py_ssize_t max_message;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "np|p", const_cast<char **>(keywords), &max_message,
                                     &s->compresses, &s->is_client)) {
        return -1;
    }
    if (callbacks == nullptr || s->ng != nullptr || max_message < 0) {
        PyErr_SetString(PyExc_ValueError,
            callbacks == nullptr ? "nghttp2 was not opened" : "a session is made once, with a limit");
        return -1;
    }
    s->max_message = (size_t)max_message;
    s->idle_frames = IDLE_FRAMES_A_SECOND;
    s->resets = MOST_RESETS;
    nghttp2_option *option;
    if (ng.option_new(&option)) {
        PyErr_NoMemory();
        return -1;
    }
    ng.option_set_no_closed_streams(option, 1);
    ng.option_set_no_auto_window_update(option, 1);
    int code = (s->is_client ? ng.session_client_new2 : ng.session_server_new2)(&s->ng, callbacks, s, option);
    ng.option_del(option);
    nghttp2_settings_entry first = {MAX_CONCURRENT_STREAMS, MOST_STREAMS};
    if (s->is_client) first = {ENABLE_PUSH, 0};
    nghttp2_settings_entry settings[] = {first,
                                         {INITIAL_WINDOW_SIZE, STREAM_WINDOW},
                                         {MAX_FRAME_SIZE, FRAME},
                                         {MAX_HEADER_LIST_SIZE, MOST_HEAD}};
    if (code == 0) code = ng.submit_settings(s->ng, 0, settings, sizeof settings / sizeof *settings);
    if (code == 0) code = ng.session_set_local_window_size(s->ng, 0, 0, WINDOW);
    if (code == 0) return 0;
    failed(code);
    return -1;
}

static void dealloc(PyObject *self) {
    Session *s = reinterpret_cast<Session *>(self);
    PyTypeObject *type = Py_TYPE(self);
    while (s->streams != nullptr) free_stream(s, s->streams);
    if (s->ng != nullptr) ng.session_del(s->ng);
    Py_XDECREF(s->events);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

#define METHOD(name, function, flags, text) \
    {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)(void)>(function)), flags, text}
static PyMethodDef methods[] = {
    METHOD("feed", feed, METH_FASTCALL,
        "Read so many bytes of a buffer; return events, and False if it has to be fed again. Raises ConnectionError."),
    METHOD("room", room, METH_NOARGS, "Return memory to receive into and to feed next, or None for any."),
    METHOD("filled", filled, METH_O, "Return how many bytes have come of the message that is coming."),
    METHOD("out", out, METH_NOARGS,
        "Return bytes for the client, their size, events, and whether the session is over. Raises ConnectionError."),
    METHOD("take", take, METH_O,
        "Return the next message of a stream, if it has come, whether it is compressed, and its size."),
    METHOD("place", place, METH_FASTCALL,
        "Receive the message that is coming into this memory. Returns False if none is coming."),
    METHOD("send", send_message, METH_FASTCALL,
        "Send a message, a status, or both. Returns False if the stream has ended."),
    METHOD("request", request, METH_FASTCALL, "Send a request to a server; return its stream."),
    METHOD("cancel", cancel, METH_O, "Reset a stream, if it is still open."),
    METHOD("ping", ping, METH_NOARGS, "Send a ping."),
    METHOD("goaway", goaway, METH_FASTCALL, "Tell the client that no further streams are accepted."),
    METHOD("replenish", replenish, METH_NOARGS,
        "Refill the budgets against floods, once a second, and return the bytes of messages that wait, and those "
        "that left."),
    {nullptr, nullptr, 0, nullptr},
};
static PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char *>("One HTTP/2 connection. For one thread.")},
    {Py_tp_init, reinterpret_cast<void *>(init)},
    {Py_tp_dealloc, reinterpret_cast<void *>(dealloc)},
    {Py_tp_methods, methods},
    {0, nullptr},
};
static PyType_Spec spec = {"moonpool.runtime.server.grpc._http2.Session", sizeof(Session), 0, Py_TPFLAGS_DEFAULT,
    slots};

static int make_callbacks(void) {
    nghttp2_session_callbacks *made;
    if (ng.session_callbacks_new(&made)) return -1;
    ng.session_callbacks_set_send_callback(made, on_send);
    ng.session_callbacks_set_send_data_callback(made, on_send_data);
    ng.session_callbacks_set_data_source_read_length_callback(made, on_read_length);
    ng.session_callbacks_set_on_begin_frame_callback(made, on_begin_frame);
    ng.session_callbacks_set_on_begin_headers_callback(made, on_begin_headers);
    ng.session_callbacks_set_on_frame_recv_callback(made, on_frame);
    ng.session_callbacks_set_on_frame_send_callback(made, on_frame_sent);
    ng.session_callbacks_set_on_header_callback(made, on_header);
    ng.session_callbacks_set_on_data_chunk_recv_callback(made, on_chunk);
    ng.session_callbacks_set_on_stream_close_callback(made, on_close);
    callbacks = made;
    return 0;
}

static PyObject *open_library(PyObject *self, PyObject *name) {
    (void)self;
    PyObject *encoded;
    if (!PyUnicode_FSConverter(name, &encoded)) return nullptr;
    if (callbacks == nullptr) {
        void *library = dlopen(PyBytes_AsString(encoded), RTLD_NOW | RTLD_LOCAL);
        const char *missing = library == nullptr ? dlerror() : nullptr;
#define FIND(result, function, parameters) \
        if (missing == nullptr && (*(void **)&ng.function = dlsym(library, "nghttp2_" #function)) == nullptr) \
            missing = "it has no nghttp2_" #function;
        FUNCTIONS(FIND)
        if (missing == nullptr && make_callbacks()) missing = "no memory";
        if (missing != nullptr) {
            PyErr_SetString(PyExc_OSError, missing);
            if (library != nullptr) dlclose(library);
        }
    }
    Py_DECREF(encoded);
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"open_library", open_library, METH_O, "Find nghttp2 by the name or path of its library, once. Raises OSError."},
    {nullptr, nullptr, 0, nullptr},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_http2", "gRPC over HTTP/2 without I/O.", -1, functions,
                                    nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit__http2(void) {
    PyObject *made = PyModule_Create(&module);
    PyObject *type = made != nullptr ? PyType_FromSpec(&spec) : nullptr;
    if (type == nullptr || PyModule_AddObjectRef(made, "Session", type) || moonpool::python::add_sources(made))
        Py_CLEAR(made);
    Py_XDECREF(type);
    return made;
}
