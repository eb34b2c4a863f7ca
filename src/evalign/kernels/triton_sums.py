"""Sums over all programs of a kernel, taken by the last of them: no second launch, and always in the same order."""

import triton
import triton.language as tl

GROUP = 16  # programs whose sums are added up together; as many groups are added up by the last one of all


@triton.jit
def arrived_last(counter, count):
    """Whether this program is the last of `count` to get here; it then sees what all of them wrote.

    The counter is 0 again afterwards, for the next kernel.
    """
    tl.debug_barrier()  # all threads of this program have written before one of them says so
    last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def add_up(parts, count, into, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of `count` vectors, (count, width), to `into`; past the first-level cache, which may be out of date."""
    for at in range(0, width, BLOCK):
        j = at + tl.arange(0, BLOCK)
        added = tl.zeros([ROWS, BLOCK], tl.float32)
        for begin in range(0, count, ROWS):
            i = begin + tl.arange(0, ROWS)
            mask = (i < count)[:, None] & (j < width)[None, :]
            added += tl.load(parts + i[:, None] * width + j[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        tl.store(into + j, tl.sum(added, 0), mask=j < width)


@triton.jit
def is_added_up(parts, sums, into, counters, width, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """True for one program, the last: the sum of all programs' vectors, (programs, width), is then in `into`.

    Programs that differ along the grid's second axis alone write parts of one vector. `sums` has room for the sums of
    groups, `counters` is 0 and has one place more than there are groups.
    """
    programs, group = tl.num_programs(0), tl.program_id(0) // GROUP
    groups = tl.cdiv(programs, GROUP)
    members = tl.minimum(programs - group * GROUP, GROUP)
    last = programs < 0
    if arrived_last(counters + 1 + group, members * tl.num_programs(1)):
        add_up(parts + group * GROUP * width, members, sums + group * width, width, GROUP, BLOCK)
        if arrived_last(counters, groups):
            add_up(sums, groups, into, width, GROUP, BLOCK)
            tl.debug_barrier()
            last = programs > 0
    return last
