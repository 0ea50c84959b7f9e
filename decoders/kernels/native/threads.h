// Barriers between the steps of a forward, which all threads compute together.

#pragma once

#include <sched.h>

#include "attention.h"

typedef struct {
    atomic_int waiting, round;
    atomic_long next;  // of the attention's units
    int threads;
    Units units;
    float *space;  // scratch memory of the rows, after that of the attention units
} Barrier;

static void wait_for_all(Barrier *barrier) {
    const int round = atomic_load(&barrier->round);
    if (atomic_fetch_add(&barrier->waiting, 1) == barrier->threads - 1) {
        atomic_store(&barrier->waiting, 0);
        atomic_store(&barrier->next, 0);
        atomic_fetch_add(&barrier->round, 1);
        return;
    }
    for (int spins = 0; atomic_load(&barrier->round) == round; spins++) {
        if (spins < 4000)
            cpu_pause();
        else
            sched_yield();
    }
}
