# Tuples grow by addition: Triton unpacks none.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"
"""Triton kernels for rows (M, C): of classes that fit into a tile, and of any number.

Rows that fit take two kernels: `loss_kernel` reads the batch and ends with the loss, `tile_gradient_kernel` writes the
gradient. A tile is a tuple of PIECES, each of as many classes as the threads of a warp load at once: a row belongs to
one warp, and its sums need no shared memory. For 257 classes there are nine pieces of 32. `loss_kernel` saves the data
of a row that the other needs.

Longer rows take three, which stream the classes in blocks: `stats_kernel` along rows, `row_columns_kernel` down them,
`row_gradient_kernel` along rows again. Where a row is swept twice, the second sweep goes backwards: what the first one
read last is still in the cache.

Sums are taken in float32 in a fixed order, or in whole numbers: the same batch always gives the same bits.
"""

import triton
import triton.language as tl

from evalign.kernels.gpu import device_functions as fn

ONE = tl.constexpr(2.0**36)  # in integers, whose sums do not depend on the order; for up to 2^27 rows


@triton.jit
def saved_offset(d):
    """Offset of the rows in the saved data: 2 d + 1 slopes, padded to a multiple of 16."""
    return (2 * d + 16) // 16 * 16


@triton.jit
def _pieces(z, rows, inside, counts, d, stride, PIECES: tl.constexpr, WIDTH: tl.constexpr):
    """The logits of rows, -inf beyond the classes. An ignored row is all zeros, whatever it holds."""
    lane = tl.arange(0, WIDTH)[None, :]
    start = z + rows[:, None] * stride + lane
    found = ()
    for k in tl.static_range(PIECES):
        if k < PIECES - 1:
            x = tl.load(start + k * WIDTH, mask=inside[:, None])
        else:
            x = tl.load(start + k * WIDTH, mask=inside[:, None] & (k * WIDTH + lane < d), other=float("-inf"))
        found = found + (tl.where(counts[:, None], x.to(tl.float32), 0.0),)
    return found


@triton.jit
def _zeros(PIECES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    found = ()
    for _ in tl.static_range(PIECES):
        found = found + (tl.zeros([ROWS, WIDTH], tl.float32),)
    return found


@triton.jit
def _first_two(xs, PIECES: tl.constexpr):
    """The largest and second largest entry of every row; every thread tracks its own two."""
    best = xs[0]
    runner_up = tl.full(best.shape, float("-inf"), tl.float32)
    for k in tl.static_range(1, PIECES):
        runner_up = tl.maximum(runner_up, tl.minimum(best, xs[k]))
        best = tl.maximum(best, xs[k])
    largest = tl.max(best, 1)
    has_it = best == largest[:, None]
    tied = tl.sum(tl.where(has_it, 1.0, 0.0), 1) > 1.0
    return largest, tl.where(tied, largest, tl.max(tl.where(has_it, runner_up, best), 1))


@triton.jit(**fn.FREE)
def loss_kernel(
    z, y, w, temperature, workspace, counters, counts, loss, saved, low, reach, smoothing, ignored,
    n, d, stride, chunk, width, anchor, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
    ANNEALED: tl.constexpr, WEIGHTED: tl.constexpr, LOSSES: tl.constexpr, SMOOTHING: tl.constexpr,
    FORM: tl.constexpr, SCATTERED: tl.constexpr, ALIGNED: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """tp, predicted and actual of all rows, the sum of their losses and of their weights to `counts` (3 d + 2).

    `workspace` has space for such a vector, and of `width` for the whole, for each group and for each program. Unless
    FORM is below 0, the loss of these counts and its slopes follow; see `value_of_counts`. To `saved`: the slopes,
    then from `saved_offset` on a row's maximum, e of its second place, sums of e and of h, (n, 4).

    Where SCATTERED, a row adds what it has for its label's class to whole numbers behind the counters, 2 d of them,
    rather than each of its threads to sums of all classes, two thirds of all there are. Weights have no such numbers.
    """
    a, b, low, cut, c = fn.numbers(temperature, low, reach, ANNEALED)
    first, first_start, second, second_start, sign = fn.lines(a, b, cut)
    if ALIGNED:  # so that four logits are read at once
        d, stride = d // 4 * 4, stride // 4 * 4
    beyond = tl.maximum(first_start, second_start) * (PIECES * WIDTH - d)  # as which those places are counted
    lane = tl.arange(0, WIDTH)[None, :]
    begin = tl.program_id(0).to(tl.int64) * chunk
    stats = saved + saved_offset(d)
    losses = tl.zeros([ROWS], tl.float32)
    groups = tl.cdiv(tl.num_programs(0), GROUP)
    by_label = counters + 1 + groups
    predicted = _zeros(PIECES, ROWS, WIDTH)
    if not SCATTERED:
        tp, actual = _zeros(PIECES, ROWS, WIDTH), _zeros(PIECES, ROWS, WIDTH)
    for offset in range(0, chunk, ROWS):
        rows = begin + offset + tl.arange(0, ROWS)
        inside = rows < n
        label, weight = fn.labels_and_weights(y, w, rows, inside, ignored, WEIGHTED)
        xs = _pieces(z, rows, inside, weight != 0.0, d, stride, PIECES, WIDTH)
        largest, second_largest = _first_two(xs, PIECES)
        e_second = fn.exponential(second_largest - largest)
        slope_1, slope_2 = (first * fn.over_tau(e_second))[:, None], (second * fn.over_tau(e_second))[:, None]
        es, totals, totals_h = (), tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
        for k in tl.static_range(PIECES):
            e = fn.exponential(xs[k] - largest[:, None])
            es = es + (e,)
            totals += e
            totals_h += fn.step(e, slope_1, first_start, slope_2, second_start)
        total = tl.sum(totals, 1)
        value, _, _ = fn.top(total, e_second, low, b, c)
        on_line = second * fn.over_tau(e_second) + second_start  # which the top was counted as
        total_h = sign * (tl.sum(totals_h, 1) - on_line - beyond) + value
        share, top_value = (sign * weight / total_h)[:, None], (sign * value)[:, None]
        if SCATTERED:
            more = ()
            for k in tl.static_range(PIECES):
                h = tl.where(es[k] == 1.0, top_value, fn.step(es[k], slope_1, first_start, slope_2, second_start))
                more = more + (predicted[k] + h * share,)
            predicted = more
            at_label = (z + rows * stride + label)[:, None] + tl.zeros([1, WIDTH], tl.int32)
            inside_label = (weight != 0.0) & (label >= 0) & (label < d)
            is_first = inside_label[:, None] & (lane < 2)
            e = fn.exponential(tl.load(at_label, mask=is_first, other=0.0).to(tl.float32) - largest[:, None])
            h = tl.where(e == 1.0, top_value, fn.step(e, slope_1, first_start, slope_2, second_start))
            whole = tl.where(lane == 0, h * share * ONE, 1.0).to(tl.int64)
            tl.atomic_add(by_label + label[:, None] + lane * d, whole, mask=is_first, sem="relaxed")
        else:
            more_tp, more_predicted, more_actual = (), (), ()
            for k in tl.static_range(PIECES):
                h = tl.where(es[k] == 1.0, top_value, fn.step(es[k], slope_1, first_start, slope_2, second_start))
                is_label = k * WIDTH + lane == label[:, None]
                more_predicted = more_predicted + (predicted[k] + h * share,)
                more_tp = more_tp + (tp[k] + tl.where(is_label, h * share, 0.0),)
                more_actual = more_actual + (actual[k] + tl.where(is_label, weight[:, None], 0.0),)
            tp, predicted, actual = more_tp, more_predicted, more_actual
        # By the threads of the row's warp, without shared memory.
        four = tl.where(lane < 2, tl.where(lane == 0, largest[:, None], e_second[:, None]), total[:, None])
        four = tl.where(lane == 3, total_h[:, None], four)
        tl.store(stats + 4 * rows[:, None] + lane, four, mask=inside[:, None] & (lane < 4))
        if LOSSES:
            # Read again, which is faster than finding it in the tile.
            target = tl.load(z + rows * stride + label, mask=weight != 0.0, other=0.0).to(tl.float32) - largest
            if SMOOTHING:
                totals_z = tl.zeros([ROWS, WIDTH], tl.float32)
                for k in tl.static_range(PIECES):
                    totals_z += tl.where(k * WIDTH + lane < d, xs[k], 0.0)
                target += smoothing * (tl.sum(totals_z, 1) / d - largest - target)
            # An ignored row counts for nothing, even if its loss is infinite.
            losses += tl.where(weight == 0.0, 0.0, weight * (tl.log(total) - target))
    classes = tl.arange(0, BLOCK)
    if SCATTERED:
        sums = workspace + (3 * d + 17) // 16 * 16
        out = sums + (1 + groups + tl.program_id(0)) * width
        for k in tl.static_range(PIECES):
            j = k * WIDTH + tl.arange(0, WIDTH)
            tl.store(out + j, tl.sum(predicted[k], 0), mask=j < d)
        tl.store(out + d, tl.sum(losses, 0))
        if fn.is_added_up(sums + (1 + groups) * width, sums + width, sums, counters, width, GROUP, WIDE):
            found = tl.load(by_label + classes, mask=classes < d, other=0, cache_modifier=".cg")
            seen = tl.load(by_label + d + classes, mask=classes < d, other=0, cache_modifier=".cg").to(tl.float32)
            tl.store(by_label + classes, tl.zeros([BLOCK], tl.int64), mask=classes < d)
            tl.store(by_label + d + classes, tl.zeros([BLOCK], tl.int64), mask=classes < d)
            tl.store(counts + classes, found.to(tl.float32) / ONE, mask=classes < d)
            tl.store(counts + 2 * d + classes, seen, mask=classes < d)
            tl.store(counts + 3 * d + 1, tl.sum(seen, 0))
            tl.debug_barrier()
            fn.value_of_counts(
                counts, sums, counts + 2 * d, counts + 3 * d + 1, sums + d, counts, loss, saved, d, anchor,
                t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3, FORM, LOSSES, False, False, BLOCK,
            )  # fmt: skip
    else:
        parts = workspace + (1 + groups) * width
        out = parts + tl.program_id(0) * width
        for k in tl.static_range(PIECES):
            j = k * WIDTH + tl.arange(0, WIDTH)
            tl.store(out + j, tl.sum(tp[k], 0), mask=j < d)
            tl.store(out + d + j, tl.sum(predicted[k], 0), mask=j < d)
            tl.store(out + 2 * d + j, tl.sum(actual[k], 0), mask=j < d)
        tl.store(out + 3 * d, tl.sum(losses, 0))
        if fn.is_added_up(parts, workspace + width, counts, counters, width, GROUP, WIDE):
            # Rounded like its parts, so that the share of a single class is exactly 1.
            everything = tl.sum(tl.load(counts + 2 * d + classes, mask=classes < d, other=0.0), 0)
            tl.store(counts + 3 * d + 1, everything)
            if FORM >= 0:
                tl.debug_barrier()
                fn.value_of_counts(
                    counts, counts + d, counts + 2 * d, counts + 3 * d + 1, counts + 3 * d, counts, loss, saved, d,
                    anchor, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3, FORM, LOSSES, False, False, BLOCK,
                )  # fmt: skip


@triton.jit(**fn.FREE)
def tile_gradient_kernel(
    z, y, w, temperature, saved, by_loss, by_tp, by_predicted, by_losses, out, low, reach, smoothing, ignored, n, d,
    stride,
    ANNEALED: tl.constexpr, WEIGHTED: tl.constexpr, LOSSES: tl.constexpr, PACKED: tl.constexpr, ALIGNED: tl.constexpr,
    PIECES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """dL/dz of TILES times ROWS rows; if PACKED, all slopes are at `by_tp` and are multiplied by `by_loss`."""
    a, b, low, cut, c = fn.numbers(temperature, low, reach, ANNEALED)
    if ALIGNED:
        d, stride = d // 4 * 4, stride // 4 * 4
    by_predicted, scale, through_losses = fn.unpacked(by_loss, by_tp, by_predicted, by_losses, d, LOSSES, PACKED)
    stats = saved + saved_offset(d)
    lane = tl.arange(0, WIDTH)[None, :]
    # The same for every row, but read for each, so that it reaches the threads that need it.
    slopes = ()
    for k in tl.static_range(PIECES):
        slope_at = by_predicted + k * WIDTH + lane + tl.zeros([ROWS], tl.int32)[:, None]
        slopes = slopes + (tl.load(slope_at, mask=k * WIDTH + lane < d, other=0.0),)
    begin = tl.program_id(0).to(tl.int64) * ROWS * TILES
    for tile in range(0, TILES):
        rows = begin + tile * ROWS + tl.arange(0, ROWS)
        inside = rows < n
        label, weight = fn.labels_and_weights(y, w, rows, inside, ignored, WEIGHTED)
        counts = weight != 0.0
        xs = _pieces(z, rows, inside, counts, d, stride, PIECES, WIDTH)
        largest = tl.load(stats + 4 * rows, mask=inside, other=0.0)
        e_second = tl.load(stats + 4 * rows + 1, mask=inside, other=1.0)
        total = tl.load(stats + 4 * rows + 2, mask=inside, other=1.0)
        total_h = tl.load(stats + 4 * rows + 3, mask=inside, other=1.0)
        at_label = tl.load(by_tp + label, mask=counts, other=0.0)
        label_z = tl.load(z + rows * stride + label, mask=counts, other=0.0).to(tl.float32)
        tau_e = fn.over_tau(e_second)[:, None]
        es, parts = (), ()
        dots_rest, dots_scaled = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
        sums_scaled, tops = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
        seconds = tl.zeros([ROWS, WIDTH], tl.float32)
        for k in tl.static_range(PIECES):
            e = fn.exponential(xs[k] - largest[:, None])
            part, rest = fn.scaled(e, tau_e, a, b, cut)
            dots_rest += rest * slopes[k]
            dots_scaled += part * slopes[k]
            sums_scaled += part
            tops += tl.where(e == 1.0, slopes[k], 0.0)
            seconds += tl.where(e == e_second[:, None], 1.0, 0.0)
            es, parts = es + (e,), parts + (part,)
        mean, share, factor, top_scaled, at_top, at_second, at_target, elsewhere = fn.row_slopes(
            weight, scale, through_losses, smoothing, d, total, total_h, e_second, tl.sum(seconds, 1),
            tl.sum(dots_rest, 1), tl.sum(dots_scaled, 1), tl.sum(sums_scaled, 1), tl.sum(tops, 1), at_label,
            fn.exponential(label_z - largest), a, b, low, cut, c,
        )  # fmt: skip
        for k in tl.static_range(PIECES):
            found = fn.entry_slopes(
                es[k], e_second[:, None], parts[k], slopes[k], k * WIDTH + lane == label[:, None], mean[:, None],
                share[:, None], factor[:, None], top_scaled[:, None], at_top[:, None], at_second[:, None],
                at_target[:, None], elsewhere[:, None],
            )  # fmt: skip
            at = out + rows[:, None] * d + (k * WIDTH + lane)
            tl.store(at, found, mask=inside[:, None] & (k * WIDTH + lane < d))


@triton.jit
def _inside(j, d, EVEN: tl.constexpr):
    """j < d, which always holds if blocks divide d."""
    return (j >= 0) if EVEN else (j < d)


@triton.jit(**fn.FREE)
def stats_kernel(
    z, y, w, temperature, low, reach, smoothing, ignored, stats, losses, n, d, stride,
    ANNEALED: tl.constexpr, WEIGHTED: tl.constexpr, LOSSES: tl.constexpr, SMOOTHING: tl.constexpr,
    EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """To `stats` (7, n): a row's maximum, e of its second place, sums of e and of h, weight over the latter, top h.

    Also the row's contribution to tp.
    """
    a, b, low, cut, c = fn.numbers(temperature, low, reach, ANNEALED)
    first, first_start, second, second_start, sign = fn.lines(a, b, cut)
    row = tl.program_id(0).to(tl.int64)
    start = z + row * stride
    minus = float("-inf")
    # Every lane tracks its own two largest values: a reduction per iteration would cost more than the rest.
    best, runner_up = tl.full([BLOCK], minus, tl.float32), tl.full([BLOCK], minus, tl.float32)
    for at in range(0, d, BLOCK):
        j = at + tl.arange(0, BLOCK)
        x = tl.load(start + j, mask=_inside(j, d, EVEN), other=minus).to(tl.float32)
        runner_up = tl.maximum(runner_up, tl.minimum(best, x))
        best = tl.maximum(best, x)
    largest, winner = tl.max(best, 0, return_indices=True)
    second_largest = tl.max(tl.where(tl.arange(0, BLOCK) == winner, runner_up, best), 0)
    e_second = fn.exponential(second_largest - largest)
    tau_e = fn.over_tau(e_second)
    first, second = first * tau_e, second * tau_e
    totals, totals_h = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    totals_z = tl.zeros([BLOCK], tl.float32)
    last = (tl.cdiv(d, BLOCK) - 1) * BLOCK
    for back in range(0, d, BLOCK):
        j = last - back + tl.arange(0, BLOCK)
        inside = _inside(j, d, EVEN)
        x = tl.load(start + j, mask=inside, other=minus).to(tl.float32)
        e = fn.exponential(x - largest)
        totals += e
        totals_h += fn.step(e, first, first_start, second, second_start)
        if SMOOTHING:
            totals_z += tl.where(inside, x, 0.0)
    total = tl.sum(totals, 0)
    value, _, _ = fn.top(total, e_second, low, b, c)
    beyond = tl.maximum(first_start, second_start) * (last + BLOCK - d)  # as which those places were counted
    total_h = sign * (tl.sum(totals_h, 0) - (second + second_start) - beyond) + value
    label, weight = fn.labels_and_weights(y, w, row, row < n, ignored, WEIGHTED)
    label_z = tl.load(start + label).to(tl.float32)
    label_e = fn.exponential(label_z - largest)
    label_h = sign * fn.step(label_e, first, first_start, second, second_start)
    share = tl.where(weight == 0.0, 0.0, weight / total_h)
    tl.store(stats + row, largest)
    tl.store(stats + n + row, e_second)
    tl.store(stats + 2 * n + row, total)
    tl.store(stats + 3 * n + row, total_h)
    tl.store(stats + 4 * n + row, share)
    tl.store(stats + 5 * n + row, value)
    tl.store(stats + 6 * n + row, tl.where(share == 0.0, 0.0, share * tl.where(label_e == 1.0, value, label_h)))
    if LOSSES:
        target = label_z - largest
        if SMOOTHING:
            target += smoothing * (tl.sum(totals_z, 0) / d - largest - target)
        # An ignored row counts for nothing, even if its loss is infinite.
        tl.store(losses + row, tl.where(weight == 0.0, 0.0, weight * (tl.log(total) - target)))


@triton.jit
def _at_labels(
    y, w, ignored, values, begin, chunk, n, first, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The sums of rows' values and of their weights, each at the row's label, for BLOCK classes from `first` on."""
    k = first + tl.arange(0, BLOCK)
    added, weights = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for offset in range(0, chunk, ROWS):
        i = offset + tl.arange(0, ROWS)
        inside = (i < chunk) & (begin + i < n)
        label, weight = fn.labels_and_weights(y, w, begin + i, inside, ignored, WEIGHTED)
        here = inside & (label >= first) & (label < first + BLOCK)
        if tl.max(here.to(tl.int32), 0) > 0:  # of very many classes, few occur in so few rows
            hit = label[:, None] == k[None, :]
            value = tl.load(values + begin + i, mask=here, other=0.0)
            added += tl.sum(tl.where(hit, value[:, None], 0.0), 0)
            weights += tl.sum(tl.where(hit, weight[:, None], 0.0), 0)
    return added, weights


@triton.jit(**fn.FREE)
def row_columns_kernel(
    z, y, w, temperature, low, reach, ignored, stats, parts, n, d, stride, chunk,
    ANNEALED: tl.constexpr, WEIGHTED: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """tp, predicted and actual of `chunk` rows and BLOCK classes, to `parts` (chunks, 3, d)."""
    a, b, low, cut, _ = fn.numbers(temperature, low, reach, ANNEALED)
    first, first_start, second, second_start, sign = fn.lines(a, b, cut)
    left = tl.program_id(1) * BLOCK
    j = left + tl.arange(0, BLOCK)
    begin = tl.program_id(0).to(tl.int64) * chunk
    predicted = tl.zeros([ROWS, BLOCK], tl.float32)
    for offset in range(0, chunk, ROWS):
        rows = begin + offset + tl.arange(0, ROWS)
        inside = rows < n
        x = tl.load(
            z + rows[:, None] * stride + j[None, :], mask=inside[:, None] & _inside(j, d, EVEN)[None, :], other=0.0
        ).to(tl.float32)
        largest = tl.load(stats + rows, mask=inside, other=0.0)
        e_second = tl.load(stats + n + rows, mask=inside, other=1.0)
        share = tl.load(stats + 4 * n + rows, mask=inside, other=0.0)
        value = tl.load(stats + 5 * n + rows, mask=inside, other=0.0)
        e = fn.exponential(x - largest[:, None])
        tau_e = fn.over_tau(e_second)
        h = fn.step(e, (first * tau_e)[:, None], first_start, (second * tau_e)[:, None], second_start)
        h = tl.where(e == 1.0, (sign * value)[:, None], h)
        # An ignored row may hold anything.
        predicted += tl.where((share != 0.0)[:, None], h * share[:, None], 0.0)
    tp, actual = _at_labels(y, w, ignored, stats + 6 * n, begin, chunk, n, left, WEIGHTED, 8, BLOCK)
    out = parts + tl.program_id(0).to(tl.int64) * 3 * d + j
    mask = _inside(j, d, EVEN)
    tl.store(out, tp, mask=mask)
    tl.store(out + d, sign * tl.sum(predicted, 0), mask=mask)
    tl.store(out + 2 * d, actual, mask=mask)


@triton.jit(**fn.FREE)
def row_gradient_kernel(
    z, y, w, temperature, low, reach, smoothing, ignored, stats, by_loss, by_tp, by_predicted, by_losses, out,
    n, d, stride,
    ANNEALED: tl.constexpr, WEIGHTED: tl.constexpr, LOSSES: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dL/dz; one sweep for the three sums of a row, one that writes. PACKED: as in `tile_gradient_kernel`."""
    a, b, low, cut, c = fn.numbers(temperature, low, reach, ANNEALED)
    by_predicted, scale, through_losses = fn.unpacked(by_loss, by_tp, by_predicted, by_losses, d, LOSSES, PACKED)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    label, weight = fn.labels_and_weights(y, w, rows, inside, ignored, WEIGHTED)
    counts = weight != 0.0
    largest = tl.load(stats + rows, mask=counts, other=0.0)
    e_second = tl.load(stats + n + rows, mask=counts, other=1.0)
    total = tl.load(stats + 2 * n + rows, mask=counts, other=1.0)
    total_h = tl.load(stats + 3 * n + rows, mask=counts, other=1.0)
    start = z + rows * stride
    minus = float("-inf")
    tau_e = fn.over_tau(e_second)[:, None]
    dots_rest, dots_scaled = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    sums_scaled, tops = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    seconds = tl.zeros([ROWS, BLOCK], tl.float32)
    for at in range(0, d, BLOCK):
        j = at + tl.arange(0, BLOCK)
        mask = _inside(j, d, EVEN)
        slope = tl.load(by_predicted + j, mask=mask, other=0.0)[None, :]
        logits = tl.load(start[:, None] + j[None, :], mask=counts[:, None] & mask[None, :], other=minus).to(tl.float32)
        e = fn.exponential(logits - largest[:, None])
        part, rest = fn.scaled(e, tau_e, a, b, cut)
        dots_rest += rest * slope
        dots_scaled += part * slope
        sums_scaled += part
        tops += tl.where(e == 1.0, slope, 0.0)
        seconds += tl.where(e == e_second[:, None], 1.0, 0.0)
    at_label = tl.load(by_tp + label, mask=counts, other=0.0)
    label_e = fn.exponential(tl.load(start + label, mask=counts, other=0.0).to(tl.float32) - largest)
    mean, share, factor, top_scaled, at_top, at_second, at_target, elsewhere = fn.row_slopes(
        weight, scale, through_losses, smoothing, d, total, total_h, e_second, tl.sum(seconds, 1), tl.sum(dots_rest, 1),
        tl.sum(dots_scaled, 1), tl.sum(sums_scaled, 1), tl.sum(tops, 1), at_label, label_e, a, b, low, cut, c,
    )  # fmt: skip
    last = (tl.cdiv(d, BLOCK) - 1) * BLOCK
    for back in range(0, d, BLOCK):
        j = last - back + tl.arange(0, BLOCK)
        mask = _inside(j, d, EVEN)
        slope = tl.load(by_predicted + j, mask=mask, other=0.0)
        logits = tl.load(start[:, None] + j[None, :], mask=counts[:, None] & mask[None, :], other=minus).to(tl.float32)
        e = fn.exponential(logits - largest[:, None])
        part, _ = fn.scaled(e, tau_e, a, b, cut)
        found = fn.entry_slopes(
            e, e_second[:, None], part, slope[None, :], j[None, :] == label[:, None], mean[:, None], share[:, None],
            factor[:, None], top_scaled[:, None], at_top[:, None], at_second[:, None], at_target[:, None],
            elsewhere[:, None],
        )  # fmt: skip
        tl.store(out + rows[:, None] * d + j[None, :], found, mask=inside[:, None] & mask[None, :])
