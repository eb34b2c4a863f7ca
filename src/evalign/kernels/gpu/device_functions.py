"""Triton functions that all kernels share: the step, the gradient of a row, sums over programs, the metric of counts.

Formulas and names are those of `cpu.row_loops` and `cpu.cpu_loss`.
"""

import triton
import triton.language as tl

from evalign.kernels.plan import AGREEMENTS, FORMS

# Arguments that vary between batches, and pointers to single numbers: one program serves them all.
FREE = {
    "do_not_specialize": ["n", "chunk", "ignored"],
    "do_not_specialize_on_alignment": ["y", "w", "temperature", "by_loss", "by_losses"],
}


@triton.jit
def numbers(temperature, low, reach, ANNEALED: tl.constexpr):
    """a, b, low and the ends of the middle line over tau. The temperature stays on the device, for CUDA graphs."""
    if ANNEALED:
        low = tl.load(temperature).to(tl.float32)
        reach = 2.5 * low
    a = tl.where(reach < 1.0, low / tl.where(reach < 1.0, 1.0 - reach, 1.0), 0.0)
    return a, (0.5 - low) / reach, low, tl.where(reach < 1.0, 1.0 - reach, -1.0), 1.0 + reach


@triton.jit
def exponential(x):
    """exp(x) for x <= 0, exactly 1 at 0; results below 2^-126 are 0, which saves three of five instructions."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def over_tau(e_second):
    """Factor that turns e into p / tau."""
    return 2.0 / (1.0 + e_second)


@triton.jit
def lines(a, b, cut):
    """The step below tau as the larger of two lines in p / tau, times the sign: slopes, values at 0, and the sign.

    It is the smaller of them where the step is steeper at first: then both have the other sign. With no cut there is
    one line.
    """
    sign = tl.where(b >= a, 1.0, -1.0)
    one = cut < 0.0
    start = sign * (0.5 - b)
    return sign * tl.where(one, b, a), tl.where(one, start, 0.0), sign * b, start, sign


@triton.jit
def step(e, first, first_start, second, second_start):
    """h(p) times the sign, of slopes already multiplied by `over_tau`; the top is taken to be on the second line."""
    return tl.maximum(e * first + first_start, e * second + second_start)


@triton.jit
def scaled(e, tau_e, a, b, cut):
    """p h'(p), and what is to be added for h(p); the top is taken to be on the line through tau."""
    middle = e >= cut / tau_e
    return tl.where(middle, b * tau_e, a * tau_e) * e, tl.where(middle, 0.5 - b, 0.0)


@triton.jit
def top(total, e_second, low, b, c):
    """The step at a row's largest entry, its slope there, and its derivative by tau."""
    p, tau = 1.0 / total, (1.0 + e_second) / (2.0 * total)
    beyond = p > c * tau
    gap = tl.where(beyond, 1.0 - c * tau, 1.0)
    loss = low * (1.0 - p) / gap
    x = p / tau
    return (
        tl.where(beyond, 1.0 - loss, 0.5 + b * (x - 1.0)),
        tl.where(beyond, low / gap, b / tau),
        tl.where(beyond, -c * loss / gap, -b * x / tau),
    )


@triton.jit
def targets_and_weights(y, w, at, inside, ignored, WEIGHTED: tl.constexpr):
    """Targets and their weights; without weights a target has weight 1, or 0 if it is the `ignored` one."""
    target = tl.load(y + at, mask=inside, other=0)
    if WEIGHTED:
        weight = tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
    else:
        counted = inside & (target != ignored)
        weight = tl.where(counted, 1.0, 0.0)
        target = tl.where(counted, target, 0)
    return target, weight


@triton.jit
def labels_and_weights(y, w, rows, inside, ignored, WEIGHTED: tl.constexpr):
    label, weight = targets_and_weights(y, w, rows, inside, ignored, WEIGHTED)
    return label.to(tl.int32), weight


@triton.jit
def unpacked(by_loss, by_tp, by_predicted, by_losses, d, LOSSES: tl.constexpr, PACKED: tl.constexpr):
    """Pointer to the slopes of predicted, the slope of the loss (1 unless PACKED), and that of the sum of losses."""
    scale, through_losses = 1.0, 0.0
    if PACKED:
        by_predicted, by_losses = by_tp + d, by_tp + 2 * d
        scale = tl.load(by_loss).to(tl.float32)
    if LOSSES:
        through_losses = tl.load(by_losses)
    return by_predicted, scale, through_losses


@triton.jit
def row_slopes(
    weight, by_loss, by_losses, smoothing, d, total, total_h, e_second, seconds, dot_rest, dot_scaled, sum_scaled, tops,
    at_label, label_e, a, b, low, cut, c,
):  # fmt: skip
    """Coefficients of the gradient of a row's entries.

    Sums are over all entries, the top one among them as if it were on the line through tau; `tops` is the slope there,
    `seconds` how many share second place, `dot_rest` is of what `scaled` says to add. Each of the seconds has its part
    of what goes through tau. Where they tie with the top, so has it: all that tells the top apart is then 0, and it
    does not matter that `tops` is the sum of many.
    """
    p, tau = 1.0 / total, (1.0 + e_second) / (2.0 * total)
    value, top_slope, by_tau = top(total, e_second, low, b, c)
    tau_e = over_tau(e_second)
    label_scaled, label_rest = scaled(label_e, tau_e, a, b, cut)
    line = b * tau_e  # which the top was assumed to be on, and which is 1/2 at tau
    is_top = label_e >= 1.0
    label_h = tl.where(is_top, value, label_scaled + label_rest)
    mean = (dot_rest + dot_scaled + (value - (line + (0.5 - b))) * tops + label_h * at_label) / total_h
    share = by_loss * weight / total_h
    entropy = by_loss * by_losses * weight
    rest = dot_scaled - line * tops - mean * (sum_scaled - line) + tl.where(is_top, 0.0, at_label * label_scaled)
    by_top = tops - mean + tl.where(is_top, at_label, 0.0)
    through_tau = share * by_top * by_tau
    half = 0.5 * p * (through_tau - share * rest / tau)
    top_scaled = p * top_slope
    factor = (entropy - share * by_top * top_scaled - tau * through_tau) * p
    tied = e_second >= 1.0
    spread = entropy * smoothing / d
    at_second = tl.where(tied, 2.0 * half, half * e_second) / seconds - spread
    at_target = share * at_label * tl.where(is_top, top_scaled, label_scaled) - entropy * (1.0 - smoothing)
    return share * mean, share, factor, top_scaled, half - spread, at_second, at_target, -spread


@triton.jit
def entry_slopes(
    e, e_second, scaled, slope, is_label, mean, share, factor, top_scaled, at_top, at_second, at_target, elsewhere
):  # fmt: skip
    """The gradient of entries, from the `row_slopes` of their rows, in shapes that broadcast."""
    is_top = e == 1.0
    place = tl.where(e == e_second, at_second, tl.where(is_top, at_top, elsewhere))  # a tied top is also second
    found = (slope * share - mean) * tl.where(is_top, top_scaled, scaled) + (e * factor + place)
    return found + tl.where(is_label, at_target, 0.0)


GROUP = 16  # programs per group; the last program of each group, then the last of all, adds up the sums


@triton.jit
def arrived_last(counter, count):
    """Whether this program is the last of `count` to arrive; it then sees the writes of all of them.

    The counter is 0 again afterwards, for the next kernel.
    """
    tl.debug_barrier()  # all threads of this program have written before one of them signals it
    last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def add_up(parts, count, into, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sum of `count` vectors, (count, width), to `into`, bypassing the L1 cache, which may be stale."""
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
    """True for the last program only: the sum of all programs' vectors, (programs, width), is then in `into`.

    Programs that differ along the grid's second axis alone write parts of one vector. `sums` has space for the sums of
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


@triton.jit
def linear(t0, t1, t2, t3, tp, actual, predicted, total):
    return t0 * tp + t1 * actual + t2 * predicted + t3 * total


@triton.jit
def divided(top, bottom):
    """top / bottom, with 0 for 0 / 0; whether it is 0 / 0, and a safe divisor."""
    empty = bottom == 0.0
    safe = tl.where(empty, 1.0, bottom)
    return tl.where(empty, 0.0, top / safe), empty, safe


@triton.jit
def forms_of(
    tp, predicted, actual, total, k, d, everything, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
    PER_LABEL: tl.constexpr,
):  # fmt: skip
    """The three linear forms of the counts of classes k, see `ClosedForm`; their labels and totals. 0 beyond d."""
    inside = k < d
    hit, label = tl.load(tp + k, mask=inside, other=0.0), tl.load(actual + k, mask=inside, other=0.0)
    guess = tl.load(predicted + k, mask=inside, other=0.0)
    count = tl.load(total + k, mask=inside, other=0.0) if PER_LABEL else tl.where(inside, everything, 0.0)
    top = linear(t0, t1, t2, t3, hit, label, guess, count)
    bottom = linear(b0, b1, b2, b3, hit, label, guess, count)
    weight = linear(w0, w1, w2, w3, hit, label, guess, count)
    return top, bottom, weight, label, count


@triton.jit
def _classes(
    tp, predicted, actual, total, present, k, d, everything, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
    AVERAGE: tl.constexpr, MASKED: tl.constexpr, PER_LABEL: tl.constexpr,
):  # fmt: skip
    """top and bottom of classes k, their share before normalisation, and the total of each."""
    top, bottom, share, label, count = forms_of(
        tp, predicted, actual, total, k, d, everything, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3, PER_LABEL
    )
    if AVERAGE == 3:
        share = tl.where(k == 1, 1.0, 0.0)
    elif AVERAGE != 2:
        share = tl.load(present + k, mask=k < d, other=0).to(tl.float32) if MASKED else tl.where(label > 0.0, 1.0, 0.0)
    guess = tl.load(predicted + k, mask=k < d, other=0.0)
    return top, bottom, share, count, label, guess


@triton.jit
def mean_of_quotients(
    tp, predicted, actual, total, present, slopes, d, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
    AVERAGE: tl.constexpr, MASKED: tl.constexpr, PER_LABEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """1 - mean of top / bottom, 0 for empty counts; and the total. The slopes of tp and predicted go to `slopes`."""
    everything = tl.load(total)
    tops, bottoms = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    shares, scores, plain = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    masses, labels = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    guesses, rates = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for at in range(0, d, BLOCK):
        k = at + tl.arange(0, BLOCK)
        top, bottom, share, count, label, guess = _classes(
            tp, predicted, actual, total, present, k, d, everything, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
            AVERAGE, MASKED, PER_LABEL,
        )  # fmt: skip
        score = divided(top, bottom)[0]
        tops += top
        bottoms += bottom
        masses += count
        chosen = tl.where((k == 1) | (AVERAGE != 3), 1.0, 0.0)
        labels += chosen * label
        guesses += chosen * guess
        rates += tl.where((label == 0.0) & (count > 0.0), guess / tl.where(count > 0.0, count, 1.0), 0.0)
        shares += share
        # A class outside the mean is skipped even if its score is nan.
        scores += tl.where(share == 0.0, 0.0, share * score)
        plain += score
    if PER_LABEL:
        everything = tl.sum(masses, 0)
    nothing = everything == 0.0
    # Binary problems without a positive label: the share of flagged rows; see `Objective.metric_term`.
    alarms = (b2 > 0.0) & (PER_LABEL | (AVERAGE == 3))
    unlabelled = alarms & (tl.sum(labels, 0) == 0.0) & (everything > 0.0)
    one_row = 1.0 / tl.where(nothing, 1.0, everything)
    flagged = tl.sum(guesses, 0) * one_row
    added = tl.sum(shares, 0)
    if AVERAGE == 1:
        value, all_empty, all_safe = divided(tl.sum(tops, 0), tl.sum(bottoms, 0))
    else:
        value, all_empty, whole = divided(tl.sum(scores, 0), added)
        if AVERAGE == 2:  # without labels all classes weigh the same
            value = tl.where(all_empty, tl.sum(plain, 0) / d, value)
            whole = tl.where(all_empty, d, whole)
    for at in range(0, d, BLOCK):
        k = at + tl.arange(0, BLOCK)
        if AVERAGE == 1:
            share = tl.where(all_empty, 0.0, 1.0) + tl.zeros([BLOCK], tl.float32)
            score, safe = value, all_safe
        else:
            top, bottom, share, count, label, _ = _classes(
                tp, predicted, actual, total, present, k, d, everything, t0, t1, t2, t3, b0, b1, b2, b3,
                w0, w1, w2, w3, AVERAGE, MASKED, PER_LABEL,
            )  # fmt: skip
            score, empty, safe = divided(top, bottom)
            if AVERAGE == 2:
                share = tl.where(all_empty, 1.0, share)
            share = tl.where(empty, 0.0, share / whole)
        share = tl.where(nothing | unlabelled, 0.0, share)
        by_predicted = -share * (t2 - score * b2) / safe
        by_predicted = tl.where(unlabelled & ((k == 1) | (AVERAGE != 3)), one_row, by_predicted)
        if AVERAGE == 0:
            rare = alarms & (label == 0.0) & (count > 0.0) & (unlabelled == 0)
            by_predicted = tl.where(rare, 1.0 / (d * tl.where(count > 0.0, count, 1.0)), by_predicted)
        tl.store(slopes + k, -share * (t0 - score * b0) / safe, mask=k < d)
        tl.store(slopes + d + k, by_predicted, mask=k < d)
    lost = 1.0 - value
    if AVERAGE == 0:
        lost += tl.where(alarms, tl.sum(rates, 0) / d, 0.0)
    return tl.where(nothing, 0.0, tl.where(unlabelled, flagged, lost)), everything


MCC = tl.constexpr(FORMS.index("mcc"))


@triton.jit
def agreement(
    tp, predicted, actual, total, slopes, d, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
    FORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """1 - the metric, 0 for empty counts; and the total. Writes the slopes of tp and predicted to `slopes`."""
    everything = tl.load(total)
    n = everything.to(tl.float64)
    right, chance = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    hit, largest = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    of_guesses, of_labels = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    for at in range(0, d, BLOCK):
        k = at + tl.arange(0, BLOCK)
        hits, predictions, truths, label, _ = forms_of(
            tp, predicted, actual, total, k, d, everything, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3, False
        )
        guesses, labels = predictions.to(tl.float64), truths.to(tl.float64)
        hit += tl.load(tp + k, mask=k < d, other=0.0)
        largest = tl.maximum(largest, label)
        right += hits
        chance += guesses * labels
        if FORM == MCC:
            of_guesses += guesses * (n - guesses)
            of_labels += labels * (n - labels)
    by_chance = tl.sum(chance, 0)
    if FORM == MCC:
        spread, other = tl.sum(of_guesses, 0), tl.sum(of_labels, 0)
        flat = (spread <= 0.0) | (other <= 0.0)
        bottom = tl.where(flat, 0.0, tl.sqrt(tl.where(flat, 1.0, spread)) * tl.sqrt(tl.where(flat, 1.0, other)))
        relative = bottom / tl.where(flat, 1.0, 2.0 * spread)
    else:
        bottom = n * n - by_chance
    value, empty, safe = divided(tl.sum(right, 0) * n - by_chance, bottom)
    scale = tl.where(empty, 0.0, 1.0 / safe)
    single = (tl.max(largest, 0) == everything) & (everything > 0.0)  # labels of a single class: accuracy
    each = 1.0 / tl.where(everything == 0.0, 1.0, everything)
    for at in range(0, d, BLOCK):
        k = at + tl.arange(0, BLOCK)
        _, guesses, labels, _, _ = forms_of(
            tp, predicted, actual, total, k, d, everything, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3, False
        )
        growth = relative * (n - 2.0 * guesses) if FORM == MCC else -labels
        by_guesses = scale * (labels + value * growth)
        tl.store(slopes + k, tl.where(single, -each, by_guesses * b0 - scale * n * t0), mask=k < d)
        tl.store(slopes + d + k, tl.where(single, 0.0, by_guesses * b2 - scale * n * t2), mask=k < d)
    lost = tl.where(single, 1.0 - tl.sum(hit, 0) * each, 1.0 - value)
    return tl.where(everything == 0.0, 0.0, lost).to(tl.float32), everything


AVERAGES = tl.constexpr(len(FORMS) - len(AGREEMENTS))


@triton.jit
def value_of_counts(
    tp, predicted, actual, total, losses, present, loss, slopes, d, anchor,
    t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
    FORM: tl.constexpr, LOSSES: tl.constexpr, MASKED: tl.constexpr, PER_LABEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """1 - metric + anchor * losses / total to `loss`; derivatives by tp, predicted and losses to `slopes` (2 d + 1).

    FORM is the metric's index in `plan.FORMS`. One program streams the classes twice, which allows any
    number of them.
    """
    if FORM < AVERAGES:
        result, everything = mean_of_quotients(
            tp, predicted, actual, total, present, slopes, d, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
            FORM, MASKED, PER_LABEL, BLOCK,
        )  # fmt: skip
    else:
        result, everything = agreement(
            tp, predicted, actual, total, slopes, d, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3, FORM, BLOCK
        )
    if LOSSES:
        nothing = everything == 0.0
        by_losses = tl.where(nothing, 0.0, anchor / tl.where(nothing, 1.0, everything))
        result += tl.where(nothing, 0.0, by_losses * tl.load(losses))
        tl.store(slopes + 2 * d, by_losses)
    tl.store(loss, result)
