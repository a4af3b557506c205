"""Tolerances, sizes and counts of `fedppl.algorithms`; those that numerics or local have too stand in theirs.

Each has a comment: its unit; its source; what a smaller (−) or larger (+) value does. Sources: "trial" is a value found
by trial, without a record; "memory" and "time" bound the computer's; "epsilon" is 2e-16, the machine's, times what
sums of many terms lose. Defaults of settings stand in the builders, which describe them.
"""

from __future__ import annotations

import numpy as np

ABOVE_ZERO = 1e-300  # in place of 0 in a divisor or a logarithm; near the least float; + touches true values
SEARCH_BUDGET = 25  # expansions a client: from a prior a million times too wide a dozen do; trial; − stalls, + time
AUTO_STARTS = 4  # searches of starts="auto"; docs/exactness.md; − modes missed, + time
ALONE_STEPS = 50  # Newton steps of a client's own search; trial; − fails, + time
REPAIRED = 1e-6  # of a precision's largest eigenvalue, the least after rounding; half of epsilon's digits; + narrow
NOISE_SDS = 3.0  # standard errors within which EP's moves are noise; trial; − more rounds, + ends too early

# `averaging.fedavg`
MOST_COUNTED = 1e12  # rows, clients or steps of one reply; more than anybody has; − refuses, + one reply decides

# `ep.ep`
LOOK_AWAY, LOOK_AXES = 2.0, 8  # posterior sds from q's mean and axes, where clients look for modes; time; − misses
EVIDENCE_POINTS = 256  # of a scramble of q, for each client; time; − chance, + time
MOST_TRUST = 1e6  # posterior sds that users may ask for, and holds nobody back; trial; + overflows

# `ep.private`
LEAST_SETTING, MOST_SETTING = 1e-50, 1e50  # of a clip, and of noise over it; equation (squares of products are floats)
NOISE_NORM = 12  # noise sds a root of numbers: more have a probability below 1e-20; equation; − refuses honest ones
MOST_CHANGED = 1e3  # bounds of a noised site, that a change may be, since frames change; trial; − refuses honest ones
MASKED_SDS = 1e-6, 1e6  # posterior sds of clip and shared noise; below, 2⁻⁶⁰ is no rounding; above, sums overflow
NOISE_OF_PRECISION = 0.5  # of q's precision, a round's noise in it at most; trial; − short steps, + improper q
MOST_PRIVATE_NOISE = 1.0  # posterior sds of a mean through noise; trial; − never converges, + noise counts as fit

# `ep._rounds`: damping and convergence
MOST_CLAIMED = 0.5  # posterior sds, a client's own Monte Carlo error at most; trial; − error hidden, + one averages all
MOST_ERROR_LEFT = 0.2  # posterior sds, Monte Carlo error of the means at the end; trial; − rounds, + error
STILL_NOISE = 2.0  # times a few errors, that a change may be once rounds are averaged; trial; − to and fro, + drifts
DRIFTS = 2.0  # times the limit of a mean move, from which q still moves; trial; − short averages, + slow rounds
DRIFT_DAMPING = 0.5  # of the largest damping, for a q that moves despite noise; trial; − slow, + noise
AVERAGED_ROUNDS, AVERAGED_REPLIES = 4, 2  # of each client, by which a mean move is judged; trial; − chance, + rounds
SHORTEST_STEP = 0.25  # of 1 / K, with which q stays a convex combination; equation, trial; − time, + no step
GROWN = 2.0  # times the last change, from which steps are too long; trial; − short steps, + q leaves
DAMPING_GROWTH = 1.5  # of the damping with every fall of the change; trial; − slow, + to and fro
TAKES_MOST = 0.5  # of the most precision that is taken, from which a client is named; trial; − more names

# `ep._rounds`: warnings
SKEWED_MARGIN = 0.5  # skewness with which tail quantiles are off by a few tenths of an sd; trial; − warns, + silent
VERY_SKEWED = 1.0  # skewness from which a converged fit warns; trial; − warns, + silent
SEVERAL = 0.4  # of a skewness, without its main client: several make it; trial; − refuses, + sds too small
PULL_CHANCE = 1e-3  # that any client of an honest run pulls so far; a test's level; + names honest clients
MOST_PULL = 20.0  # sds of what others know, beyond any model's heterogeneity; trial; − refuses, + lies pass
ROOM_FOR_PULL = 1.5  # times a pull, a trust that allows it; trial; − holds it back again, + holds back nobody
NO_PULL = 1e-6  # sds of what others know; half of the digits of epsilon; − names pulls of rounding, + none
LITTLE_LEFT = 0.05  # of a site, counts as none: of a pull by 3 sds, 0.15; trial; − held for long, + freed too early
LOOK_NEAR = 0.1  # posterior sds, of the last move, from which clients look for modes; trial; − late, + far from q

# `ep.sites`: what the ledger takes from a reply
# Squared distances: (10^7 sds)² / 2 nats of log q are known to 0.01. A million rows with noise of a tenth under a prior
# sd of a thousand, as the only client, have ratio 10^14. Expansions are summed anew: rounding loses the prior alone.
AGAINST_Q = 1e14  # of q's precision, a tilted one's: q less a site keeps two digits; epsilon; − refuses, + no cavity
AGAINST_PRIOR = 1.0 / float(np.finfo(np.float64).eps)  # of the prior's precision, a curvature; epsilon; − refuses
WRONG_PRIOR_SDS = 1e4  # by which a prior may be wrong; trial; − refuses far data, + takes wrong units
LARGEST_VALUE = AGAINST_PRIOR * WRONG_PRIOR_SDS**2  # nats of log f_k, by these two; equation
NO_VALUE = -1e300  # in place of a log f_k: sums of a million are finite, below all others; near the largest float
MOST_SKEWNESS = 1e4  # of n draws it is below √n, and no client draws 10^8; equation; − refuses, + one reply decides
LARGE_LAYOUT = 300  # coordinates from which a round may take minutes; time; − warns, + silent

# `ep._trust`
SWEEPS = 30  # over sites to draw in; trial; − honest clients are left out, + time
NEAR_BOUND = 0.95  # of the bound, from which a client is near it; trial; − more names
AIM = 0.999  # of the bound, for a site that is drawn in: others change a little; trial; − held more, + more sweeps
BOUND_ROUNDING = 1e-9  # of the bound; epsilon; − endless sweeps, + pulls beyond it
TAKES, GIVES = 0.5, 1e10  # of a cavity's precision, that a site may; equation (q stays proper), epsilon; − holds back
SIZE_SWEEPS = 2  # cuts a client; trial; − precisions too large, + time
HALF_WAY = 0.5  # of its pull, for an odd client within the bound; trial; − held more, + more sweeps
ODD_CANDIDATES = 32  # clients that pull most, who may be the odd one; time; − an honest one is drawn in, + time
CLEARLY = 0.5  # of the disagreement, that remains without another client; trial; − the largest pull decides
LEAST_WEIGHT = 0.1  # of a reply in an average, and of an averaging step; trial; − slow to forget, + noise

# `ep.warm_start`: steps
LENGTHS = 2.0 ** np.arange(-10, 6)  # of the last step, that are compared; trial; fewer take more rounds
ARRIVED = 0.3  # posterior sds of a step or slope, from which EP's weights are good; trial; − rounds, + bad weights
NEARER = 0.25  # of the way to a first point without expansions; trial; − far from it, + rounds
FIRST_RADIUS, WIDEST_RADIUS = 1.5, 100.0  # prior sds of a step; trial; + finds a scale of 0 beside the mode
REPEATED = 0.5  # of an answer's cost, for one from a point again; trial; − no end without a client, + ends early
SEARCH_ROUNDING = 1e-9  # of the log posterior; epsilon; − steps back by rounding, + steps that lose
SMALL_GAIN, SMALL_NATS = 0.5, 1.0  # of a gain, and nats, by which another length is better; trial; − rounds, + short
SINGULAR = 1e-13  # of the largest eigenvalue; epsilon; − steps of rounding, + couplings left out
SUSPECTS = 20  # coordinates whose couplings are left out first; time; − worse steps, + time
LEAST_CURVATURE = 1e-3  # of a scaled diagonal, for a coordinate alone; trial; − long steps, + short ones

# `ep.warm_start`: several searches
START_REACH = 1.0, 2.0, 4.0  # times as far out as the prior's points, in turn; trial; − modes missed, + no density
MODE_SDS = 3.0  # posterior sds from which modes differ; trial; − one counts twice, + two count once
MOST_STARTS = 1000  # that users may ask for; time; − refuses, + time
PRIORS_ALIKE = 0.1  # sds, of moments of equal priors: some come from draws; trial; − no images, + wrong ones
MORE_MASS = 1.0  # nats, of a mode whose images are searched; trial; − searches, + images missed

# `ep.warm_start`: why a search has not arrived
SLOPE_ALONE = 100.0  # times others' slopes; trial; − blames honest clients, + no name
FAR_PRIOR_SDS = 3.0  # from where a prior is at odds with data; trial; − blames it, + no cause
PINNED, PINNED_BEYOND = 1e12, 1e6  # of the prior's precision, the second where clients' has no bound; trial; − blames
CURVES_UP = 0.1  # of the largest curvature upward, from which a client is named; trial; − more names
ALONG_AXIS = 0.3  # of an axis' largest component, from which a coordinate is named; trial; − more names

# `hierarchical.confidence`
NEW_CLIENT_STEPS = 100  # of a new client to its confidence; time; − off, + time
LEAST_SPREAD = np.finfo(float).tiny ** 0.5  # sum of squares; its inverse is a float; + bounds true confidences

# `hierarchical.hm1`
LITTLE_VARIANCE = 0.01  # of the mean variance: factors have taken up clients' own; trial; − silent, + warns
UNRESOLVED = 0.1  # of θ's variance given rows: intervals cover half of what they should; trial; − silent, + warns
FARTHEST = 1e6  # prior sds by which no prior is wrong; trial; − refuses, + one reply decides
FIRST_WEIGHT = 0.01  # of the prior in a client's first solve; trial; − fails, + Ω too small at first
INDEFINITE = 1e-6  # of a factor's largest eigenvalue, below 0; half of epsilon's digits; − refuses rounding
MOST_OF_FACTOR = 1e14  # of the prior's precision, a factor's: as AGAINST_Q; epsilon; − refuses, + no cavity
EM_SHARE = 1e-3  # of a fit's tolerance, for Ω in a round; trial; − time, + rounds
EM_TOLERANCE = 1e-5  # relative change of Ω; trial; − time, + off
EM_STEPS, DENSE_EM_STEPS = 200, 10  # for Ω in a round, and where its inverse is dense; time; − rounds, + time

# `hierarchical.hm1_gradient`: gradient steps, and a client's exact solve
DIVERGED = 1e8  # prior sds; trial; − refuses, + late to say
ISOTROPIC, ISOTROPIC_ZERO = 1e-9, 1e-12  # relative and absolute, of one sd; epsilon; − refuses rounding, + takes others
LEAST_OF_FIXED = 0.2  # of the curvature at fixed local variables, near its mode; trial; − endless pulls, + too narrow
MODE_FLOOR = 1e-10  # of the largest curvature, of any direction with data; epsilon; − long steps, + short ones
MODE_ROUNDING = 1e-10  # of a log density; epsilon; − no step gains, + steps that lose
MODE_ARRIVED = 1e-12  # Newton decrement, log units; epsilon; − rounding, + off
MODE_STEP = 1e-8  # of a Newton step, halved; root of epsilon; − time, + ends early

# `one_shot.consensus`
FEWEST_DRAWS = 4  # of a client: one coordinate and two, and one more; equation; − no precision

# `sums.phases`: values that are asked for, of few and of many clients
PLAIN_WIDE, PILOT_WIDE_OF_MANY = 0.5, 0.125  # of a wide t, in candidates as they come; trial; − tails missed, + few
DRAWS_WIDE = 0.125  # of a wide t, in candidates that stand for the posterior; trial; − tails missed, + fewer effective
INTEGRATED, INTEGRATED_OF_MANY = 64, 0  # points of a batch with θ integrated, at least; time; − error, + time
INTEGRATED_EACH, INTEGRATED_EACH_OF_MANY = 6, 2  # the same for each coordinate and three; time; − error, + time
INTEGRATED_HURRIED, INTEGRATED_EACH_HURRIED = 192, 18  # the same where exchanges are few; time; as above
LATER, LATER_OF_MANY = (2, 3), (1, 2)  # stage from which these are fewer, and by which factor; time; as above
PILOT_PREDICTED, PILOT_PREDICTED_OF_MANY = 0.02, 0.2  # log units, median error of residuals in a pilot; trial; + error
PILOT_PREDICTED_HURRIED = 0.2  # log units, the same where exchanges are few: a proposal may be off; trial; as above
PREDICTED = 0.02  # log units, the same in a stage; docs/exactness.md; − all points integrated, + error
FAR_BELOW = 20.0  # log units below the highest, and one a coordinate: no mass; e^-20 = 2e-9; − tails predicted badly
SURROGATE_DRAWS, MOST_SURROGATE_DRAWS = 1024, 8192  # of a scramble, for the posterior; memory; − chance, + memory
PROBES, PROBES_OF_MANY = 32, 8  # draws with most of a second moment; docs/exactness.md; − made-up tails, + time
CLOSE_OF_MANY = 0.1  # log units, sd of residuals of a surrogate as good as the posterior; trial; − smoothed, + bias

# `sums.phases`: moments
BY_CHANCE = 2.5  # standard errors that many moments differ by, by chance; trial; − stages, + error
VARIANCE_FLOOR = 1e-12  # of a squared unit; epsilon; − no logarithm, + touches true values
TILT_STEPS = 10  # Newton steps; trial; − not put right, + time
TILT_REACH = 5.0  # sds, beyond which a tilt grows no more; trial; − moments missed, + one draw has all weight
TILT_DIGITS = 1e-8  # of the largest singular value; root of epsilon; − wild tilts, + columns left out
TILT_LEFT = 2e-3  # sds and squared sds: columns that depend on each other differ so; trial; − not put right, + error
WIDENS = 1.5  # times another coordinate's sd where a scale is high; trial; − logarithms stay, + densities with edges
QUARTER = 0.25  # of the weight, lowest and highest, to compare these; trial; − chance, + both are alike

# `sums.search`
STENCIL_WIDTH = 0.1  # sds by the curvature, or of the prior, of differences; trial; − rounding, + bends
STENCIL_OF_MANY = 1.0  # sds, of many clients: third derivatives weigh little, points tell more; trial; as above
NARROWER, NARROWINGS = 0.25, 3  # of a stencil where values are missing, and how often; trial; − rounding, + missing
LEAST_OF_SUM = 0.5  # of the prior's precision, that of all clients' own posteriors; trial; + narrow, − far points
WITHIN = 3.0  # times as near as two points of one mode: a search is on another's way; trial; − gives up, + time
SCANNED = 256  # points of the prior to begin from; docs/exactness.md; − modes missed, + time
SCANNED_REACH = 2.0 ** np.array([-0.5, 0.5, 1.5])  # times as far out, in turn; trial; as START_REACH
BASIN = 0.3  # prior sds, in a coordinate at least, between starts; trial; − one basin twice, + modes missed
FIRST_CLIENTS, ALL_AT_FIRST = 256, 2  # that are asked first, and times as many of whom all are; docs/scale.md; + time
CLIENT_GROWTH = 16  # times as many clients next; docs/scale.md; − searches, + long steps of all
ALL_NEXT = 0.25  # of all clients, from which all are asked; docs/scale.md; − time, + searches

# `sums.sums`
FEWEST_EXCHANGES, MOST_EXCHANGES = 3, 9  # own posteriors, a pilot and a stage; with 7 stages 16,000 points; equation
HURRIED_POINTS = 4  # times as many points, where exchanges are few: half the error; docs/exactness.md; − stalls, + time
FEWEST_POINTS = 64  # of a stage, that users may ask for; trial; − chance
FIT_STREAMS = 2**20  # of points, one for each fit at random; trial; − fits share points, + streams overflow
VOID_ROUNDS = 3  # in a row in which a client is missing; trial; − stalls by chance, + waits in vain
NO_CLIENT = 0.5  # of counts, which masks may round; equation (between 0 and 1); beyond it counts are misread
MANY_CLIENTS = 500  # from which the sum hardly departs from a quadratic, and fewer points do; docs/scale.md; − error
POINTS_OF_MANY, FEWEST_OF_MANY = 64, 24  # of a stage, of many and of very many clients; docs/scale.md; − chance
VALUES_OF_MANY = 10**6  # of clients in a stage, between these; docs/scale.md; − chance, + time
EVERYWHERE = 4  # one of so many points, where θ is integrated at all; docs/exactness.md; − time, + chance
MORE_POINTS = 4  # times as many, in a remedy, for half the error; equation; − may not do, + time
SINGLE_POINTS, SINGLE_CLIENTS = 512, 512  # of a scramble for single clients; of whom all are asked; time; − by q
SINGLE_MOVES = 4  # of points to the posterior without a client that tells much; trial; − fewer are exact, + time
SINGLE_MOVED = 192  # points of a scramble after a move; time; − fewer are exact, + time
SINGLE_HALVINGS = 6  # of the power of their weights, until enough are effective; trial; − stays, + slow steps
GAUSSIAN_DRAWS = 4096  # points of q for clients' draws; memory; − chance, + memory
NEVER_DRAWN = 1e-13  # weight of points that clients need not know; 10^4 draws have one by 10^-5; equation; + draws
MADE_UP = 1e-5  # of the posterior, farthest out, where no value tells of a surrogate; trial; − skewness of its own
FLATTENED = 1.0, 0.5, 0.25  # powers of weights for a site, until enough points count; trial; fewer have no site

# `sums.trust`: how far estimates may be off; posterior sds are of a mean, or of an sd
DEFENCE = 0.25  # of a stage's points, whatever the surrogate; docs/exactness.md; − heavy weights, + few inside
BY_DRAWS = 0.008  # posterior sds, by draws of a surrogate; trial; − memory, + error
STAGES, MORE_STAGES = 6, 8  # at most; where more points would do; time; − stalls, + time
WORTH = 1.0  # posterior sds of a stalled fit: the search's Gaussian is better then; trial; − loses it, + worse one
NEARLY = 2.0  # times an error that two more stages are to mend; trial; − stalls, + time
ENOUGH, ENOUGH_DECLARED = 0.012, 0.016  # posterior sds of the last stage, and as declared; docs/exactness.md; + error
LEAST_CHANCE = 0.2  # of `ENOUGH`, a standard error at least; trial; − chance decides, + never the draws' own error
MOST_OFF = 6.0  # standard errors that weights put right; trial; − refuses, + hides misfits
PUT_RIGHT = 0.1  # posterior sds that they put right in any case; trial; − refuses, + hides misfits
MOST_OF_MANY = 0.03  # standard error of the largest of many moments; docs/exactness.md; − stalls, + error
EFFECTIVE, LEAST_EFFECTIVE = 0.3, 0.1  # of points, without another stage, and at all; docs/exactness.md; − error
EVEN = 0.95  # effective share of points whose weights have no tail; trial; − tails by chance, + tails unseen
NO_WEIGHT = 1e-20  # of a draw that adds to no moment; epsilon; − beyond all numbers, + mass lost
FAR_OFF = 50.0  # log units of a surrogate's integral above weights; no converged fit is near; − clips, + overflows
MOVED = 0.05  # posterior sds, by errors of clients' values; docs/exactness.md; − refuses, + error

# `sums.weigh`
STAGE_CANDIDATES, STAGE_WIDE = 512, 0.25  # of a scramble for a batch; of a wide t in them; time, trial; − copies
NORMAL_DRAWS = 512  # of a scramble, of a normal posterior; memory; − chance, + memory
NORMAL_RESIDUAL = 1e-6  # log units, of a quadratic through all values; docs/exactness.md; − refuses, + others taken
SKEWED_SCALE = -0.35  # skewness of a scale's logarithm, for the scale itself; trial; − tails missed, + too many scales
MORE_NORMAL = 0.03  # log units a point that other coordinates have to gain; trial; − by chance, + misses funnels
PILOTS = 2  # more of them, where the first tells too little; time; − stalls, + time
LATE = 3  # stage from which an error is not one of few points above all; trial; − time, + chance
STAGE_GROWTH = 2  # times as many points with each stage from the third on; trial; − stages, + time
FEWEST_OF_SCRAMBLE = 2  # draws: one has no spread; equation; + time
TAIL_KURTOSIS = 5.0  # from which tails have points of their own, 3 of a normal; trial; − wasted points, + uncovered
COPIES = 0.2  # effective share of candidates, below which draws are moved; trial; − copies, + time
PLANE = 2.0  # effective draws a coordinate, to be moved: fewer lie in a plane; trial; − stay there, + copies
WALK_STEPS, SHORT_WALK = 24, 6  # by which draws are moved, for the posterior and for a batch; trial; − copies, + time
PILOT_STREAMS = 1000  # between the streams of stages and of pilots; more than stages; − points repeat
