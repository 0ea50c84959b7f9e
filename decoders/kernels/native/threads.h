// Work in steps. Each thread takes spans of units from its own range of a step first, in order, because memory is read
// ahead, then from the ranges of slower threads. The next step begins once all units are finished, so a thread that holds
// none delays no other.

#pragma once

#include <sched.h>
#include <stdint.h>

#include "waiting.h"

// In pool.c, which all libraries share.
void tot_run_parallel(void (*work)(void *argument, int thread), void *argument, int threads);

#define OFFER_SECONDS 3e-3  // shorter than the time after which a system preempts a thread

#define RANGES 14  // at most; so that a step fits in a cache line

typedef struct {
    _Alignas(64) Signal finished;  // units
    atomic_int taken[RANGES];      // units of each range
} Step;

// A thread's position in the steps of a job.
typedef struct {
    Step *step;
    int thread, threads;
    double time, offered;
} Worker;

// The units [from, to) of a step.
typedef struct {
    int64_t from, to;
} Span;

static inline Worker worker_of(Step *steps, int thread, int threads) {
    const double time = now();
    return (Worker){steps, thread, threads, time, time};
}

// Whether the current step has no units left to take.
static inline int is_taken(const Worker *worker, int64_t units) {
    return atomic_load(&worker->step->finished.value) >= units;
}

// Take at most `most` units of one of `ranges` ranges, and fewer near its end. Returns 0 if none are left.
static inline int take(Step *step, int range, int ranges, int64_t units, int64_t most, Span *span) {
    const int64_t first = units * range / ranges, count = units * (range + 1) / ranges - first;
    int taken = atomic_load(&step->taken[range]), size;
    do {
        if (taken >= count) return 0;
        const int64_t half = (count - taken + 1) / 2;
        size = (int)(half < most ? half : most);
    } while (!atomic_compare_exchange_weak(&step->taken[range], &taken, taken + size));
    *span = (Span){first + taken, first + taken + size};
    return 1;
}

// Finish the units of `span`, zeros at first, and take at most `most` next ones of the step. When none are left, wait
// until all are finished, go to the next step and return 0. Steps must be zeroed before.
static inline int next_span(Worker *worker, int64_t units, int64_t most, Span *span) {
    Step *step = worker->step;
    const int64_t count = span->to - span->from;
    if (count && atomic_fetch_add(&step->finished.value, (int)count) + count == units) wake(&step->finished, INT_MAX);
    const double time = now();
    // Offer the processor to other programs here, so that the system does not take it in the middle of a unit.
    if (time - worker->time > 1e-3) worker->offered = time;
    worker->time = time;
    if (time - worker->offered > OFFER_SECONDS) {
        sched_yield();
        worker->offered = worker->time = now();
    }
    const int ranges = worker->threads < RANGES ? worker->threads : RANGES;
    for (int i = 0; i < ranges; i++)
        if (take(step, (worker->thread + i) % ranges, ranges, units, most, span)) return 1;
    for (int done; (done = atomic_load(&step->finished.value)) < units;) wait_while(&step->finished, done);
    worker->step++;
    return 0;
}
