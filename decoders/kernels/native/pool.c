// The threads of this process, shared by all C libraries. They are created when first needed, and sleep between jobs.
//
// A job runs on the caller's thread, and on each thread of the pool that arrives before the caller has finished it. A
// job never waits for a thread that has not arrived, so a busy processor only costs its own share of the work.

#include <pthread.h>
#include <signal.h>

#include "waiting.h"

#define MAX_THREADS 1024
#define STACK_BYTES (4 << 20)
#define CLOSED (1 << 30)  // in `members`: no more threads may enter the job

typedef void (*Work)(void *argument, int thread);

static struct {
    Signal jobs;      // number of jobs so far
    Signal members;   // threads of the pool in the job, plus CLOSED
    atomic_int busy;  // whether a caller uses the pool
    atomic_int entered;
    int workers;
    Work work;
    void *argument;
    int threads;
} pool = {.members = {.value = CLOSED}};

static void leave(void) {
    if (atomic_fetch_sub(&pool.members.value, 1) == CLOSED + 1) wake(&pool.members, 1);
}

static void *serve(void *unused) {
    (void)unused;
    for (;;) {
        const int jobs = atomic_load(&pool.jobs.value);
        if (!(atomic_fetch_add(&pool.members.value, 1) & CLOSED)) {
            const int thread = 1 + atomic_fetch_add(&pool.entered, 1);
            if (thread < pool.threads) pool.work(pool.argument, thread);
        }
        leave();
        wait_while(&pool.jobs, jobs);
    }
    return NULL;
}

// Threads do not survive a fork: the child begins with none.
static void forget_threads(void) {
    pool.workers = 0;
    pool.jobs.sleepers = pool.members.sleepers = pool.busy = 0;
    pool.members.value = CLOSED;
}

static void add_workers(int count) {
    if (pool.workers >= count) return;
    static int forks;
    if (!forks) forks = !pthread_atfork(NULL, NULL, forget_threads);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the program's own threads
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_t thread;
    while (pool.workers < count && !pthread_create(&thread, &attributes, serve, NULL)) pool.workers++;
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

// Call work(argument, 0) here and work(argument, 1 ...) on up to `threads` - 1 other threads, and return after all have
// returned. If another caller uses the pool, this one works alone.
void tot_run_parallel(Work work, void *argument, int threads) {
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads <= 1 || atomic_exchange(&pool.busy, 1)) {
        work(argument, 0);
        return;
    }
    pool.work = work;
    pool.argument = argument;
    pool.threads = threads;
    atomic_store(&pool.entered, 0);
    atomic_fetch_sub(&pool.members.value, CLOSED);
    atomic_fetch_add(&pool.jobs.value, 1);
    wake(&pool.jobs, threads - 1);
    add_workers(threads - 1);
    work(argument, 0);
    atomic_fetch_add(&pool.members.value, CLOSED);
    for (int members; (members = atomic_load(&pool.members.value)) != CLOSED;) wait_while(&pool.members, members);
    atomic_store(&pool.busy, 0);
}
