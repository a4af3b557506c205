"""Tolerances, sizes and counts of `fedppl.numerics`.

Each has a comment: its unit; its source; what a smaller (−) or larger (+) value does. Sources: "trial" is a value found
by trial, without a record; "memory" and "time" bound the computer's; "epsilon" is 2e-16, the machine's, times what
sums of many terms lose.
"""

from __future__ import annotations

import numpy as np

TINY = 1e-200  # in place of 0 in a divisor or a logarithm; its power 1.5 is no 0 yet; + touches true values
NUMBERS_AT_ONCE = 2**22  # numbers in an array, 32 MiB; memory; − more passes, + more memory for each thread
DESIGN_BYTES = 2**27  # bytes of designs, of their Gram matrices or of t's in a cache; memory; − made anew each round
POINTS_BYTES = 2**28  # bytes of whitened points in a cache; memory; − made anew each round

# `concentration`: what few rows have alone
LINEAR = 1e-4  # of the largest curvature; error of one-sided differences; − linear terms look curved, + curved linear
COLUMN_ROUNDING = 1e-13  # of unit columns' largest singular value; epsilon; − directions of rounding, + some lost
CLEAR_EIGENVALUE = 1e-6  # of the largest of X'X; half of the digits of epsilon; − fewer digits, + more slow SVDs
GRAM_ROUNDING = 1e-13  # of unit columns' squares in a sum; epsilon; − directions by rounding, + faint ones lost
GRAM_ERROR = 1e-6  # of a column's square: with more it is not known; trial; − faint columns lost, + faint directions
COLUMNS_A_ROW = 0.5  # with more each row has a direction of its own; equation; − misses directions, + refuses all
SHARE_STARTS = 24  # rows of largest leverage to climb from; trial; − may miss the maximum, + time
SHARE_STEPS = 12  # of one climb; trial; − ends below a maximum, + time
SHARE_GAIN = 1e-9  # of a share in a step; epsilon; − steps that gain nothing, + ends below a maximum
JUMP_BESIDE = 1e-6  # of a stretch, for slopes at its ends; trial; − rounding, + jumps near an end are missed
JUMP_SPREAD = (0.5, 1.5)  # times that, at random, so that no attacker knows the place; trial; ratio of places
JUMP_MIDDLE = (0.4, 0.6)  # of a stretch, where it is divided, at random; trial; a wider range leaves longer halves
JUMP_HALVINGS = 12  # then a smooth excess is below 1e-10 of itself; equation; − smooth bends are jumps, + time
JUMP_EXCESS = 1e-6  # of the largest change of a row; trial; − rounding is a jump, + small jumps are missed
JUMP_DIGITS = 1e-7  # of a row's density; root of epsilon; − rounding is a jump, + small jumps are missed
ROWS_A_UNIT = 100  # with fewer honest layers too have a direction of few rows; trial; − false alarms, + misses
FAINT_OF_UNITS = 1e-2  # of the largest singular value: training moves units alike; trial; − false alarms
ALIKE_UNITS = 0.4  # squared cosine of units that differ in few of their rows; trial; − time, + misses
UNITS_A_CHANCE_PAIR = 10  # for one pair by chance: 1 in 12 trained layers of 8 to 64 units has one; − misses, + alarms
SQUARED_UNITS_A_CHANCE_PAIR = 1000  # the same of wide layers, for one of 500 pairs; trained layers; as above
RATIO_ROWS = 64  # by which the ratio of two units' slopes is known; trial; − outvoted by odd rows, + time
UNIT_ROUNDING = 1e-9  # of the largest slope; epsilon; − rounding counts as rows, + differences lost

# `coordinates` in which a posterior is closer to normal
MOST_LOG = 100.0  # log of a scale; far beyond any mass; − clips, + overflows from 709 on
MOST_EIGENVALUE = 60.0  # of a matrix logarithm; far beyond any mass; − clips, + singular covariances
GROWTHS = np.concatenate([[0.0], 10.0 ** np.arange(-3.0, 3.1, 0.5)])  # of a variance with a scale's; trial; grid of b
GROWTH_PASSES = 2  # over scales; trial; − growths of correlated scales are off, + time
GROWTH_POINTS = 1024  # by which growths are chosen; trial; − chance, + time
SPREAD = 0.03  # correlation of a squared location and a log scale; trial; − looks at chance, + misses funnels
SPREAD_BY_CHANCE = 2.0  # standard errors of that correlation, more; 95 % of a normal; as above
POINTS_A_LOCATION = 15  # effective points to look at other directions; trial; − directions by chance, + axes alone
LOW_SHARE = 1.0 / 3.0  # of the weight, with the lowest and with the highest scales; trial; − chance, + both are alike
GAIN = 0.02  # log units a point that a growth has to gain; trial; − stretches by chance, + misses funnels
GAIN_BY_CHANCE = 4.0  # log units in all, more: one coefficient gains 0.5 by chance; equation (Wilks); as above

# `covariance` of parameters over clients
LEAST_VARIANCE = 1e-8  # of the mean variance, of any direction; root of epsilon; − singular, + shrinks real ones
LEAST_SHRINKAGE = 1e-3  # intensity of Ledoit and Wolf; trial; − singular where it is 0, + shrinks
TRACE_FLOOR = 1e-3  # of the mean variance, the default of `trace_constrained`; trial; − near singular, + shrinks

# `importance` sampling
MOST_CONTROL = 1.5  # coefficient of a control variate, 1 where tails are alike; trial; − less gain, + variance
EACH_TELLS = 10.0  # effective points a coordinate to tell a covariance; trial; − noise, + stays with the old one
QUADRATIC_POINTS = 2  # points for each coefficient of a quadratic; trial; − fits noise, + time
GRADIENT_POINTS = 4  # gradients for each coordinate and one; trial; − fits noise, + time
MOST_POINTS_OF_VALUES = 1024  # values for a quadratic, up to 30 coordinates; time; − gradients earlier, + later
LEAST_EIGENVALUE = 0.05  # of a precision or covariance in units of q; trial; − unstable moments, + control unused
LARGE_REMAINDER = 0.5  # log units, sd about a quadratic; trial; − reports errors of 0, + hides errors
EQUAL_WEIGHTS = 1e-7  # log units; root of epsilon; − rounding has a tail, + small tails have none
FEWEST_WEIGHTS = 25  # whose largest fifth, the tail, are five; Vehtari et al. 2024; − tails by chance, + no k
TAIL_SHARE, TAIL_ROOT = 0.2, 3.0  # of S, and of √S, in a tail at most; Vehtari et al. 2024
TAIL_GUESSES, TAIL_SPREAD = 30, 3.0  # of the rate, and its scale in quartiles; Zhang and Stephens 2009
TAIL_PRIOR, TAIL_PRIOR_WEIGHT = 0.5, 10.0  # shape, and its weight in weights; Vehtari et al. 2024
MOST_K = 0.7  # Pareto k of trusted weights; Vehtari et al. 2024; − refuses good ones, + biased moments

# `integral` over local variables by nodes
FAR = {2: (6.0, 25), 3: (4.8, 17)}  # reach of arsinh z, and nodes; trial; − heavy tails, + time
TRAPEZOIDS_A_UNIT = 3  # nodes for each unit of arsinh z; trial; − error, + time
OUTERMOST = 1e-9  # within which nodes are outermost; rounding of Hermite's roots; − none, + inner ones
SPARSE_DIGITS = 12  # decimals to which equal nodes of a sparse grid agree; rounding of Hermite's roots
SPARSE_ROUNDING = 1e-14  # of the largest weight; epsilon; − useless nodes, + misses weights
FLAT = 0.1  # least fall of a log from node to node in a tail; trial; − divides by 0, + tails too small
OF_POWER = 0.3  # relative error of a power's extrapolated tail; trial; − overconfident, + overcautious
HALF_RULE = 1e-12  # least share of a half rule; epsilon; − infinite errors, + errors too small
LOW = 30.0  # log units below the largest; e^-30 = 1e-13; − second peaks are missed, + rounding is a peak
DENSE_REACH = 2.0  # sds within which trapezoids lie dense; trial; − errors too large, + too small
NEAREST = 8  # known points whose residuals give the error at a point; trial; − chance, + not local
PARTS = 4  # of the known points, each (or one) foretold by the others; trial; − worse splines, + time
KNOWN_A_TERM = 4  # known points for each coordinate and two; trial; − splines by chance, + never one
SMOOTH = 0.002  # log units, median error of prediction; trial; − integrates all points, + error
SMOOTH_QUANTILE, SMOOTH_TAIL = 0.9, 10.0  # of these errors, and how many times that it may be; trial; as above

# `pairs`: modes, curvatures, Laplace's approximation
SEARCH_STEPS, NEAR_SEARCH_STEPS = 100, 25  # of a search; from the mode at another φ; trial; − fails, + time
START_LENGTH = 0.1  # a coordinate's sd before its curvature is known, units of θ; trial; − rounding, + bends
LEAST_LENGTH, MOST_LENGTH = 1e-6, 1.0  # sds by which differences are taken, units of θ; trial; − rounding, + bends
FORWARD, CENTRAL = 1e-4, 1e-3  # of these sds, in differences of slopes; above epsilon^(1/2), (1/3); − rounding, + bends
THIRD = 1e-2  # sds of a second difference of slopes; above epsilon^(1/4), optimal; − rounding, + bends
STEP_LENGTHS = (np.ones(1), *(0.5 ** np.arange(first, first + 13) for first in (1, 14, 27)))  # tried at once; trial
CURVATURE_FLOORS = 1e-14, 1.0  # of the largest, in two ways of shifting; epsilon, and one unit for all
FLAT_CURVATURE = 1e-8  # the largest curvature at least; trial; − infinite steps where all is flat, + short ones
FIRST_SHIFT, MOST_SHIFT, SHIFT_GROWTH = 1e-3, 1e26, 4.0  # in a curvature's own units; trial; − time, + short steps
ARMIJO = 1e-4  # of the gain that a slope foretells; Nocedal and Wright, Numerical Optimization, 3.1; + short steps
GAIN_ROUNDING = 1e-12  # of the log density; epsilon; − stops before a mode, + steps that lose
ARRIVED = 1e-10  # Newton decrement, log units; far below errors of integrals; − rounding, + modes are off
LEFT = 1e-6  # Newton decrement, log units, of a mode at most, after a last step; − fails by rounding, + no modes
SECOND_ORDER = 1e-2  # Newton decrement, log units, with which a correction will do; trial; − time, + error
SECOND_ORDER_STEPS = 3  # before a search; trial; − searches, + time
PAIRS_AT_ONCE = 2**15  # pairs computed at once; memory, and a processor's cache; − more calls, + memory
GRADIENT_LENGTH = 1e-6  # of a coordinate's range, to find its curvature; above epsilon^(1/2); − rounding, + bends
HESSIAN_LENGTH = 1e-3  # sds of central differences of gradients; above epsilon^(1/3); − rounding, + bends

# `prior`
CACHED, CACHED_BYTES = 600, 2**15  # sets of points in the cache, and the largest; memory; − computed by each client
DENSE = 2000  # coordinates up to which a prior has a matrix, 32 MiB; memory; − refuses correlated priors
SPREADS = (0.3, 1.0, 3.0, 10.0)  # sds at which a gradient has to be linear; trial; fewer let others pass as normal
LINEAR_GRADIENT = 1e-7  # tolerance of that, of slopes in sds; root of epsilon; − refuses normals, + takes others
PROPER = 1e-12  # least eigenvalue of a scaled precision; epsilon; − singular ones pass, + refuses correlated ones
RATIO_LENGTH = 1e-4  # units of φ, for a Hessian of the prior; above epsilon^(1/3); − rounding, + bends
HEAVY_KURTOSIS = 20.0  # from which quartiles stand for moments; trial; − wide tails uncovered, + sds by few draws
QUARTILES = 1.349  # sds between a normal's quartiles; equation

# `proposals`
DEGREES = 5.0  # of multivariate t's; weights of a normal have a variance; trial; − spread out, + light tails
SCRAMBLES = 8  # independent ones, whose scatter is the error; trial; − uncertain errors, + points less balanced
MOST_TAILS = 6  # coordinates with points along their tails; trial; − tails uncovered, + few points in the middle
HEAVY = 1.2  # times a normal's fourth moment; trial; − tails by chance, + tails uncovered
LEAST_SIDE = 0.1  # of a second moment, for a side's own points; trial; − points wasted, + tails uncovered
POWER_SHARES = 0.5, 0.9  # of a side's second moment, whose reaches tell its tail; trial
POWER = 2.5  # ratio of these reaches, beyond 2.5 degrees of freedom; equation; − heavy t's, + light ones
POWER_DEGREES, OTHER_DEGREES = 1.0, 3.0  # of t's along a side, with and without such a tail; trial; − spread, + light
RIDGE_OF_TAIL = 0.1  # of the covariance, added to a tail's; trial; − one far point decides, + too wide

# `reweighting`
MOST_ERROR = 0.05  # of a mean or an sd, posterior sds; docs/exactness.md; − more points, + worse figures
FEWEST = 100  # effective points; trial; − chance, + refuses
MOST_SECOND_K = 0.7  # Pareto k for a second moment; Vehtari et al. 2024; − refuses, + sds too small
MOST_LOST = 0.01  # of points, or of their weight, without a value; docs/exactness.md; − refuses, + bias
MOST_NOISE = 0.3  # log units, sd of the error of Σ log f_k over the points; docs/exactness.md; − refuses, + bias
OUTERMOST_SHARE = 0.02  # of a second moment, in outermost points whose k counts; trial; − refuses, + sds too small
OUTERMOST_POINTS, POINTS_AN_OUTERMOST = 4, 200  # at least, and one of so many; trial; + more tails count
LEAST_OF_PLAIN = 0.5  # of the least eigenvalue by weights alone, by a control; trial; − near singular, + no control

# `streams` of random numbers
STREAMS = 256  # of points, one byte; many clients share one; memory; − errors of clients add up, + fewer in the cache
UNIFORM_END = 1e-12  # distance of uniform numbers from 0 and 1; 7 sds; − infinite normals, + tails are cut

# `surrogate` of a log density
MOST_FOLDED = 6  # scales, of 64 images; time; − longer tails to fit, + time
WIDE = 2.5  # times as wide as the posterior, a part of the candidates; trial; − tails are made up, + few inside
ROOM = 1.3  # times the posterior's variances, the others; trial; − weights vary, + few inside
WIDER = 0.5 * ROOM * (1.0 + WIDE**2)  # times the posterior's variances, those of candidates; equation
OUTER_PART = 4  # one of so many candidates lies in tails; trial; − few inside, + tails are made up
PARTS_OF_MIXTURE = 16  # at most, each with a stream of its own; more than proposals have; − streams collide
DEEP, DEEPER = 40.0, 2.0  # log units below the largest, and for each coordinate; trial; − few values, + wild tails
MOST_VALUES = 2000  # that a spline goes through; its time grows by their cube; − error, + time
VALUES_A_TERM = 1.3  # for each coefficient of a quadratic; trial; − wild, + no surrogate
MOST_MISSED = 3.0  # log units, of an error that is compared; trial; − blind, + one far point decides
COMPARED = 512  # values by which splines are compared; time; − chance, + time
MANY = 8  # coordinates from which a polynomial is tried; trial; − time, + bends between values missed
HIGH = 25.0  # log units below the largest, and one a coordinate, for a polynomial; trial; − few, + tails bend it
FAR_OUT = 1.5  # squared distance a coordinate, beyond which values count less; trial; − few, + tails bend it
QUADRATIC_RIDGE, RIDGE = 1e-8, 0.01  # of unit terms: of a quadratic, beyond it; epsilon, trial; − wild, + flat
REACH = 4.0  # squared distance a coordinate, up to which such terms grow; trial; − no bends, + peaks made up
ABOVE = 2.0  # log units of a polynomial above a spline alone; docs/exactness.md; − no bends, + peaks made up
SMOOTHING = 1e-3  # of the cubic kernel's units: values are known to thousandths; trial; − ripples, + error
EDGE = 0.9  # of the farthest value's distance, for a slope beyond; trial; − not the edge's slope, + rounding
HIGHER = 1.0  # log units above the highest value as far out; trial; − clips, + peaks made up
LEAST_SLOPE = 1.0  # log units an sd, of a tail beyond all values; trial; − improper tails, + light ones
WALKERS = 512  # of a scramble; trial; − chance, + time
WALK_STEP, WALK_JITTER = 2.38, 0.1  # over √2m, and its relative sd; ter Braak 2006, trial; + rejections
MOMENT_FITS, MOMENT_CANDIDATES, MOMENT_WIDE = 3, 128, 0.5  # of a surrogate's moments; trial; − chance, + time
STEADY = 0.1  # sds, and of a log sd, by which these still move; trial; − time, + off
