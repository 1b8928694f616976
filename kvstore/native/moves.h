/* Records of moves, as kvstore/wire/packed.py has them: MOVE and REPLY. */

#ifndef KVSTORE_MOVES_H
#define KVSTORE_MOVES_H

#include <stdint.h>

enum { PAGE = 4096, MOST_SLOTS = 512, READ = 1, WRITE = 2, OK = 0, CORRUPT = 1, IO_ERROR = 2 };

typedef struct {
    uint64_t id;
    uint8_t kind, unread;
    uint16_t dram_extent;
    uint32_t dram_slot;
    uint64_t dram_offset, nvme_offset;
    uint32_t nvme_slot;
    uint16_t nvme_extent, pad2;
    uint32_t length, generation, name_space, depth;
    uint8_t hash[16], parent[16], ns_digest[16], checksum[16];
} Move;

typedef struct {
    uint64_t id;
    uint32_t status, pad;
    uint8_t checksum[16];
} Reply;

_Static_assert(sizeof(Move) == 120 && sizeof(Reply) == 32, "the records have no gaps");

#endif
