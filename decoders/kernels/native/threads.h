// A barrier between the steps of a forward pass. All threads compute each step together.

#pragma once

#include <sched.h>

#include "attention.h"

typedef struct {
    atomic_int arrived, generation;
    atomic_long next;  // next attention unit
    int threads;
    Units units[2];  // by kind of window
    float *scratch;  // of the rows; the attention units' scratch memory precedes it
} Barrier;

static void barrier_wait(Barrier *barrier) {
    const int generation = atomic_load(&barrier->generation);
    if (atomic_fetch_add(&barrier->arrived, 1) == barrier->threads - 1) {
        atomic_store(&barrier->arrived, 0);
        atomic_store(&barrier->next, 0);
        atomic_fetch_add(&barrier->generation, 1);
        return;
    }
    for (int spins = 0; atomic_load(&barrier->generation) == generation; spins++) {
        if (spins < 4000)
            cpu_pause();
        else
            sched_yield();
    }
}
