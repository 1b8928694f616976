/* XXH3 as its specification defines it (github.com/Cyan4973/xxHash, doc/xxhash_spec.md): the form for long inputs with
 * 128 bits, also in pieces, and that of 97 to 128 bytes with 64, which is what a trailer signs itself with. Tests hold
 * both equal to the xxhash package. Little-endian machines only. */

#ifndef KVSTORE_XXH3_H
#define KVSTORE_XXH3_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define X86 1
#endif

enum { STRIPE = 64, SECRET = 192, LANES = 8, STRIPES = (SECRET - STRIPE) / 8, LONG_BLOCK = STRIPES * STRIPE };
enum { AHEAD = 4096 };

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

/* A state takes `blocks` whole blocks, each of which ends with a scramble, and then `count` stripes. The secret slides by
 * 8 bytes a stripe. */
typedef void (*Take)(uint64_t *lanes, const uint8_t *data, size_t blocks, size_t count);

/* The processor runs ahead by itself, but not over pages. That is enough for AMD's, which then reads memory as fast as it
 * can (0.030 s/GB on a Zen 4). Intel's keep more reads under way when each line is asked for, into the second cache:
 * 0.068 s/GB instead of 0.086 on an Emerald Rapids, which takes 0.062 only to add the numbers up; the same costs a Zen 4
 * half as much again. */
#define LOOK_AHEAD(data) __builtin_prefetch((data) + AHEAD)
#define LINE_AHEAD(data) __builtin_prefetch((data) + AHEAD, 0, 2)
enum { BY_PAGE, BY_LINE };

static void stripes_plain(uint64_t *lanes, const uint8_t *data, size_t count)
{
    for (size_t n = 0; n < count; n++, data += STRIPE) {
        for (int i = 0; i < LANES; i++) {
            uint64_t value = load64(data + 8 * i), key = value ^ load64(secret + 8 * n + 8 * i);
            lanes[i ^ 1] += value;
            lanes[i] += (uint64_t)(uint32_t)key * (key >> 32);
        }
    }
}

static void take_plain(uint64_t *lanes, const uint8_t *data, size_t blocks, size_t count)
{
    for (; blocks; blocks--, data += LONG_BLOCK) {
        LOOK_AHEAD(data);
        stripes_plain(lanes, data, STRIPES);
        for (int i = 0; i < LANES; i++)
            lanes[i] = (lanes[i] ^ lanes[i] >> 47 ^ load64(secret + SECRET - STRIPE + 8 * i)) * PRIME32_1;
    }
    stripes_plain(lanes, data, count);
}

#ifdef X86
#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f")))

AVX2 static inline void stripes_avx2(__m256i *sums, const uint8_t *data, size_t count, int ahead)
{
    for (size_t n = 0; n < count; n++, data += STRIPE) {
        if (ahead == BY_LINE)
            LINE_AHEAD(data);
        for (int i = 0; i < 2; i++) {
            __m256i value = _mm256_loadu_si256((const __m256i *)data + i);
            __m256i key = _mm256_xor_si256(value, _mm256_loadu_si256((const __m256i *)(secret + 8 * n) + i));
            __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
            sums[i] = _mm256_add_epi64(sums[i], _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2)));
            sums[i] = _mm256_add_epi64(sums[i], product);
        }
    }
}

AVX2 static inline void blocks_avx2(uint64_t *lanes, const uint8_t *data, size_t blocks, size_t count, int ahead)
{
    const __m256i prime = _mm256_set1_epi64x(PRIME32_1);
    __m256i sums[2] = {_mm256_loadu_si256((const __m256i *)lanes), _mm256_loadu_si256((const __m256i *)lanes + 1)};
    for (; blocks; blocks--, data += LONG_BLOCK) {
        LOOK_AHEAD(data);
        stripes_avx2(sums, data, STRIPES, ahead);
        for (int i = 0; i < 2; i++) {
            const __m256i key = _mm256_loadu_si256((const __m256i *)(secret + SECRET - STRIPE) + i);
            __m256i x = _mm256_xor_si256(_mm256_xor_si256(sums[i], _mm256_srli_epi64(sums[i], 47)), key);
            __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime);
            sums[i] = _mm256_add_epi64(_mm256_mul_epu32(x, prime), _mm256_slli_epi64(high, 32));
        }
    }
    stripes_avx2(sums, data, count, ahead);
    _mm256_storeu_si256((__m256i *)lanes, sums[0]);
    _mm256_storeu_si256((__m256i *)lanes + 1, sums[1]);
}

AVX2 static void take_avx2(uint64_t *lanes, const uint8_t *data, size_t blocks, size_t count)
{
    blocks_avx2(lanes, data, blocks, count, BY_PAGE);
}

AVX2 static void take_avx2_lines(uint64_t *lanes, const uint8_t *data, size_t blocks, size_t count)
{
    blocks_avx2(lanes, data, blocks, count, BY_LINE);
}

AVX512 static inline __m512i stripe_avx512(__m512i sums, __m512i value, size_t n)
{
    __m512i key = _mm512_xor_si512(value, _mm512_loadu_si512(secret + 8 * n));
    __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
    sums = _mm512_add_epi64(sums, _mm512_shuffle_epi32(value, (_MM_PERM_ENUM)_MM_SHUFFLE(1, 0, 3, 2)));
    return _mm512_add_epi64(sums, product);
}

AVX512 static inline __m512i scramble_avx512(__m512i sums, __m512i key, __m512i prime)
{
    __m512i x = _mm512_xor_si512(_mm512_xor_si512(sums, _mm512_srli_epi64(sums, 47)), key);
    __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), prime);
    return _mm512_add_epi64(_mm512_mul_epu32(x, prime), _mm512_slli_epi64(high, 32));
}

AVX512 static inline __m512i stripes_avx512(__m512i sums, const uint8_t *data, size_t count, int ahead)
{
    for (size_t n = 0; n < count; n++, data += STRIPE) {
        if (ahead == BY_LINE)
            LINE_AHEAD(data);
        sums = stripe_avx512(sums, _mm512_loadu_si512(data), n);
    }
    return sums;
}

AVX512 static inline void blocks_avx512(uint64_t *lanes, const uint8_t *data, size_t blocks, size_t count, int ahead)
{
    const __m512i key = _mm512_loadu_si512(secret + SECRET - STRIPE), prime = _mm512_set1_epi64(PRIME32_1);
    __m512i sums = _mm512_loadu_si512(lanes);
    for (; blocks; blocks--, data += LONG_BLOCK) {
        LOOK_AHEAD(data);
        sums = scramble_avx512(stripes_avx512(sums, data, STRIPES, ahead), key, prime);
    }
    _mm512_storeu_si512(lanes, stripes_avx512(sums, data, count, ahead));
}

AVX512 static void take_avx512(uint64_t *lanes, const uint8_t *data, size_t blocks, size_t count)
{
    blocks_avx512(lanes, data, blocks, count, BY_PAGE);
}

AVX512 static void take_avx512_lines(uint64_t *lanes, const uint8_t *data, size_t blocks, size_t count)
{
    blocks_avx512(lanes, data, blocks, count, BY_LINE);
}
#endif

/* By name; NULL where this processor has it not. */
static Take take_named(const char *name)
{
#ifdef X86
    __builtin_cpu_init();
    int has512 = __builtin_cpu_supports("avx512f"), has256 = __builtin_cpu_supports("avx2");
    if (!strcmp(name, "avx512"))
        return has512 ? take_avx512 : NULL;
    if (!strcmp(name, "avx512 lines"))
        return has512 ? take_avx512_lines : NULL;
    if (!strcmp(name, "avx2"))
        return has256 ? take_avx2 : NULL;
    if (!strcmp(name, "avx2 lines"))
        return has256 ? take_avx2_lines : NULL;
#endif
    return strcmp(name, "plain") ? NULL : take_plain;
}

static Take best_take(void)
{
    Take found = NULL;
#ifdef X86
    __builtin_cpu_init();
    int lines = __builtin_cpu_is("intel");
    found = take_named(lines ? "avx512 lines" : "avx512");
    if (!found)
        found = take_named(lines ? "avx2 lines" : "avx2");
#endif
    return found ? found : take_plain;
}

static uint64_t merge(const uint64_t *lanes, const uint8_t *key, uint64_t start)
{
    for (int i = 0; i < 4; i++)
        start += fold(lanes[2 * i] ^ load64(key + 16 * i), lanes[2 * i + 1] ^ load64(key + 16 * i + 8));
    return avalanche(start);
}

/* XXH3 with 128 bits, no seed, for more than 240 bytes, as they come: a state takes whole blocks but the last. */
static void hash_begin(uint64_t *lanes)
{
    static const uint64_t start[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                          PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    memcpy(lanes, start, sizeof start);
}

/* The rest of `nbytes`, of which the state has taken `done`, a multiple of LONG_BLOCK. */
static void hash_end(Take take, uint64_t *lanes, const uint8_t *data, size_t nbytes, size_t done, uint8_t *out)
{
    size_t blocks = (nbytes - 1) / LONG_BLOCK, count = (nbytes - 1 - blocks * LONG_BLOCK) / STRIPE;
    take(lanes, data + done, blocks - done / LONG_BLOCK, count);
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

static void hash_long(Take take, const uint8_t *data, size_t nbytes, uint8_t *out)
{
    uint64_t lanes[LANES];
    hash_begin(lanes);
    hash_end(take, lanes, data, nbytes, 0, out);
}

static inline uint64_t mix(const uint8_t *data, const uint8_t *key)
{
    return fold(load64(data) ^ load64(key), load64(data + 8) ^ load64(key + 8));
}

/* XXH3 with 64 bits, no seed, for 97 to 128 bytes. */
static uint64_t hash_short(const uint8_t *data, size_t nbytes)
{
    uint64_t sum = nbytes * PRIME64_1;
    for (int i = 0; i < 4; i++) {
        sum += mix(data + 16 * i, secret + 32 * i);
        sum += mix(data + nbytes - 16 * (i + 1), secret + 32 * i + 16);
    }
    return avalanche(sum);
}

#endif
