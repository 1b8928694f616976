/* The hash chain of kvstore/identity.py, compiled: keyed BLAKE2b-128 over blocks of tokens, each block behind the hash
 * of the one before it.
 *
 *     hash_chain(key, parent, data, block_bytes) -> the packed hashes, 16 bytes a block
 *
 * BLAKE2b as RFC 7693 defines it, sections 2.6 (constants), 3.1 (mixing), 3.2 (compression) and 3.3 (padding, keyed
 * hashing). The key fills the first 128-byte block of every message here, so its compression is done once a call and
 * not once a block. kvstore/hash_chain.py has its twin in Python; tests hold the two equal.
 *
 * Only the stable ABI of Python 3.11 (PEP 384): one build serves every later version. The interpreter lock is released
 * while it hashes; it keeps nothing between calls.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdint.h>
#include <string.h>

enum { BLOCK = 128, DIGEST = 16, MAX_KEY = 64 };

typedef struct {
    uint64_t h[8];
    uint64_t hashed; /* bytes compressed so far; messages here stay far below 2^64 */
} State;

static const uint64_t IV[8] = {
    0x6a09e667f3bcc908u, 0xbb67ae8584caa73bu, 0x3c6ef372fe94f82bu, 0xa54ff53a5f1d36f1u,
    0x510e527fade682d1u, 0x9b05688c2b3e6c1fu, 0x1f83d9abfb41bd6bu, 0x5be0cd19137e2179u,
};

/* Byte by byte, so that the result is the same on any machine; compilers make one load or store of it. */
static inline uint64_t load_le64(const uint8_t *p)
{
    return (uint64_t)p[0] | (uint64_t)p[1] << 8 | (uint64_t)p[2] << 16 | (uint64_t)p[3] << 24 |
           (uint64_t)p[4] << 32 | (uint64_t)p[5] << 40 | (uint64_t)p[6] << 48 | (uint64_t)p[7] << 56;
}

static inline void store_le64(uint8_t *p, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        p[i] = (uint8_t)(value >> (8 * i));
}

static inline uint64_t rotate_right(uint64_t value, int bits)
{
    return value >> bits | value << (64 - bits);
}

/* The permutations of section 2.7 are written out, so that every message word has a fixed place. */
#define MIX(a, b, c, d, x, y)                                                                                          \
    do {                                                                                                               \
        v[a] += v[b] + m[x];                                                                                           \
        v[d] = rotate_right(v[d] ^ v[a], 32);                                                                          \
        v[c] += v[d];                                                                                                  \
        v[b] = rotate_right(v[b] ^ v[c], 24);                                                                          \
        v[a] += v[b] + m[y];                                                                                           \
        v[d] = rotate_right(v[d] ^ v[a], 16);                                                                          \
        v[c] += v[d];                                                                                                  \
        v[b] = rotate_right(v[b] ^ v[c], 63);                                                                          \
    } while (0)

#define ROUND(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15)                                    \
    do {                                                                                                               \
        MIX(0, 4, 8, 12, s0, s1);                                                                                      \
        MIX(1, 5, 9, 13, s2, s3);                                                                                      \
        MIX(2, 6, 10, 14, s4, s5);                                                                                     \
        MIX(3, 7, 11, 15, s6, s7);                                                                                     \
        MIX(0, 5, 10, 15, s8, s9);                                                                                     \
        MIX(1, 6, 11, 12, s10, s11);                                                                                   \
        MIX(2, 7, 8, 13, s12, s13);                                                                                    \
        MIX(3, 4, 9, 14, s14, s15);                                                                                    \
    } while (0)

static void compress(State *state, const uint8_t *block, uint64_t nbytes, int last)
{
    uint64_t v[16], m[16];
    for (int i = 0; i < 16; i++)
        m[i] = load_le64(block + 8 * i);
    state->hashed += nbytes;
    for (int i = 0; i < 8; i++) {
        v[i] = state->h[i];
        v[i + 8] = IV[i];
    }
    v[12] ^= state->hashed;
    if (last)
        v[14] = ~v[14];
    ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3);
    ROUND(11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4);
    ROUND(7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8);
    ROUND(9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13);
    ROUND(2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9);
    ROUND(12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11);
    ROUND(13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10);
    ROUND(6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5);
    ROUND(10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0);
    ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3);
    for (int i = 0; i < 8; i++)
        state->h[i] ^= v[i] ^ v[i + 8];
}

/* The state behind the key's block. A message follows always (a parent hash at least), so that block is never the last;
 * without a key there is no such block. */
static State keyed(const uint8_t *key, size_t key_bytes)
{
    State state = {.hashed = 0};
    memcpy(state.h, IV, sizeof IV);
    state.h[0] ^= 0x01010000u ^ (uint64_t)key_bytes << 8 ^ DIGEST;
    if (key_bytes) {
        uint8_t block[BLOCK] = {0};
        memcpy(block, key, key_bytes);
        compress(&state, block, BLOCK, 0);
    }
    return state;
}

/* Hash of `parent` (DIGEST bytes) followed by `data`. */
static void hash_one(State state, const uint8_t *parent, const uint8_t *data, size_t data_bytes, uint8_t *out)
{
    uint8_t block[BLOCK];
    size_t filled = DIGEST;
    memcpy(block, parent, DIGEST);
    for (;;) {
        size_t taken = data_bytes < BLOCK - filled ? data_bytes : BLOCK - filled;
        memcpy(block + filled, data, taken);
        filled += taken;
        data += taken;
        data_bytes -= taken;
        if (!data_bytes)
            break; /* a full block is the last one where nothing follows it */
        compress(&state, block, BLOCK, 0);
        filled = 0;
    }
    memset(block + filled, 0, BLOCK - filled);
    compress(&state, block, filled, 1);
    store_le64(out, state.h[0]);
    store_le64(out + 8, state.h[1]);
}

static void hash_all(const Py_buffer *key, const uint8_t *parent, const uint8_t *data, size_t count,
                     size_t block_bytes, uint8_t *out)
{
    const State start = keyed(key->buf, (size_t)key->len);
    for (size_t i = 0; i < count; i++) {
        hash_one(start, parent, data + i * block_bytes, block_bytes, out);
        parent = out;
        out += DIGEST;
    }
}

static PyObject *chained(const Py_buffer *key, const Py_buffer *parent, const Py_buffer *data, Py_ssize_t block_bytes)
{
    if (key->len > MAX_KEY || parent->len != DIGEST || block_bytes < 1) {
        PyErr_SetString(PyExc_ValueError, "a key has at most 64 bytes, a parent 16 and a block at least one");
        return NULL;
    }
    Py_ssize_t count = data->len / block_bytes;
    if (count > PY_SSIZE_T_MAX / DIGEST)
        return PyErr_NoMemory();
    PyObject *hashes = PyBytes_FromStringAndSize(NULL, count * DIGEST);
    if (!hashes)
        return NULL;
    uint8_t *out = (uint8_t *)PyBytes_AsString(hashes);
    Py_BEGIN_ALLOW_THREADS
    hash_all(key, parent->buf, data->buf, (size_t)count, (size_t)block_bytes, out);
    Py_END_ALLOW_THREADS
    return hashes;
}

static PyObject *hash_chain(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer key, parent, data;
    Py_ssize_t block_bytes;
    if (!PyArg_ParseTuple(arguments, "y*y*y*n:hash_chain", &key, &parent, &data, &block_bytes))
        return NULL;
    PyObject *hashes = chained(&key, &parent, &data, block_bytes);
    PyBuffer_Release(&key);
    PyBuffer_Release(&parent);
    PyBuffer_Release(&data);
    return hashes;
}

static PyMethodDef methods[] = {
    {"hash_chain", hash_chain, METH_VARARGS,
     "hash_chain(key, parent, data, block_bytes)\n--\n\n"
     "Packed hashes, 16 bytes each, of the full blocks of `data`."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvstore._hash_chain",
    .m_doc = "The hash chain, compiled from kvstore/native/hash_chain.c.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__hash_chain(void)
{
    return PyModuleDef_Init(&definition);
}
