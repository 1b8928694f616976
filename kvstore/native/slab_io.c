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
 * always may. A thread waits for several of them at once instead of once a call, and computes checksums meanwhile. A
 * slot larger than a call is several. 0: one call after the other, a large slot in one; so it is, too, where the kernel
 * gives no queue.
 *
 * carry.h carries out, pieces.h cuts, trailer.h and xxh3.h are what lies on the disk, which tests hold equal to
 * tiers/nvme/trailer.py.
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
#include <time.h>
#include <unistd.h>

#include "carry.h"
#include "moves.h"
#include "pieces.h"
#include "xxh3.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "packed records are little-endian"
#endif

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
