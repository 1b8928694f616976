/* The page behind a payload, as tiers/nvme/trailer.py has it; tests hold both equal. */

#ifndef KVSTORE_TRAILER_H
#define KVSTORE_TRAILER_H

#include <stddef.h>
#include <string.h>

#include "moves.h"
#include "xxh3.h"

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
_Static_assert(SIGNED > 96 && SIGNED <= 128, "what hash_short takes");

static void write_trailer(const Move *move, const uint8_t *checksum, uint64_t written_ms, uint8_t *page)
{
    Trailer trailer = {
        .version = VERSION,
        .generation = move->generation,
        .offset = move->nvme_offset,
        .length = move->length,
        .depth = move->depth,
        .written_ms = written_ms,
    };
    memcpy(&trailer.magic, MAGIC, sizeof MAGIC);
    memcpy(trailer.hash, move->hash, 16);
    memcpy(trailer.parent, move->parent, 16);
    memcpy(trailer.ns_digest, move->ns_digest, 16);
    memcpy(trailer.checksum, checksum, 16);
    trailer.self = hash_short((const uint8_t *)&trailer, SIGNED);
    memcpy(page, &trailer, sizeof trailer);
}

static const uint8_t *checksum_in(const uint8_t *page)
{
    return page + offsetof(Trailer, checksum);
}

/* Depth, parent and time are the writer's word: a read does not know them. */
static int is_trailer_of(const Move *move, const uint8_t *checksum, const uint8_t *page)
{
    Trailer found;
    memcpy(&found, page, sizeof found);
    return !memcmp(&found.magic, MAGIC, sizeof MAGIC) && found.version == VERSION &&
           found.self == hash_short((const uint8_t *)&found, SIGNED) && found.generation == move->generation &&
           found.offset == move->nvme_offset && found.length == move->length && !memcmp(found.hash, move->hash, 16) &&
           !memcmp(found.ns_digest, move->ns_digest, 16) && !memcmp(found.checksum, checksum, 16);
}

#endif
