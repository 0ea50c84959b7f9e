// Waiting for another thread: spin briefly, because it is usually a matter of microseconds, then sleep.

#pragma once

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SPIN_SECONDS 30e-6

// A number that threads wait for.
typedef struct {
    atomic_int value, sleepers;
} Signal;

static inline double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static inline void cpu_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline void sleep_while(Signal *signal, int value) {
    syscall(SYS_futex, &signal->value, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static inline void wake_sleepers(Signal *signal, int count) {
    syscall(SYS_futex, &signal->value, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

// Return once the signal differs from `value`.
static inline void wait_while(Signal *signal, int value) {
    const double end = now() + SPIN_SECONDS;
    do
        for (int i = 0; i < 16; i++) {
            if (atomic_load(&signal->value) != value) return;
            cpu_pause();
        }
    while (now() < end);
    atomic_fetch_add(&signal->sleepers, 1);
    while (atomic_load(&signal->value) == value) sleep_while(signal, value);
    atomic_fetch_sub(&signal->sleepers, 1);
}

// Wake up to `count` threads that sleep until the signal changes. Call it after the change.
static inline void wake(Signal *signal, int count) {
    if (atomic_load(&signal->sleepers)) wake_sleepers(signal, count);
}
