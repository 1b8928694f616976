/* How a batch of moves is cut, as `cut_in_python` in tiers/nvme/pieces.py does it: that says why. In numpy it took some
 * thirty calls, which after megabytes of blocks find nothing in a cache: 0.15 ms a batch. */

#ifndef KVSTORE_PIECES_H
#define KVSTORE_PIECES_H

#include <stdlib.h>

#include "moves.h"

/* Where a move comes; moves of one place keep their order. */
typedef struct {
    uint32_t kind, extent;
    uint64_t offset;
    size_t at;
} Place;

typedef struct {
    size_t begin, end;
} Piece;

static int in_order(const void *one, const void *other)
{
    const Place *a = one, *b = other;
    if (a->kind != b->kind)
        return a->kind < b->kind ? -1 : 1;
    if (a->extent != b->extent)
        return a->extent < b->extent ? -1 : 1;
    if (a->offset != b->offset)
        return a->offset < b->offset ? -1 : 1;
    return a->at < b->at ? -1 : a->at > b->at;
}

/* `places` is scratch for `count`. */
static void sort_moves(const Move *moves, size_t count, Place *places, Move *sorted)
{
    for (size_t i = 0; i < count; i++)
        places[i] = (Place){moves[i].kind, moves[i].nvme_extent, moves[i].nvme_offset, i};
    qsort(places, count, sizeof *places, in_order);
    for (size_t i = 0; i < count; i++)
        sorted[i] = moves[places[i].at];
}

static int is_alike(const Move *one, const Move *other)
{
    return one->kind == other->kind && one->nvme_extent == other->nvme_extent && one->length == other->length;
}

/* Slots of a move's size in so many bytes: at least one. */
static size_t slots_in(uint64_t nbytes, const Move *move)
{
    uint64_t slots = nbytes / ((uint64_t)move->length + PAGE);
    return slots < 1 ? 1 : slots > MOST_SLOTS ? MOST_SLOTS : (size_t)slots;
}

/* Cuts sorted moves; at most `count` pieces. How many. */
static size_t cut_moves(const Move *moves, size_t count, size_t shares, uint64_t piece_bytes, uint64_t call_bytes,
                        Piece *pieces)
{
    size_t made = 0, share = (count + shares - 1) / shares;
    for (size_t begin = 0, end; begin < count; begin = end) {
        const Move *first = moves + begin;
        uint64_t stride = (uint64_t)first->length + PAGE;
        for (end = begin + 1; end < count && is_alike(first, moves + end) &&
                              moves[end].nvme_offset == moves[end - 1].nvme_offset + stride;)
            end++;
        size_t most = slots_in(piece_bytes, first), call = slots_in(call_bytes, first);
        size_t together = most < share ? most : share, alone = call > share ? call : share;
        alone = alone < most ? alone : most;
        if (made && is_alike(moves + begin - 1, first) && end - pieces[made - 1].begin <= together) {
            pieces[made - 1].end = end;
            continue;
        }
        for (size_t at = begin; at < end; at += alone)
            pieces[made++] = (Piece){at, end - at < alone ? end : at + alone};
    }
    return made;
}

#endif
