"""Scheduler: chooses which requests run, and the chunks of the next forward.

First come, first served. A pausable request reserves slots for its next tokens only; other requests reserve all the
slots that they may need. When slots run out, the youngest pausable request returns to the front of the queue, and its
text is computed again when slots are free. Each pause doubles its reservation. The oldest request is never paused, so
all of them finish.

A step takes up to `chunk` rows of prompts, and the chunks that the policies of requests with computed prompts propose.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tot.decoders.engine.radix_cache import RadixCache
from tot.decoders.engine.runner import Chunk
from tot.decoders.engine.sequence import Job
from tot.decoders.errors import ModelError

_AHEAD = 32
"""Number of tokens per sample for which a pausable request reserves slots; doubled by each pause."""


@dataclass
class Step:
    """The chunks of one forward, and their jobs."""

    ready: list[Job] = field(default_factory=list)
    """Jobs whose prompts are computed after this step."""
    chunks: list[Chunk] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    """The job of each chunk."""
    proposed: dict[Job, slice] = field(default_factory=dict)
    """The chunks that a job's policy proposed; the other chunks are of prompts."""
    failed: dict[Job, BaseException] = field(default_factory=dict)

    def add(self, job: Job, chunks: Sequence[Chunk]) -> slice:
        begin = len(self.chunks)
        self.chunks += chunks
        self.jobs += [job] * len(chunks)
        return slice(begin, len(self.chunks))


class Scheduler:
    """Holds the waiting and the running requests; `chunk` is the number of prompt rows that a step takes."""

    def __init__(self, cache: RadixCache, chunk: int) -> None:
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self._cache = cache
        self._chunk = chunk

    def admit(self) -> list[Job]:
        """Pause requests until the next step fits, then admit requests while their reservations fit. Return these."""
        self._make_room()
        admitted: list[Job] = []
        reserved = sum(map(_reservation, self.running))
        while self.waiting:
            job = self.waiting[0]
            begun, head = [output for output in job.running if output.tokens], job.prompt[:-1]
            slots = self._cache.new_slots(head) + sum(len(output.tokens) for output in begun)
            reserved += _reservation(job)
            if self._cache.live + slots + reserved > self._cache.capacity:
                break
            job.branch, job.head = self._cache.open(head), 0
            job.resumed = {output.index: self._cache.open(job.text(output)[:-1]) for output in begun}
            self.running.append(self.waiting.popleft())
            admitted.append(job)
        return admitted

    def _make_room(self) -> None:
        """Pause the youngest requests until the next step of the others fits."""
        needed = {job: job.policy.need(1) for job in self.running}
        for job in reversed(list(self.running)):
            if self._cache.live + sum(needed.values()) <= self._cache.capacity:
                return
            if job.policy.pausable:
                job.pauses += 1
                self._release(job)
                self.waiting.appendleft(job)
                del needed[job]

    def schedule(self) -> Step:
        """Return a step with up to `chunk` rows of prompts. A token that prompts share is scheduled once."""
        step = Step()
        scheduled: set[int] = set()
        room, waiting = self._chunk, set(self.running)
        for job in self._ordered():
            ready = True
            for branch in (job.branch, *job.resumed.values()):
                slots, end = branch.slots, len(branch)
                start = self._cache.computed_length(branch, job.head)
                while start < end and slots[start] in scheduled:
                    start += 1
                stop = min(end, start + room)
                if start < stop:
                    step.add(job, [Chunk(branch, start, stop)])
                    scheduled.update(slots[start:stop])
                    room -= stop - start
                ready &= stop == end
            if ready:
                waiting.discard(job)
        step.ready += [job for job in self.running if job not in waiting]
        return step

    def _ordered(self) -> list[Job]:
        """Return the running jobs in order of arrival, after the shortest prompts that fit into half of a step.

        So a long prompt delays no short ones, and gets at least half of each step.
        """
        left: dict[Job, int] = {}
        for job in self.running:
            job.head = self._cache.computed_length(job.branch, job.head)
            left[job] = sum(len(branch) - job.head for branch in (job.branch, *job.resumed.values()))
        first, room = [], self._chunk // 2
        for job in sorted(self.running, key=left.__getitem__):
            if (room := room - left[job]) < 0:
                break
            first.append(job)
        return list(dict.fromkeys([*first, *self.running]))

    def propose(self, step: Step) -> None:
        """Add the chunks that the policies of ready requests propose."""
        for job in step.ready:
            if job in step.failed:
                continue
            try:
                chunks = job.policy.propose()
            except Exception as error:  # a failing policy fails only its request  # noqa: BLE001
                step.failed[job] = error
                continue
            if chunks:
                step.proposed[job] = step.add(job, chunks)
            elif job.policy.batch_drafter is None:  # otherwise the loop would spin
                step.failed[job] = ModelError(f"{type(job.policy).__name__} proposed no chunks and has not ended")

    def remove(self, job: Job) -> None:
        """Remove a request and release its slots."""
        if job in self.waiting:
            self.waiting.remove(job)
        else:
            self._release(job)

    def _release(self, job: Job) -> None:
        """End the run of a request: release the branches of the policy, and branches that it has not taken."""
        job.policy.release()
        for branch in (job.branch, *job.resumed.values()):
            self._cache.release(branch)
        job.resumed = {}
        self.running.remove(job)


def _reservation(job: Job) -> int:
    """Return the slots to reserve for a request beyond the slots that it has."""
    return job.policy.need(_AHEAD << job.pauses)
