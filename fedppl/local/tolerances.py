"""Tolerances, sizes and counts of `fedppl.local`; those that numerics have too stand in `fedppl.numerics.tolerances`.

Each has a comment: its unit; its source; what a smaller (−) or larger (+) value does. Sources: "trial" is a value found
by trial, without a record; "memory" and "time" bound the computer's; "epsilon" is 2e-16, the machine's, times what
sums of many terms lose.
"""

from __future__ import annotations

import numpy as np

CLIENTS_AT_ONCE = 1024  # clients of a part; memory; − more calls, + memory
NUMBERS_IN_A_THREAD = 2**20  # numbers in an array of one thread, 8 MiB; memory; − more calls, + memory
DENSITY_ROUNDING = 1e-10  # of the log density of many rows; epsilon; − Gaussians are refused, + others taken
AGREE = 0.003  # log units, of errors and differences that count as small; trial; − time, + error
CONSTANT = 0.02  # log units, of a difference at all points, which moves evidence alone; trial; − time, + error

# `_conditional`: coordinates given which the others are Gaussian
MOST_CONDITIONING = 2  # coordinates; time; − fewer quadratures, + grids of many nodes
MOST_LOCAL = 50  # coordinates of θ among which they are looked for; time; − sampled nodes, + time
PROBE_SDS = -1.0, 0.3, 1.0  # of the prior, for points where θ's density is checked; trial; fewer let others pass
NEAR_SDS, FAR_SDS = 1.0, 10.0  # widths of the prior at most, near and far: units of φ; trial; + no modes of θ
CURVATURE_LENGTH = 1e-2  # sds, of differences of slopes; fourth root of epsilon; − rounding, + bends
CURVATURE_CHANGE = 1e-6  # of the largest; rounding over that length; − all coordinates turn, + none does
GIVEN_SDS = 0.5, -1.0, 2.0  # of c, at which the rest is checked; trial; fewer let others pass
RANDOM_SDS = 0.5, 1.0, 3.0, 10.0, 30.0, 100.0  # of the rest, in random directions; trial; fewer let others pass
ALONG_SDS = np.arange(1.0, 16.0)  # of the rest, along coordinates: a second hump is wider than one; trial
GAUSSIAN_EQUAL = 1e-7  # of changes of the density; root of epsilon; − Gaussians are refused, + others taken

# `_conditional`: quadratures that are compared
REACHES = 4, 6  # arsinh of sds: 27, and where mass is missing 202; docs/exactness.md; − heavy tails, + time
COMPARED = 32  # points at which two rules are; docs/exactness.md; − chance, + time
COVERED = 0.95  # of the points, at which the other rule has a value; trial; − blind, + refuses at the edge
ALIKE = 0.001  # log units, of a difference but for its constant; trial; − finer grids, + error
ALIKE_OF_FEW = 1e-4  # log units, of few nodes, whose error adds up over clients; trial; − finer grids, + error
ALIKE_ON_A_LINE = 2e-5  # log units, of one coordinate: thousands add up; benchmark exactness; − averages, + error
MOST_BY_GRID = 3  # coordinates; time; − sampled nodes, + 9^4 nodes
GRIDS = {2: (7, 11, 15), 3: (5, 7, 9)}  # nodes of each coordinate, in turn; trial; − error, + time
CENTERINGS = 4  # of a quadrature; trial; − off the mass, + time
CLIPPED = 3.0  # times half of the middle two thirds, where tails are clipped; trial; − narrow, + Cauchy's widen it
MIDDLE = 0.16, 0.5, 0.84  # a normal's distribution function at −1, 0 and 1 sds; equation
OFF_CENTER = 1.0  # sds of a mean from its quadrature's center; trial; − time, + error
NARROW, WIDE = 0.5, 2.0  # sds in those of the quadrature, without centering; trial; closer to 1 takes time
NODE_WIDTH = 0.5  # of the gap between nodes, least sd of mass at one; trial; − singular, + wide
LARGE_GAIN = 1e3  # log units of a Newton step, from which its end is evaluated; epsilon; − time, + rounding
RESIDUAL_GAIN = 1e-6  # log units left to gain, in a Gaussian; epsilon of large densities; − refuses, + error

# `_marginal`: the error of Laplace's approximation as a quadratic
SIZES = {1: 9, 2: 7, 3: 5}  # nodes of each coordinate in a grid; trial; − error, + time
NODES_BEYOND_GRIDS = 256  # sampled nodes of many coordinates; time; − error, + time
NOTHING, ALL = 0.1, 0.3  # relative ESS, without trust and with all; trial; in between no jump
MOST_OUTSIDE, LITTLE_OUTSIDE = 0.3, 0.15  # of the integral at outermost nodes, the same; trial; in between no jump
QUADRATIC = 8  # shared coordinates of a quadratic, beyond it is linear; time; − error, + (m + 1)(m + 2) points
NO_ERROR = 1e-7  # log units an sd of q; root of epsilon; − quadratics of rounding, + error
CURVED = 1e-3  # log units an sd of q, from which curvature is estimated; trial; − time, + error
TOO_LARGE = 1e12  # of a log density, without digits for differences; epsilon; names the reason of a failure
SHRUNK = -4.0  # change of a log scale that goes to 0: e^-4 = 0.02; trial; names the reason of a failure
REMAINDERS = (1, 0.02), (4, 0.2), (16, np.inf)  # times as many points, up to this remainder; trial; − time, + error
GRADIENT_REMAINDERS = (1, 0.2), (4, np.inf)  # the same with gradients; trial; − time, + error
LEAST_RELATIVE, FULL_RELATIVE = 0.1, 0.9  # relative ESS, with any k of less and of more; trial; − error, + fallbacks
DEPARTURE_POINTS = 64  # for the departure from a Gaussian; time; − chance, + time

# `advi`
FEWEST_POINTS, MOST_POINTS = 16, 2**20  # that users may ask for; trial, memory; − no covariance, + memory
RESTARTS = 20  # of L-BFGS from where its line search overshot; trial; − fails, + time
EVALUATIONS = 4  # of the objective, at most, for each iteration; trial; − fails, + time
VALUE_DIGITS, SLOPE_DIGITS = 1e-13, 1e-8  # where L-BFGS stops, relative and absolute; epsilon and its root; + off
CORRECTIONS = 30  # that L-BFGS remembers; trial; − steps, + memory
RESTART_GAIN = 1e-10  # relative gain of a restart; epsilon; − time, + off
NO_VALUE = 1e300  # negative log density where there is none, near the largest float
FIRST_LOG_SD = -2.0  # of a mean-field fit; trial; − steps, + no density at first

# `conditional_draws`
CANDIDATES, CANDIDATE_ROUNDS = 8, 2  # half of them normal, half of a t; time; − trajectories, + time
RATIO_VARIANCE = 0.005  # of the density's ratio to Laplace's: one of n candidates is off by 1 / n of it; trial; + error
DRAW_NODES = np.linspace(-9.0, 9.0, 85)  # arsinh of sds: out to 4,000; trial; − tails are cut, + time
FUNNEL_NODES = 11  # of each of two coordinates, for starts of trajectories; trial; − starts off, + time
OUTSIDE = np.log(1e-5)  # largest log density at outermost nodes, the mode's being 0; trial; − time, + tails are cut
TRAJECTORIES, TRAJECTORY_STEPS = 8, 15  # long ones: in a funnel short ones are random walks; trial; − starts, + time
SHORTEST, LONGEST = 0.2, 0.6  # steps in one dimension: a whole turn on average; trial; − walks, + rejections
PARTS = 4  # of an interval between nodes, for a density's cubic; trial; − error, + time
ROUGH = 0.5  # log units, of two rules between nodes, and of slopes there; trial; − trapezoids, + overshoots
LEAST_LOG = -700.0  # log density that counts as 0: e^-700 is no 0 yet; epsilon; + tails are cut

# `gradient_steps`
RISE = 1.0  # nats a row that a client's loss may rise by; trial; − refuses, + diverged ones pass
ROWS_AT_ONCE = 20_000  # copied for many batches; memory; − more calls, + memory
BATCH_PROBE = 0.3  # sds from the prior's mean, where batches are added up; trial; a special place may hide terms
BATCH_ROUNDING = 1e-8  # of the log densities added; root of epsilon; − sums are refused, + others pass

# `integrate`: many clients side by side
CHECKED_ALIKE = 8  # clients of a stack whose θ is checked at all φ; time; − rare ones pass, + time
DISTANCES = 0.5, -1.0, 3.0, -10.0  # sds from a mode, where all are checked; trial; fewer let others pass
NORMAL_EQUAL = 1e-6  # of changes of a Gaussian, by a curvature of differences; trial; − refused, + others taken
MOST_CAREFUL = 512  # clients with a rule of their own each; time; − rules by a sample, + time
SAMPLE = 128  # of more clients, by which their rule is chosen; time; − chance, + time
CHEAP_NODES = {1: (5, 7, 9, 15, 31), 2: (5, 9), 3: (5, 7)}  # of a grid for all, in turn; trial; − error, + time
FINE_NODES = {1: 63, 2: 15, 3: 11}  # that these are compared with; trial; − agree by chance, + time
CHEAP_ERROR = 0.2  # log units, standard error of a rule in the sum, mostly a constant; trial; − time, + error
ROUGH_NODES = {1: 9, 2: 5, 3: 3}  # of a cheap rule at all points; trial; − splines of larger errors, + time
ROUGH_LEVEL = 3  # of a sparse grid, the same; trial; − splines of larger errors, + time
ROUGH_ALONG = 7  # nodes of an axis, the same; odd, so that one is the center; trial; as above

# `log_factors`
SD_A_MEDIAN = 1.48  # of a normal's median size; equation
SHAPING, SHAPINGS = 64, 3  # points of a scramble to fit t's, and fits; trial; − shapes by chance, + time
STREAMS_APART = 2**16  # between the streams of a mixture's parts; more than streams and fits; − streams collide
SAMPLED_NODES = 32, 128, 512  # of a scramble, in turn; time; − error, + time
SPARSE_CHECKED = 4  # points at which sparse grids are compared with sampled nodes; time; − chance, + time
LEAST_REST = 1e-8  # share of some scrambles in the integral; root of epsilon; − infinite errors, + errors are cut
SPLINE_POINTS = 128, 512  # integrated first, and where these do not foretell the rest; docs/exactness.md; − error
DIAGONAL = 1e-5  # of a factor's diagonal, by differences; trial; − products are refused, + time
PRODUCT_EQUAL = 1e-8  # of changes of the density; root of epsilon; − products are refused, + others taken
PRODUCT_SDS = 0.5, 1.0, 2.0, 3.0  # from the mode, where coordinates are moved; trial; fewer let others pass
SPARSE_FEWEST, SPARSE_MOST = 4, 8  # coordinates of a sparse grid; time; grids before, sampled nodes beyond
SPARSE_LEVELS = 4, 5  # each compared with the next; time; − error, + time
SPARSE_COMPARED = 16  # points at which levels are; time; − chance, + time
SPARSE_COVERED = 0.5  # of these, with a value of both; trial; − blind, + refuses at the edge
OTHER_MODE_SDS = 4.0, 12.0, 40.0, 120.0, 400.0, 1200.0  # from the mode, where others are looked for; trial; + time
FLIPPED, EXCHANGED, TURNED = 16, 12, 3  # signs one by one, pairs, and variables turned together; time; − misses, + time
SEVERAL_SDS = 5.0  # by either curvature, within which a quadrature covers both; docs/exactness.md; − refuses, + misses
BACK_SDS = 1.0  # from the first mode, where a search ends: others are farther; trial; − time, + misses
NEGLIGIBLE_MODE = np.log(1e-3)  # of the mass about the first mode; docs/exactness.md; − refuses, + error

# `many`: moments of the own variables of many clients
CHECKED_FOR_NODES = 24  # clients that decide on the nodes; time; − rare ones decide nothing, + time
FEW_NODES = 9  # where these agree with all; time; − clients with all nodes, + time
MANY_NODES = {2: 19, 3: 13}  # of each coordinate; trial; − error, + time
GAUSSIAN_NODES = {1: 9, 2: 9, 3: 7}  # the same where θ is Gaussian given φ; trial; − error, + time
NEGLIGIBLE_NODE = 1e-13  # share of a node, for a mean, and at 200 sds for a variance; epsilon; − time, + error
MEAN_TOLERANCE, VARIANCE_TOLERANCE = 0.002, 0.004  # sds, and of a variance, of few nodes; trial; − time, + error

# `nested_laplace`
PROPOSALS_A_DRAW = 2  # points for each draw; trial; − draws repeat, + time
T_FITS = 8  # of a t to its own weighted points; trial; − NUTS, + time
FIRST_POINTS, LAST_POINTS = 256, 1024  # of a scramble, for fits and moments; time; − error, + time
EACH_COEFFICIENT = 50  # effective points for each coordinate and one; trial; − error, + NUTS
SETTLED = 0.3  # relative ESS of a t that is fitted; trial; − too early, + time
OWN_PARETO = 1.0  # most Pareto k of a client's own posterior, for a first proposal alone; trial; − its mode, + chance
TELLING, WIDENED = 10, 0.5  # effective points a coordinate, with fewer variances are wider by so much; trial; as above
MOST_T_ERROR = 0.1  # sds, standard error of a mean; trial; − NUTS, + error
TILTED_STEPS, TRUST_GROWTH = 30, 2.0  # of a search for φ, and growth of its radius; trial; − no mode, + overshoots
JOINT_ARRIVED = 1e-12  # Newton decrement, log units; epsilon; − rounding, + off
LEAST_STEP = 1e-10  # of a Newton step, halved; epsilon; − time, + ends early

# `nuts`
MOST_DRAWS, FEWEST_DRAWS = 10**7, 20  # of a setting, and in all; memory, trial; − refuses, + memory
JITTER = 0.1  # of a chain's start, in the units of φ and θ; trial; − chains alike, + no density at the start
