/* Moves between DRAM and a slab, compiled: what tiers/nvme/carry.py does in Python, a whole batch without interpreter.
 *
 *     transfer(fd, slots, slot_bytes, moves, bases, sizes, scratch, written_ms, replies, faults, window) -> failed
 *     checksum(data[, how]) -> the xxh3-128 of at least 241 bytes, 16 bytes little-endian; how: see xxh3.h
 *     is_queued(fd, data) -> whether the kernel takes a read of `data` from the file and goes on before it has ended
 *     arrange(moves, shares, piece_bytes, call_bytes, arranged) -> [(begin, end), ...]: tiers/nvme/pieces.py
 *
 * `moves` (MOVE[n]) are to or from a slab of `slots` slots of `slot_bytes`; `bases` and `sizes` (u64[m]) say where
 * each DRAM extent is mapped in this process (0: not). Neighbours on the disk are one call, with the trailers between
 * them in `scratch`. Fills `replies` (REPLY[n]) and `faults` (i32[n]: 0, an errno, or one of the negative numbers
 * below). Answers how many failed; -1, and has done nothing, where the moves are not of one kind, one slab and
 * ascending places.
 *
 * `window`: bytes that may be under way at a time, in calls that the kernel has in a queue (io_submit(2)); two calls
 * always may. A thread waits for several of them at once instead of once a call, and
 * computes checksums meanwhile. A slot larger than a call is several. 0: one call after the other, a large slot in one;
 * so it is, too, where the kernel gives no queue.
 *
 * Every trailer equals that of tiers/nvme/trailer.py, which tests hold.
 *
 * Only the stable ABI of Python 3.11 (PEP 384). The interpreter lock is released throughout; a thread keeps nothing
 * between calls but its queue.
 */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <errno.h>
#include <linux/aio_abi.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "moves.h"
#include "pieces.h"
#include "xxh3.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "packed records are little-endian"
#endif

enum { SHORT = -1, NO_SLOT = -2, NO_MEMORY = -3 }; /* faults; a place in a slab, or in memory, that is not there */
enum { MOST_CALL_BYTES = (4 << 20) + (64 << 10) }; /* larger calls are no faster */
enum { DEPTH = 128, PART_BYTES = 4 << 20, TURN_BYTES = 4 << 20 };

/* tiers/nvme/trailer.py. */
typedef struct {
    uint64_t magic;
    uint32_t version, generation;
    uint64_t offset;
    uint32_t length, depth;
    uint64_t written_ms;
    uint8_t hash[16], parent[16], ns_digest[16], checksum[16];
    uint64_t self;
} Trailer;

_Static_assert(sizeof(Trailer) == 112, "the record has no gaps");
enum { SIGNED = sizeof(Trailer) - sizeof(uint64_t) };
static const char MAGIC[8] = {'K', 'V', 'S', 'T', 'R', 'A', 'I', 'L'};
enum { VERSION = 1 };

/* ------------------------------------------------------------ moves */

typedef struct {
    int fd, kind;
    uint64_t slots, slot_bytes, stride;
    const Move *moves;
    const uint64_t *bases, *sizes;
    size_t extents;
    uint8_t *scratch;
    size_t scratch_slots;
    uint64_t written_ms;
    Reply *replies;
    int32_t *faults;
    Take take;
    aio_context_t queue; /* 0: one call after the other */
    uint64_t window;
} Job;

static uint8_t *payload_of(const Job *job, size_t at)
{
    const Move *move = job->moves + at;
    return (uint8_t *)(uintptr_t)(job->bases[move->dram_extent] + move->dram_offset);
}

static uint8_t *page_of(const Job *job, size_t at)
{
    return job->scratch + at % job->scratch_slots * PAGE;
}

static void write_trailer(const Job *job, size_t at)
{
    const Move *move = job->moves + at;
    Trailer trailer = {
        .version = VERSION,
        .generation = move->generation,
        .offset = move->nvme_offset,
        .length = move->length,
        .depth = move->depth,
        .written_ms = job->written_ms,
    };
    memcpy(&trailer.magic, MAGIC, sizeof MAGIC);
    memcpy(trailer.hash, move->hash, 16);
    memcpy(trailer.parent, move->parent, 16);
    memcpy(trailer.ns_digest, move->ns_digest, 16);
    memcpy(trailer.checksum, job->replies[at].checksum, 16);
    trailer.self = hash_short((const uint8_t *)&trailer, SIGNED);
    memcpy(page_of(job, at), &trailer, sizeof trailer);
}

_Static_assert(SIGNED > 96 && SIGNED <= 128, "what hash_short takes");

/* Depth, parent and time are the writer's word: a read does not know them. */
static int is_of(const Job *job, size_t at)
{
    const Move *move = job->moves + at;
    Trailer found;
    memcpy(&found, page_of(job, at), sizeof found);
    return !memcmp(&found.magic, MAGIC, sizeof MAGIC) && found.version == VERSION &&
           found.self == hash_short((const uint8_t *)&found, SIGNED) && found.generation == move->generation &&
           found.offset == move->nvme_offset && found.length == move->length && !memcmp(found.hash, move->hash, 16) &&
           !memcmp(found.ns_digest, move->ns_digest, 16) &&
           !memcmp(found.checksum, job->replies[at].checksum, 16);
}

static void sum_up(const Job *job, size_t at)
{
    hash_long(job->take, payload_of(job, at), job->slot_bytes, job->replies[at].checksum);
}

/* ------------------------------------------------------------ calls */

/* Whole slots that are neighbours, or a part of one slot that is larger than a call. */
typedef struct {
    size_t begin, end;
    uint64_t from, to; /* bytes, from where slot `begin` begins; the trailer is behind the payload */
    int64_t moved;     /* or a negative errno, once `done` */
    int done;
} Call;

/* Calls of one piece, in the order of their places: made (launch), taken by the kernel (submit), answered in any order
 * (reap), and in order again looked at (settle). A checksum in the making is that of the one slot in parts. */
typedef struct {
    Call calls[DEPTH];
    struct iocb blocks[DEPTH], *waiting[DEPTH];
    struct iovec buffers[2 * MOST_SLOTS], parts[DEPTH][2];
    size_t made, settled, waiting_count, running;
    uint64_t waiting_bytes, open_bytes;
    uint64_t lanes[LANES];
    int broken; /* a part of the slot in the making did not go through */
} Line;

static uint64_t bytes_of(const Call *call)
{
    return call->to - call->from;
}

static int is_part(const Job *job, const Call *call)
{
    return bytes_of(call) < job->stride;
}

static ssize_t call_now(const Job *job, const struct iovec *buffers, int count, uint64_t offset)
{
    ssize_t moved;
    do
        moved = job->kind == WRITE ? pwritev(job->fd, buffers, count, (off_t)offset)
                                   : preadv(job->fd, buffers, count, (off_t)offset);
    while (moved < 0 && errno == EINTR);
    return moved < 0 ? -errno : moved;
}

/* Buffers of whole slots: payload, trailer, payload, trailer, ... */
static int buffers_of(const Job *job, size_t begin, size_t end, struct iovec *buffers)
{
    int count = 0;
    for (size_t at = begin; at < end; at++) {
        buffers[count++] = (struct iovec){payload_of(job, at), job->slot_bytes};
        buffers[count++] = (struct iovec){page_of(job, at), PAGE};
    }
    return count;
}

/* Moves what a call did not, and waits for it. After a call that got nowhere each slot is tried by itself: a kernel may
 * fail a whole call for one bad sector in it, and the bad one costs its own block only. */
static void call_again(const Job *job, size_t begin, size_t end, struct iovec *buffers)
{
    buffers_of(job, begin, end, buffers);
    size_t most = end - begin;
    for (size_t at = begin; at < end;) {
        size_t count = end - at < most ? end - at : most;
        ssize_t moved = call_now(job, buffers + 2 * (at - begin), (int)(2 * count), job->moves[at].nvme_offset);
        size_t whole = moved < 0 ? 0 : (size_t)moved / job->stride;
        at += whole;
        if (whole)
            continue;
        if (count > 1) {
            most = 1;
            continue;
        }
        job->faults[at] = moved < 0 ? (int32_t)-moved : SHORT;
        job->replies[at].status = IO_ERROR;
        at++;
    }
}

/* ------------------------------------------------------------ several at a time */

/* Takes a part into the slot's checksum; the last one ends it. */
static void sum_part(const Job *job, Line *line, const Call *call)
{
    const uint8_t *data = payload_of(job, call->begin);
    if (!call->from)
        hash_begin(line->lanes);
    if (call->to < job->stride)
        job->take(line->lanes, data + call->from, bytes_of(call) / LONG_BLOCK, 0);
    else
        hash_end(job->take, line->lanes, data, job->slot_bytes, call->from, job->replies[call->begin].checksum);
}

/* Checksums and trailers, before a write. */
static void seal(const Job *job, Line *line, const Call *call)
{
    if (is_part(job, call)) {
        sum_part(job, line, call);
        if (call->to == job->stride)
            write_trailer(job, call->begin);
        return;
    }
    for (size_t at = call->begin; at < call->end; at++) {
        sum_up(job, at);
        write_trailer(job, at);
    }
}

static void submit(const Job *job, Line *line)
{
    size_t taken = 0;
    while (job->queue && taken < line->waiting_count) {
        long count = syscall(SYS_io_submit, job->queue, (long)(line->waiting_count - taken), line->waiting + taken);
        if (count <= 0)
            break;
        taken += (size_t)count;
    }
    line->running += taken;
    for (; taken < line->waiting_count; taken++) { /* which the kernel did not take */
        const struct iocb *block = line->waiting[taken];
        Call *call = line->calls + block->aio_data;
        call->moved = call_now(job, (const struct iovec *)(uintptr_t)block->aio_buf, (int)block->aio_nbytes,
                               (uint64_t)block->aio_offset);
        call->done = 1;
    }
    line->waiting_count = line->waiting_bytes = 0;
}

static void launch(const Job *job, Line *line, Call call)
{
    size_t index = line->made++ % DEPTH, first = call.begin;
    line->calls[index] = call;
    if (job->kind == WRITE)
        seal(job, line, &call);
    struct iovec *buffers = line->buffers + 2 * (first % job->scratch_slots);
    int count;
    if (is_part(job, &call)) {
        buffers = line->parts[index];
        uint64_t end = call.to < job->slot_bytes ? call.to : job->slot_bytes;
        buffers[0] = (struct iovec){payload_of(job, first) + call.from, end - call.from};
        buffers[1] = (struct iovec){page_of(job, first), call.to - end};
        count = call.to > end ? 2 : 1;
    } else
        count = buffers_of(job, first, call.end, buffers);
    line->blocks[index] = (struct iocb){
        .aio_data = index,
        .aio_lio_opcode = job->kind == WRITE ? IOCB_CMD_PWRITEV : IOCB_CMD_PREADV,
        .aio_fildes = (uint32_t)job->fd,
        .aio_buf = (uint64_t)(uintptr_t)buffers,
        .aio_nbytes = (uint64_t)count,
        .aio_offset = (int64_t)(job->moves[first].nvme_offset + call.from),
    };
    line->waiting[line->waiting_count++] = line->blocks + index;
    line->waiting_bytes += bytes_of(&call);
    line->open_bytes += bytes_of(&call);
    if (line->waiting_bytes >= TURN_BYTES || !line->running)
        submit(job, line);
}

/* Waits for so many calls as make a turn, so that there are not as many turns as calls. */
static void reap(const Job *job, Line *line)
{
    struct io_event events[DEPTH];
    size_t least = TURN_BYTES / bytes_of(line->calls + line->settled % DEPTH);
    least = least < 1 ? 1 : least < line->running ? least : line->running;
    long count = syscall(SYS_io_getevents, job->queue, (long)least, (long)DEPTH, events, NULL);
    if (count < 0 && errno != EINTR)
        abort(); /* calls are under way into memory that we could not call our own again */
    for (long i = 0; i < count; i++) {
        Call *call = line->calls + events[i].data;
        call->moved = events[i].res;
        call->done = 1;
        line->running--;
    }
}

static void settle(const Job *job, Line *line)
{
    const Call *call = line->calls + line->settled++ % DEPTH;
    line->open_bytes -= bytes_of(call);
    int part = is_part(job, call);
    line->broken = (part && call->from && line->broken) || call->moved != (int64_t)bytes_of(call);
    if (part && job->kind == READ && !line->broken)
        sum_part(job, line, call);
    if (part && call->to < job->stride)
        return;
    if (line->broken)
        call_again(job, call->begin, call->end, line->buffers + 2 * (call->begin % job->scratch_slots));
    if (job->kind == WRITE)
        return;
    for (size_t at = call->begin; at < call->end; at++) {
        if (job->faults[at])
            continue;
        if (!part || line->broken)
            sum_up(job, at);
        if (!is_of(job, at))
            job->replies[at].status = CORRUPT;
    }
}

/* The call that begins at byte `from` of slot `at`. */
static Call next_call(const Job *job, size_t at, uint64_t from, size_t count)
{
    Call call = {.begin = at, .end = at + 1, .from = from, .to = job->stride};
    if (job->queue && job->stride - from > MOST_CALL_BYTES) {
        call.to = from + PART_BYTES;
        if (call.to > job->slot_bytes - PAGE) /* a trailer has some of its payload with it */
            call.to = job->slot_bytes - PAGE;
    }
    if (from || call.to < job->stride)
        return call;
    while (call.end < count && call.to + job->stride <= MOST_CALL_BYTES && call.end % job->scratch_slots &&
           !job->faults[call.end] &&
           job->moves[call.end].nvme_offset == job->moves[call.end - 1].nvme_offset + job->stride) {
        call.end++;
        call.to += job->stride;
    }
    return call;
}

/* Whether the call may be made now: it waits for an earlier one to be settled otherwise. */
static int fits(const Job *job, const Line *line, const Call *call)
{
    size_t open = line->made - line->settled;
    if (!open)
        return 1;
    size_t oldest = line->calls[line->settled % DEPTH].begin;
    return job->queue && open < DEPTH && call->end - oldest <= job->scratch_slots &&
           (open < 2 || line->open_bytes + bytes_of(call) <= job->window);
}

static void carry_line(const Job *job, Line *line, size_t count)
{
    uint64_t from = 0;
    for (size_t at = 0; at < count || line->made > line->settled;) {
        while (at < count) {
            if (job->faults[at]) {
                at++;
                continue;
            }
            Call call = next_call(job, at, from, count);
            if (!fits(job, line, &call))
                break;
            launch(job, line, call);
            at = call.to < job->stride ? at : call.end;
            from = call.to < job->stride ? call.to : 0;
        }
        submit(job, line);
        if (line->running && !line->calls[line->settled % DEPTH].done)
            reap(job, line);
        while (line->made > line->settled && line->calls[line->settled % DEPTH].done)
            settle(job, line);
    }
}

/* What a move names that is not there; 0 where all of it is. */
static int missing(const Job *job, size_t at)
{
    const Move *move = job->moves + at;
    if (move->length != job->slot_bytes || move->nvme_offset % job->stride ||
        move->nvme_offset / job->stride >= job->slots)
        return NO_SLOT;
    size_t extent = move->dram_extent;
    uint64_t size = extent < job->extents && job->bases[extent] ? job->sizes[extent] : 0;
    return size < job->slot_bytes || move->dram_offset > size - job->slot_bytes ? NO_MEMORY : 0;
}

/* How many of the moves did not go through. */
static long carry_all(const Job *job, size_t count)
{
    Line line = {0};
    for (size_t i = 0; i < count; i++) {
        job->replies[i] = (Reply){.id = job->moves[i].id};
        job->faults[i] = missing(job, i);
        if (job->faults[i])
            job->replies[i].status = IO_ERROR;
    }
    carry_line(job, &line, count);
    long failed = 0;
    for (size_t i = 0; i < count; i++)
        failed += job->replies[i].status != OK;
    return failed;
}

/* ------------------------------------------------------------ a thread's queue */

static pthread_key_t queue_key;
static pthread_once_t queue_once = PTHREAD_ONCE_INIT;
static int has_key;

static void end_queue(void *queue)
{
    syscall(SYS_io_destroy, (aio_context_t)(uintptr_t)queue);
}

static void make_key(void)
{
    has_key = pthread_key_create(&queue_key, end_queue) == 0;
}

/* The calling thread's, which ends with it; 0 where the kernel gives none. */
static aio_context_t thread_queue(void)
{
    pthread_once(&queue_once, make_key);
    aio_context_t queue = has_key ? (aio_context_t)(uintptr_t)pthread_getspecific(queue_key) : 0;
    if (queue || !has_key || syscall(SYS_io_setup, DEPTH, &queue) < 0)
        return queue;
    if (pthread_setspecific(queue_key, (void *)(uintptr_t)queue)) {
        syscall(SYS_io_destroy, queue);
        return 0;
    }
    return queue;
}

/* ------------------------------------------------------------ for Python */

/* Whether these moves are a piece: of one kind and slab, by their places. */
static int is_piece(const Job *job, size_t count)
{
    for (size_t i = 1; i < count; i++)
        if (job->moves[i].kind != job->moves[0].kind || job->moves[i].nvme_extent != job->moves[0].nvme_extent ||
            job->moves[i].length != job->moves[0].length || job->moves[i].nvme_offset < job->moves[i - 1].nvme_offset)
            return 0;
    return count && (job->moves[0].kind == READ || job->moves[0].kind == WRITE);
}

enum { MOVES, BASES, SIZES, SCRATCH, REPLIES, FAULTS, BUFFERS };

static PyObject *carried(Job *job, const Py_buffer *buffers)
{
    Py_ssize_t count = buffers[MOVES].len / (Py_ssize_t)sizeof(Move);
    job->moves = buffers[MOVES].buf;
    job->bases = buffers[BASES].buf;
    job->sizes = buffers[SIZES].buf;
    job->extents = (size_t)buffers[BASES].len / sizeof(uint64_t);
    job->scratch = buffers[SCRATCH].buf;
    job->scratch_slots = (size_t)buffers[SCRATCH].len / PAGE;
    if (job->scratch_slots > MOST_SLOTS)
        job->scratch_slots = MOST_SLOTS;
    job->replies = buffers[REPLIES].buf;
    job->faults = buffers[FAULTS].buf;
    job->stride = job->slot_bytes + PAGE;
    if (buffers[MOVES].len % (Py_ssize_t)sizeof(Move) || buffers[BASES].len != buffers[SIZES].len ||
        buffers[SCRATCH].len < PAGE || buffers[REPLIES].len != count * (Py_ssize_t)sizeof(Reply) ||
        buffers[FAULTS].len != count * (Py_ssize_t)sizeof(int32_t) || job->slot_bytes < PAGE ||
        job->slot_bytes > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError,
                        "replies and faults are as many as moves, bases as sizes, a slot and scratch a page or more");
        return NULL;
    }
    long failed = -1;
    Py_BEGIN_ALLOW_THREADS
    if (is_piece(job, (size_t)count)) {
        job->kind = job->moves[0].kind;
        job->take = best_take();
        job->queue = job->window ? thread_queue() : 0;
        failed = carry_all(job, (size_t)count);
    }
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(failed);
}

static PyObject *transfer(PyObject *module, PyObject *arguments)
{
    (void)module;
    Job job = {0};
    Py_buffer buffers[BUFFERS];
    unsigned long long slots, slot_bytes, written_ms, window;
    if (!PyArg_ParseTuple(arguments, "iKKy*y*y*w*Kw*w*K:transfer", &job.fd, &slots, &slot_bytes, &buffers[MOVES],
                          &buffers[BASES], &buffers[SIZES], &buffers[SCRATCH], &written_ms, &buffers[REPLIES],
                          &buffers[FAULTS], &window))
        return NULL;
    job.slots = slots;
    job.slot_bytes = slot_bytes;
    job.written_ms = written_ms;
    job.window = window;
    PyObject *result = carried(&job, buffers);
    for (int i = 0; i < BUFFERS; i++)
        PyBuffer_Release(&buffers[i]);
    return result;
}

/* [(begin, end), ...]; NULL with an error set. */
static PyObject *as_list(const Piece *pieces, size_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++) {
        PyObject *pair = Py_BuildValue("(nn)", (Py_ssize_t)pieces[i].begin, (Py_ssize_t)pieces[i].end);
        if (!pair || PyList_SetItem(list, (Py_ssize_t)i, pair) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *arrange(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer moves, arranged;
    unsigned long long shares, piece_bytes, call_bytes;
    if (!PyArg_ParseTuple(arguments, "y*KKKw*:arrange", &moves, &shares, &piece_bytes, &call_bytes, &arranged))
        return NULL;
    size_t count = (size_t)moves.len / sizeof(Move);
    PyObject *result = NULL;
    Place *places = malloc(count * sizeof *places + 1);
    Piece *pieces = malloc(count * sizeof *pieces + 1);
    if (!places || !pieces)
        PyErr_NoMemory();
    else if (!shares || (size_t)moves.len % sizeof(Move) || arranged.len != moves.len)
        PyErr_SetString(PyExc_ValueError, "as much room as there are moves, and a share or more");
    else {
        sort_moves(moves.buf, count, places, arranged.buf);
        result = as_list(pieces, cut_moves(arranged.buf, count, shares, piece_bytes, call_bytes, pieces));
    }
    free(places);
    free(pieces);
    PyBuffer_Release(&moves);
    PyBuffer_Release(&arranged);
    return result;
}

static PyObject *checksum(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer data;
    const char *name = NULL;
    uint8_t out[16];
    if (!PyArg_ParseTuple(arguments, "y*|s:checksum", &data, &name))
        return NULL;
    Take take = name ? take_named(name) : best_take();
    int good = take && data.len > 240;
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        hash_long(take, data.buf, (size_t)data.len, out);
        Py_END_ALLOW_THREADS
    } else
        PyErr_SetString(PyExc_ValueError, take ? "a payload has more than 240 bytes" : "not on this processor");
    PyBuffer_Release(&data);
    return good ? PyBytes_FromStringAndSize((const char *)out, sizeof out) : NULL;
}

/* Whether a read of all of `data` from the file's start had not ended when the kernel had taken it. */
static int runs_behind(int fd, Py_buffer *data)
{
    struct timespec now = {0};
    struct io_event event;
    struct iocb block = {
        .aio_lio_opcode = IOCB_CMD_PREAD,
        .aio_fildes = (uint32_t)fd,
        .aio_buf = (uint64_t)(uintptr_t)data->buf,
        .aio_nbytes = (uint64_t)data->len,
    }, *blocks[] = {&block};
    aio_context_t queue = thread_queue();
    if (!queue || syscall(SYS_io_submit, queue, 1L, blocks) != 1)
        return 0;
    long ended = syscall(SYS_io_getevents, queue, 0L, 1L, &event, &now);
    if (ended == 1)
        return 0;
    while ((ended = syscall(SYS_io_getevents, queue, 1L, 1L, &event, NULL)) < 0 && errno == EINTR)
        ;
    return ended == 1 && event.res == data->len;
}

static PyObject *is_queued(PyObject *module, PyObject *arguments)
{
    (void)module;
    int fd, behind;
    Py_buffer data;
    if (!PyArg_ParseTuple(arguments, "iw*:is_queued", &fd, &data))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    behind = runs_behind(fd, &data);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyBool_FromLong(behind);
}

static PyMethodDef methods[] = {
    {"transfer", transfer, METH_VARARGS,
     "transfer(fd, slots, slot_bytes, moves, bases, sizes, scratch, written_ms, replies, faults, window)\n--\n\n"
     "Carries out moves of one kind and slab; fills `replies` and `faults`; how many failed, -1: not one piece."},
    {"arrange", arrange, METH_VARARGS,
     "arrange(moves, shares, piece_bytes, call_bytes, arranged)\n--\n\n"
     "Sorts `moves` into `arranged` by kind, slab and place; the pieces that they are cut into, as ranges of it."},
    {"checksum", checksum, METH_VARARGS,
     "checksum(data, how='')\n--\n\nxxh3-128 of more than 240 bytes; `how`: as xxh3.h names them, else the best here."},
    {"is_queued", is_queued, METH_VARARGS,
     "is_queued(fd, data)\n--\n\nWhether the kernel takes a read of `data` and goes on before it has ended."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvstore._slab_io",
    .m_doc = "Moves between DRAM and a slab, compiled from kvstore/native/slab_io.c.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__slab_io(void)
{
    return PyModuleDef_Init(&definition);
}
