/* Copies blocks and takes their checksums on the way: one pass over memory for both, without the interpreter.
 *
 *     copy(targets, sources, nbytes, sums[, how])
 *
 * `targets` and `sources` (u64[n]) are addresses of blocks of `nbytes` (more than 240), none of which overlap; `sums`
 * (u64[n][2]) becomes the xxh3-128 of each as it was read, low half first. `how`: as xxh3.h names a form, else the best
 * here.
 *
 * What is copied is in no cache and is not wanted in one: targets are written around the caches where they are aligned
 * for that, so no line is read only to be overwritten, and the checksum costs less than that saves. s/GB on a Zen 4,
 * blocks of 64 KiB, 256 KiB, 2 MiB and 8 MiB: memmove 0.066, 0.060, 0.067, 0.073; with the checksum behind it 0.084,
 * 0.082, 0.082, 0.091; this 0.061, 0.045, 0.042, 0.045.
 *
 * Only the stable ABI of Python 3.11 (PEP 384). The interpreter lock is released throughout.
 */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdint.h>
#include <string.h>

#include "xxh3.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "packed records are little-endian"
#endif

/* As a Take, of whole blocks, which it also copies. */
typedef void (*CopyTake)(uint64_t *lanes, uint8_t *target, const uint8_t *data, size_t blocks);

static void copy_by(Take take, uint64_t *lanes, uint8_t *target, const uint8_t *data, size_t blocks)
{
    for (; blocks; blocks--, target += LONG_BLOCK, data += LONG_BLOCK) {
        memcpy(target, data, LONG_BLOCK);
        take(lanes, data, 1, 0);
    }
}

static void copy_plain(uint64_t *lanes, uint8_t *target, const uint8_t *data, size_t blocks)
{
    copy_by(take_plain, lanes, target, data, blocks);
}

#ifdef X86
/* The line that comes AHEAD of the one in hand is asked for, on every processor: unlike a checksum by itself, which a
 * Zen 4 does not gain by that, two streams leave its own prefetching behind (0.052 s/GB without, 0.042 with it). */
#define LINE_SOON(data) __builtin_prefetch((data) + AHEAD, 0, 3)

AVX2 static void copy_avx2(uint64_t *lanes, uint8_t *target, const uint8_t *data, size_t blocks)
{
    if ((uintptr_t)target % STRIPE) {
        copy_by(take_avx2, lanes, target, data, blocks);
        return;
    }
    for (; blocks; blocks--, target += LONG_BLOCK, data += LONG_BLOCK) {
        for (size_t at = 0; at < LONG_BLOCK; at += STRIPE) {
            LINE_SOON(data + at);
            for (size_t i = at; i < at + STRIPE; i += 32)
                _mm256_stream_si256((__m256i *)(target + i), _mm256_loadu_si256((const __m256i *)(data + i)));
        }
        blocks_avx2(lanes, data, 1, 0, BY_PAGE);
    }
    _mm_sfence();
}

AVX512 static void copy_avx512(uint64_t *lanes, uint8_t *target, const uint8_t *data, size_t blocks)
{
    if ((uintptr_t)target % STRIPE) {
        copy_by(take_avx512, lanes, target, data, blocks);
        return;
    }
    const __m512i last = _mm512_loadu_si512(secret + SECRET - STRIPE), prime = _mm512_set1_epi64(PRIME32_1);
    __m512i sums = _mm512_loadu_si512(lanes);
    for (; blocks; blocks--) {
        for (size_t n = 0; n < STRIPES; n++, target += STRIPE, data += STRIPE) {
            LINE_SOON(data);
            __m512i value = _mm512_loadu_si512(data);
            _mm512_stream_si512((__m512i *)target, value);
            sums = stripe_avx512(sums, value, n);
        }
        sums = scramble_avx512(sums, last, prime);
    }
    _mm512_storeu_si512(lanes, sums);
    _mm_sfence();
}
#endif

typedef struct {
    Take take;
    CopyTake copy;
} Form;

/* By the name of a Take (NULL: the best); no `take` where this processor has it not. */
static Form form_named(const char *name)
{
    Form form = {name ? take_named(name) : best_take(), copy_plain};
#ifdef X86
    if (form.take == take_avx512 || form.take == take_avx512_lines)
        form.copy = copy_avx512;
    if (form.take == take_avx2 || form.take == take_avx2_lines)
        form.copy = copy_avx2;
#endif
    return form;
}

static void copy_block(Form form, uint8_t *target, const uint8_t *source, size_t nbytes, uint8_t *sum)
{
    uint64_t lanes[LANES];
    size_t blocks = (nbytes - 1) / LONG_BLOCK, done = blocks * LONG_BLOCK;
    hash_begin(lanes);
    form.copy(lanes, target, source, blocks);
    memcpy(target + done, source + done, nbytes - done);
    hash_end(form.take, lanes, source, nbytes, done, sum);
}

static PyObject *copied(Form form, const Py_buffer *targets, const Py_buffer *sources, size_t nbytes,
                        const Py_buffer *sums)
{
    size_t count = (size_t)targets->len / sizeof(uint64_t);
    if (!form.take) {
        PyErr_SetString(PyExc_ValueError, "not on this processor");
        return NULL;
    }
    if (nbytes <= 240 || targets->len != sources->len || (size_t)targets->len != count * sizeof(uint64_t) ||
        (size_t)sums->len != 16 * count) {
        PyErr_SetString(PyExc_ValueError, "as many targets as sources and sums, of more than 240 bytes each");
        return NULL;
    }
    const uint64_t *to = targets->buf, *from = sources->buf;
    Py_BEGIN_ALLOW_THREADS
    for (size_t i = 0; i < count; i++)
        copy_block(form, (uint8_t *)(uintptr_t)to[i], (const uint8_t *)(uintptr_t)from[i], nbytes,
                   (uint8_t *)sums->buf + 16 * i);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *copy(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer targets, sources, sums;
    unsigned long long nbytes;
    const char *name = NULL;
    if (!PyArg_ParseTuple(arguments, "y*y*Kw*|s:copy", &targets, &sources, &nbytes, &sums, &name))
        return NULL;
    PyObject *result = copied(form_named(name), &targets, &sources, nbytes, &sums);
    PyBuffer_Release(&targets);
    PyBuffer_Release(&sources);
    PyBuffer_Release(&sums);
    return result;
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS,
     "copy(targets, sources, nbytes, sums, how='')\n--\n\n"
     "Copies blocks at addresses; `sums` becomes the xxh3-128 of each. `how`: as xxh3.h names them, else the best."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvstore._summed_copy",
    .m_doc = "Copies with checksums, compiled from kvstore/native/summed_copy.c.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__summed_copy(void)
{
    return PyModuleDef_Init(&definition);
}
