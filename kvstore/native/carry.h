/* A piece of moves between DRAM and a slab, carried out: calls, several at a time, and what became of each move.
 * slab_io.c says what it is for; tiers/nvme/carry.py does the same in Python. */

#ifndef KVSTORE_CARRY_H
#define KVSTORE_CARRY_H

#include <errno.h>
#include <linux/aio_abi.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "moves.h"
#include "trailer.h"
#include "xxh3.h"

enum { SHORT = -1, NO_SLOT = -2, NO_MEMORY = -3 }; /* faults; a place in a slab, or in memory, that is not there */
enum { MOST_CALL_BYTES = (4 << 20) + (64 << 10) }; /* larger calls are no faster */
enum { DEPTH = 128, PART_BYTES = 4 << 20, TURN_BYTES = 4 << 20 };

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

static void sign(const Job *job, size_t at)
{
    write_trailer(job->moves + at, job->replies[at].checksum, job->written_ms, page_of(job, at));
}

/* The slot's checksum, for its reply: of its bytes, or, where those are not to be read, what the writer says it is. */
static void sum_up(const Job *job, size_t at)
{
    uint8_t *sum = job->replies[at].checksum;
    if (!job->moves[at].unread)
        hash_long(job->take, payload_of(job, at), job->slot_bytes, sum);
    else
        memcpy(sum, job->kind == WRITE ? job->moves[at].checksum : checksum_in(page_of(job, at)), 16);
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
        int unread = job->moves[call->begin].unread, last = call->to == job->stride;
        if (!unread)
            sum_part(job, line, call);
        else if (last)
            sum_up(job, call->begin);
        if (last)
            sign(job, call->begin);
        return;
    }
    for (size_t at = call->begin; at < call->end; at++) {
        sum_up(job, at);
        sign(job, at);
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
    int summed = part && !line->broken && !job->moves[call->begin].unread;
    if (summed && job->kind == READ)
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
        if (!summed)
            sum_up(job, at);
        if (!is_trailer_of(job->moves + at, job->replies[at].checksum, page_of(job, at)))
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

#endif
