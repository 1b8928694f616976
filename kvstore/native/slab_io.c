/* Moves between DRAM and a slab, compiled: what tiers/nvme/carry.py does in Python, a whole batch without interpreter.
 *
 *     transfer(fd, slots, slot_bytes, moves, bases, sizes, scratch, written_ms, replies, faults) -> how many failed
 *     checksum(data[, how]) -> the xxh3-128 of at least 241 bytes, 16 bytes little-endian; how: avx512, avx2, plain
 *
 * `moves` (MOVE[n]) are to or from a slab of `slots` slots of `slot_bytes`; `bases` and `sizes` (u64[m]) say where
 * each DRAM extent is mapped in this process (0: not). Neighbours on the disk are one call, with the trailers between
 * them in `scratch`. Fills `replies` (REPLY[n]) and `faults` (i32[n]: 0, an errno, or one of the negative numbers
 * below). Answers -1, and has done nothing, where the moves are not of one kind, one slab and ascending places.
 *
 * XXH3 as its specification defines it (github.com/Cyan4973/xxHash, doc/xxhash_spec.md): the form for long inputs with
 * 128 bits, and that of 97 to 128 bytes with 64, which is what a trailer signs itself with. Tests hold both equal to
 * the xxhash package, and every trailer equal to that of tiers/nvme/trailer.py.
 *
 * Only the stable ABI of Python 3.11 (PEP 384). The interpreter lock is released throughout; nothing is kept between
 * calls.
 */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "packed records are little-endian"
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#define X86 1
#endif

enum { PAGE = 4096, MOST_SLOTS = 512, READ = 1, WRITE = 2, OK = 0, CORRUPT = 1, IO_ERROR = 2 };
enum { SHORT = -1, NO_SLOT = -2, NO_MEMORY = -3 }; /* faults; a place in a slab, or in memory, that is not there */
enum { MOST_CALL_BYTES = (4 << 20) + (64 << 10) };  /* larger calls are no faster */

/* kvstore/wire/packed.py: MOVE and REPLY. */
typedef struct {
    uint64_t id;
    uint8_t kind, pad;
    uint16_t dram_extent;
    uint32_t dram_slot;
    uint64_t dram_offset, nvme_offset;
    uint32_t nvme_slot;
    uint16_t nvme_extent, pad2;
    uint32_t length, generation, name_space, depth;
    uint8_t hash[16], parent[16], ns_digest[16];
} Move;

typedef struct {
    uint64_t id;
    uint32_t status, pad;
    uint8_t checksum[16];
} Reply;

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

_Static_assert(sizeof(Move) == 104 && sizeof(Reply) == 32 && sizeof(Trailer) == 112, "the records have no gaps");
enum { SIGNED = sizeof(Trailer) - sizeof(uint64_t) };
static const char MAGIC[8] = {'K', 'V', 'S', 'T', 'R', 'A', 'I', 'L'};
enum { VERSION = 1 };

/* ------------------------------------------------------------ XXH3 */

enum { STRIPE = 64, SECRET = 192, LANES = 8, STRIPES = (SECRET - STRIPE) / 8, LONG_BLOCK = STRIPES * STRIPE };

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87u
#define PRIME64_2 0xC2B2AE3D27D4EB4Fu
#define PRIME64_3 0x165667B19E3779F9u
#define PRIME64_4 0x85EBCA77C2B2AE63u
#define PRIME64_5 0x27D4EB2F165667C5u
#define PRIME_MIX 0x165667919E3779F9u

static const uint8_t secret[SECRET] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t load64(const uint8_t *p)
{
    uint64_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

static inline uint64_t fold(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t avalanche(uint64_t h)
{
    h ^= h >> 37;
    h *= PRIME_MIX;
    return h ^ h >> 32;
}

/* A state takes `count` stripes of 64 bytes with the secret sliding by 8 bytes a stripe. */
typedef void (*Take)(uint64_t *lanes, const uint8_t *data, size_t count);
static void take_plain(uint64_t *lanes, const uint8_t *data, size_t count)
{
    for (size_t n = 0; n < count; n++, data += STRIPE) {
        for (int i = 0; i < LANES; i++) {
            uint64_t value = load64(data + 8 * i), key = value ^ load64(secret + 8 * n + 8 * i);
            lanes[i ^ 1] += value;
            lanes[i] += (uint64_t)(uint32_t)key * (key >> 32);
        }
    }
}

static void scramble(uint64_t *lanes)
{
    for (int i = 0; i < LANES; i++)
        lanes[i] = (lanes[i] ^ lanes[i] >> 47 ^ load64(secret + SECRET - STRIPE + 8 * i)) * PRIME32_1;
}

#ifdef X86
__attribute__((target("avx2"))) static void take_avx2(uint64_t *lanes, const uint8_t *data, size_t count)
{
    __m256i sums[2] = {_mm256_loadu_si256((const __m256i *)lanes), _mm256_loadu_si256((const __m256i *)lanes + 1)};
    for (size_t n = 0; n < count; n++, data += STRIPE) {
        for (int i = 0; i < 2; i++) {
            __m256i value = _mm256_loadu_si256((const __m256i *)data + i);
            __m256i key = _mm256_xor_si256(value, _mm256_loadu_si256((const __m256i *)(secret + 8 * n) + i));
            __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
            sums[i] = _mm256_add_epi64(sums[i], _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2)));
            sums[i] = _mm256_add_epi64(sums[i], product);
        }
    }
    _mm256_storeu_si256((__m256i *)lanes, sums[0]);
    _mm256_storeu_si256((__m256i *)lanes + 1, sums[1]);
}

__attribute__((target("avx512f"))) static void take_avx512(uint64_t *lanes, const uint8_t *data, size_t count)
{
    __m512i sums = _mm512_loadu_si512(lanes);
    for (size_t n = 0; n < count; n++, data += STRIPE) {
        __m512i value = _mm512_loadu_si512(data);
        __m512i key = _mm512_xor_si512(value, _mm512_loadu_si512(secret + 8 * n));
        __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
        sums = _mm512_add_epi64(sums, _mm512_shuffle_epi32(value, (_MM_PERM_ENUM)_MM_SHUFFLE(1, 0, 3, 2)));
        sums = _mm512_add_epi64(sums, product);
    }
    _mm512_storeu_si512(lanes, sums);
}
#endif

/* By name, the best first; NULL where this processor has it not. */
static Take take_named(const char *name)
{
#ifdef X86
    __builtin_cpu_init();
    if (!strcmp(name, "avx512"))
        return __builtin_cpu_supports("avx512f") ? take_avx512 : NULL;
    if (!strcmp(name, "avx2"))
        return __builtin_cpu_supports("avx2") ? take_avx2 : NULL;
#endif
    return strcmp(name, "plain") ? NULL : take_plain;
}

static Take best_take(void)
{
    Take found = take_named("avx512");
    if (!found)
        found = take_named("avx2");
    return found ? found : take_plain;
}

static uint64_t merge(const uint64_t *lanes, const uint8_t *key, uint64_t start)
{
    for (int i = 0; i < 4; i++)
        start += fold(lanes[2 * i] ^ load64(key + 16 * i), lanes[2 * i + 1] ^ load64(key + 16 * i + 8));
    return avalanche(start);
}

/* XXH3 with 128 bits, no seed, for more than 240 bytes. */
static void hash_long(Take take, const uint8_t *data, size_t nbytes, uint8_t *out)
{
    uint64_t lanes[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    size_t blocks = (nbytes - 1) / LONG_BLOCK;
    for (size_t n = 0; n < blocks; n++) {
        /* Payloads come from memory, not from a cache. The processor runs ahead by itself, but not over pages. */
        if (n % (PAGE / LONG_BLOCK) == 0)
            __builtin_prefetch(data + n * LONG_BLOCK + PAGE);
        take(lanes, data + n * LONG_BLOCK, STRIPES);
        scramble(lanes);
    }
    take(lanes, data + blocks * LONG_BLOCK, (nbytes - 1 - blocks * LONG_BLOCK) / STRIPE);
    const uint8_t *last = data + nbytes - STRIPE, *key = secret + SECRET - STRIPE - 7;
    for (int i = 0; i < LANES; i++) {
        uint64_t value = load64(last + 8 * i), mixed = value ^ load64(key + 8 * i);
        lanes[i ^ 1] += value;
        lanes[i] += (uint64_t)(uint32_t)mixed * (mixed >> 32);
    }
    uint64_t low = merge(lanes, secret + 11, (uint64_t)nbytes * PRIME64_1);
    uint64_t high = merge(lanes, secret + SECRET - STRIPE - 11, ~((uint64_t)nbytes * PRIME64_2));
    memcpy(out, &low, 8);
    memcpy(out + 8, &high, 8);
}

static inline uint64_t mix(const uint8_t *data, const uint8_t *key)
{
    return fold(load64(data) ^ load64(key), load64(data + 8) ^ load64(key + 8));
}

/* XXH3 with 64 bits, no seed, of a trailer's SIGNED bytes. */
_Static_assert(SIGNED > 96 && SIGNED <= 128, "the form of XXH3 for 97 to 128 bytes");
static uint64_t hash_trailer(const uint8_t *data)
{
    uint64_t sum = SIGNED * PRIME64_1;
    for (int i = 0; i < 4; i++) {
        sum += mix(data + 16 * i, secret + 32 * i);
        sum += mix(data + SIGNED - 16 * (i + 1), secret + 32 * i + 16);
    }
    return avalanche(sum);
}

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
} Job;

static void write_trailer(const Job *job, size_t at, uint8_t *page)
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
    trailer.self = hash_trailer((const uint8_t *)&trailer);
    memcpy(page, &trailer, sizeof trailer);
}

/* Depth, parent and time are the writer's word: a read does not know them. */
static int is_of(const Job *job, size_t at, const uint8_t *page)
{
    const Move *move = job->moves + at;
    Trailer found;
    memcpy(&found, page, sizeof found);
    return !memcmp(&found.magic, MAGIC, sizeof MAGIC) && found.version == VERSION &&
           found.self == hash_trailer((const uint8_t *)&found) && found.generation == move->generation &&
           found.offset == move->nvme_offset && found.length == move->length && !memcmp(found.hash, move->hash, 16) &&
           !memcmp(found.ns_digest, move->ns_digest, 16) &&
           !memcmp(found.checksum, job->replies[at].checksum, 16);
}

static uint8_t *payload_of(const Job *job, size_t at)
{
    const Move *move = job->moves + at;
    return (uint8_t *)(uintptr_t)(job->bases[move->dram_extent] + move->dram_offset);
}

static void sum_up(const Job *job, size_t at)
{
    hash_long(job->take, payload_of(job, at), job->slot_bytes, job->replies[at].checksum);
}

/* Moves slots `begin` to `end`, neighbours on the disk. After a call that got nowhere each slot is tried by itself: a
 * kernel may fail a whole call for one bad sector in it, and the bad one costs its own block only. */
static void call_for(const Job *job, size_t begin, size_t end, const struct iovec *buffers)
{
    size_t most = end - begin;
    for (size_t at = begin; at < end;) {
        size_t count = end - at < most ? end - at : most;
        const struct iovec *from = buffers + 2 * (at - begin);
        off_t offset = (off_t)job->moves[at].nvme_offset;
        ssize_t moved;
        do
            moved = job->kind == WRITE ? pwritev(job->fd, from, (int)(2 * count), offset)
                                       : preadv(job->fd, from, (int)(2 * count), offset);
        while (moved < 0 && errno == EINTR);
        int fault = moved < 0 ? errno : SHORT;
        size_t whole = moved < 0 ? 0 : (size_t)moved / job->stride;
        for (size_t i = 0; i < whole; i++)
            job->replies[at + i].status = OK;
        at += whole;
        if (whole)
            continue;
        if (count > 1) {
            most = 1;
            continue;
        }
        job->faults[at] = fault;
        job->replies[at].status = IO_ERROR;
        at++;
    }
}

static void carry_run(const Job *job, size_t begin, size_t end)
{
    struct iovec buffers[2 * MOST_SLOTS];
    for (size_t at = begin; at < end; at++) {
        uint8_t *page = job->scratch + (at - begin) * PAGE;
        struct iovec *pair = buffers + 2 * (at - begin);
        pair[0] = (struct iovec){payload_of(job, at), job->slot_bytes};
        pair[1] = (struct iovec){page, PAGE};
        if (job->kind == WRITE) {
            sum_up(job, at);
            write_trailer(job, at, page);
        }
    }
    call_for(job, begin, end, buffers);
    if (job->kind == WRITE)
        return;
    for (size_t at = begin; at < end; at++) {
        if (job->replies[at].status != OK)
            continue;
        sum_up(job, at);
        if (!is_of(job, at, job->scratch + (at - begin) * PAGE))
            job->replies[at].status = CORRUPT;
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
    size_t most = MOST_CALL_BYTES / job->stride;
    if (most < 1)
        most = 1;
    if (most > job->scratch_slots)
        most = job->scratch_slots;
    for (size_t i = 0; i < count; i++) {
        job->replies[i] = (Reply){.id = job->moves[i].id};
        job->faults[i] = missing(job, i);
        if (job->faults[i])
            job->replies[i].status = IO_ERROR;
    }
    for (size_t begin = 0, end; begin < count; begin = end) {
        end = begin + 1;
        if (job->faults[begin])
            continue;
        while (end < count && end - begin < most && !job->faults[end] &&
               job->moves[end].nvme_offset == job->moves[end - 1].nvme_offset + job->stride)
            end++;
        carry_run(job, begin, end);
    }
    long failed = 0;
    for (size_t i = 0; i < count; i++)
        failed += job->replies[i].status != OK;
    return failed;
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
    unsigned long long slots, slot_bytes, written_ms;
    if (!PyArg_ParseTuple(arguments, "iKKy*y*y*w*Kw*w*:transfer", &job.fd, &slots, &slot_bytes, &buffers[MOVES],
                          &buffers[BASES], &buffers[SIZES], &buffers[SCRATCH], &written_ms, &buffers[REPLIES],
                          &buffers[FAULTS]))
        return NULL;
    job.slots = slots;
    job.slot_bytes = slot_bytes;
    job.written_ms = written_ms;
    PyObject *result = carried(&job, buffers);
    for (int i = 0; i < BUFFERS; i++)
        PyBuffer_Release(&buffers[i]);
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

static PyMethodDef methods[] = {
    {"transfer", transfer, METH_VARARGS,
     "transfer(fd, slots, slot_bytes, moves, bases, sizes, scratch, written_ms, replies, faults)\n--\n\n"
     "Carries out moves of one kind and slab; fills `replies` and `faults`; how many failed, -1: not one piece."},
    {"checksum", checksum, METH_VARARGS,
     "checksum(data, how='')\n--\n\nxxh3-128 of more than 240 bytes; `how`: avx512, avx2 or plain, else the best."},
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
