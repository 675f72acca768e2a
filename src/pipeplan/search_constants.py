"""Every constant of the search: how long it tries what, how much it looks at, and what its work counts.

Each says what it means, its unit, and what it was measured to bring, or that this was not measured; the worth of whole
steps is in docs/benchmarks/steps.md. A 'part' or 'share' is of 1; devices, blocks, actions and the like are counts.
What a file format, the arithmetic or a paper fixes is no such constant and stands where it is used.
"""

from __future__ import annotations

# Sizes from which on a request is large, and what is then left out ----------------------------------------------------

LARGE = 4_000
"""Blocks x devices beyond which a request is large. Measured: partitioners take seconds, schedules tenths of one."""

MOST_ACTIONS = 500_000
"""Actions of a run of which nothing repeats beyond which it is not planned. Not measured."""

MOST_LAYERS = 10_000
"""Layers beyond which a layout is not planned. Not measured."""

MOST_WRITTEN = 10_000
"""Entries of programs of many devices beyond which what repeats is written once. Measured: 405B on 4,096 is 61 kB."""

MOST_REPEATED = 8
"""Micro-batches of a round that is then written once, at most. Not measured."""

FEW_ACTIONS = 10_000
"""Actions up to which all known schedules are tried: a matter of seconds. Not measured."""

FEW_ENTRIES = 4_000
"""Entries of programs, and blocks, up to which a first plan is made whatever the time. Not measured."""

MOST_WRITTEN_FOR_TARGETS = 50_000
"""Forwards and messages of one pipeline that are written for a target. Measured: some 40 microseconds each."""

FEW_WRITTEN_FOR_TARGETS = 10_000
"""The same where there are more of them. Measured: some 40 microseconds each."""

MOST_ENTRIES = 10_000
"""Entries of a first plan's programs, at most. Measured: one takes some 40 microseconds."""

MOST_REMEMBERED = 200_000
"""Actions of all orders of classic schedules that are remembered. Measured: about 8 MB."""

NOISY = 0.2
"""Mean spread of a profile's times, as a share, from which on predictions are said to be no better. Not measured."""

# The first plan -------------------------------------------------------------------------------------------------------

EVEN_CUT_SECONDS = 2.0
"""Seconds after which it is said that there is no plan yet. Not measured."""

EVEN_CUT_SHARE = 0.2
"""Part of the time left for a first plan after that. Measured: without the step the same plan of 70B on 64."""

EVEN_CUT_WORKING = 3.0
"""Seconds of work that it has in any case. Not measured."""

EVEN_CUT_LEFT = 0.5
"""Part of the time left that these are, at most. Not measured."""

EVEN_CUT_MOST = 0.8
"""Part of what was left that a cut of a large request may take once begun. Not measured."""

LEAN_CUTS = 16
"""Layouts that are cut for little memory where no even cut fits. Not measured."""

EVEN_CUT_HURRY = 1.0
"""Seconds left up to which a first plan is made however late it is. Not measured."""

FIRST_STAGES = 1_024
"""Stages of a first plan beyond which a shorter pipeline comes before it. Measured: 4,096 take 3.3 s, 9,216 6.5 s."""

WRITTEN_MORE = 4
"""Times as many entries of programs by which first plans are told apart. Not measured."""

FIRST_SECONDS = 1.0
"""Seconds of work that every search has for its first plan, however little is left. Not measured."""

LATE = 1.0
"""Seconds a command may be late for its first plan, and to make its last one. Not measured."""

LATE_SHARE = 0.1
"""The same as a part of its limit. Not measured."""

CHUNKS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20)
"""Stages that a device may have in turn: virtual stages of interleaved schedules. Not measured."""

MOST_ENDED = 10
"""Steps that an error has ended, from which on no more candidates are looked at. Not measured."""

MANY_GROUPS = 256
"""Groups of devices beyond which pipelines of fewer than half of them have no rows. Not measured."""

# The order of candidates ----------------------------------------------------------------------------------------------

LOOK_SHARE = 0.5
"""Part of the time left in which candidates are looked at by known schedules. Not measured."""

LOOK_LEAST = 0.1
"""Part of the limit below which, once there is a plan, none is looked at any more. Not measured."""

CHAINS_BETWEEN = 8
"""Chains of the table that are looked at between two other candidates. Not measured."""

CHAINS_FIRST = 48
"""Chains of the table that are looked at before any other candidate. Not measured."""

MANY_KINDS = 1_000
"""Unlike blocks x numbers of shards beyond which rows of one number come first. Measured: a table takes a second."""

NEAR = 1.1
"""Times the best plan that a row should take at most to be looked at before all others. Not measured."""

LONG_LOOK = 30_000
"""Actions of a look at a row that waits while it should be above the best plan. Measured: one took 25 of 60 s."""

FAR = 1.25
"""Times the best row's estimate up to which the best row of another kind comes among the first. Not measured."""

FEW_LOOKED_AT = 4_000
"""Actions a look takes of the rows that come before the best, then 4 times as many. Not measured."""

QUICK_ROWS = 3
"""Rows of each strategy and schedule, of each such number, that come first. Not measured."""

LOOKED_AT_MORE = 4
"""Times as many actions that a look takes after that, and by which one is worth more. Not measured."""

WORTH = 1.08
"""Times the best estimate a quicker look may be. Measured: GPT-3 on 64, rows 9 % longer delay it; on 512, 8 % help."""

CHECKS = 6
"""Times that stages recompute more where true orders do not fit, twice as much more each time. Not measured."""

LEVELLED_TRIES = 4
"""Cuts of stages that share devices and recompute, each with what the one before recomputed. Not measured."""

SEARCHED_ROUNDS = ((8, 0.4), (3, 0.5), (1, 1.0))
"""How many candidates are searched in each round, and their part of the time left. Not measured."""

BACKWARD_WAYS_SHARE = 0.15
"""Part of a candidate's time for each way of running backward, before the better one has the rest. Not measured."""

MUCH_LARGER = 2
"""Times as many entries as the plan made before from which on a larger one is made anew. Not measured."""

# The uniform space, and bounds on its rows ----------------------------------------------------------------------------

MOST_LOOK_UPS = 2**20
"""Blocks' times looked up in each halving of a row's slowest stage. Measured: some hundredths of a second."""

HALVINGS = 12
"""Halvings by which a row's slowest stage is found. Not measured."""

SLACK = 1 - 1e-9
"""Share of a bound that is said: floats are off by less than the rest. Not measured."""

ROOMY = 0.9
"""Part of the memory up to which a row fits by closed forms. Measured: true orders hold some percent more."""

MOST_POSITIONS = 64
"""Positions of a pipeline whose memory is looked at; of more each is much like its neighbours. Not measured."""

ROWS_AT_ONCE = 2**14
"""Rows whose memory is looked at between two looks at the time. Measured: 100,000 take a second or two."""

HELD_CELLS = 2**14
"""Times that a bound on memory and time together tells apart. Not measured."""

HELD_WORK = 2**23
"""Blocks x ways x times looked at for a weight. Measured: four times as many raise bounds by up to 0.3 %, in 0.3 s."""

HELD_WAYS = 10_000
"""Ways of all blocks together beyond which it says nothing. Measured: 7,200 (Llama 405B) take 0.5 s."""

HELD_WEIGHTS = (1 / 256, 1 / 64, 1 / 16, 1 / 4, 1.0, 4.0, 32.0, 512.0)
"""Weights of memory against time, relative to that by which both count as much. Not measured."""

HELD_FINER = 3
"""Rounds in which weights around the best are halved. Not measured."""

BOUND_SECONDS = 0.3
"""Seconds that a search which has ended waits for its bound. Not measured."""

# Layouts whose stages differ, and what is made of the best ones -------------------------------------------------------

DIVIDED_MOST = 12
"""Layouts that divide state looked at in a turn, at most. Not measured."""

DIVIDED_MARGIN = 0.02
"""Share by which closed forms may have them longer than the best plan. Not measured."""

DIVIDED_SHARE = 0.2
"""Part of the time left for them. Not measured."""

DIVIDED_AFTER = 0.5
"""Part of the time after which they are looked at before others are all seen. Not measured."""

OTHER_SCHEDULES_SHARE = 0.2
"""Part of the time left for the best layout in other schedules, each turn. Not measured."""

OWN_WAYS_SHARE = 0.1
"""Part of the time left for stages' own ways, each turn. Measured: 4.8 % on a model of unlike blocks; 70B the same."""

OWN_WAYS_MOST = 12
"""Layouts that are given own ways. Measured: of six none had room in a model with a large head, 17.5 for 20.0 ms."""

OWN_WAYS_GAIN = 0.002
"""Share by which closed forms must have one shorter than the best plan to be looked at. Not measured."""

OWN_WAYS_LESS = 0.94
"""Times the memory for which ways are chosen again where true orders do not fit. Not measured."""

OWN_WAYS_TRIES = 3
"""Tries of that in all. Not measured."""

OWN_WAYS_CUTS = 12
"""Rounds in which cuts and ways are chosen in turn. Not measured."""

MOVES_SHARE = 0.1
"""Part of the time left for moves on the best plan, each turn. Measured: no 70B plan on 64 changes by it."""

MOVES_LONGEST = 2
"""Devices, those with most work, that blocks move from. Not measured."""

MOVES_SHORTEST = 3
"""Devices, those with least work, that blocks move to. Not measured."""

MOVES_NEAR = 1.02
"""Times the best plan that one of another layout takes at most to be moved, too. Not measured."""

MOVES_LAYOUTS = 3
"""Layouts, the best first, of which blocks move. Measured: 70B on 512 takes 7.332 s, with the best alone 7.411."""

DIFFERENT_SHARE = 0.5
"""Part of the time left for plans beside the best, each turn, until there are as many as are shown. Not measured."""

DIFFERENT_MORE = 0.1
"""The same once there are as many. Not measured."""

WIDTHS_BLOCKS = 6
"""Blocks of a chain up to which every cut with every width is enumerated. Measured: seconds."""

WIDTHS_DEVICES = 8
"""Devices up to which it is. Measured: seconds."""

WIDTHS_MOST = 24
"""Cuts, the quickest by 1F1B, that are looked at. Not measured."""

RECOMPUTED_SHARE = 0.2
"""Part of the limit for stages that recompute block by block. Measured: no 70B plan on 64 changes by it."""

RECOMPUTED_SECONDS = 1.0
"""Seconds for that, at least. Not measured."""

RECOMPUTED_QUESTION = 5e-4
"""Seconds between two questions for the time in that work, as counted. Measured: 0.5 ms, of FLAVA 2.9."""

RECOMPUTED_MOST = 20_000
"""Blocks x devices beyond which it is left out. Not measured."""

RECOMPUTED_BLOCKS = 250
"""Blocks beyond which it is left out. Not measured."""

STAGE_GRAPHS_SHARE = 0.15
"""Part of the limit for GraphPipe's stages of one size. Measured: without, none of 8 cells is longer."""

STAGE_GRAPHS_ANY_SHARE = 0.3
"""The same where each stage has a size of its own. Not measured."""

STAGE_GRAPHS_SECONDS = 1.0
"""Seconds for either, at least. Not measured."""

STAGE_GRAPHS_QUESTION = 1e-4
"""Seconds between two questions for the time in that work, as counted. Measured: 0.03 to 0.4 ms, of graphs to 2.2."""

STAGE_GRAPHS_TOLERANCE = 0.01
"""Share by which its bottleneck may miss the least; schedules differ by more. Not measured."""

STAGE_GRAPHS_CHUNKS = 2
"""Stages per device of graphs with branches, where nothing is said. Not measured."""

PLANNERS_MOST = 4_000
"""Blocks x devices beyond which published planners are left out. Measured: DAPPLE takes a second or two a size."""

PLANNERS_SHARE = 0.03
"""Part of the limit for each of these. Measured: on 64 devices DAPPLE took 41 s for eleven sizes of 50 blocks."""

PLANNERS_SECONDS = 1.0
"""Seconds for each, at least. Measured: 0.01 to 0.9 s each for 50 blocks on 8 devices."""

PLANNERS_QUESTION = 1e-3
"""Seconds between two questions for the time in that work, as counted. Measured: 0.2 to 1 ms, and DAPPLE's 2 to 4."""

PLANNERS_DOWNSETS = 500
"""Sets of blocks that may come before a cut up to which Piper is asked. Not measured."""

STAGE_WAYS_MOST = 3
"""Chains of each size of micro-batches whose stages split in own ways. Not measured."""

STAGE_WAYS_SHARE = 0.03
"""Part of the limit for each size of these. Measured: a search of 60 s on 64 devices spent most of it there."""

STAGE_WAYS_SECONDS = 0.5
"""Seconds for each size, at least. Measured: each size of 50 blocks takes 0.1 to 0.5 s on 4 devices."""

STAGE_WAYS_QUESTION = 2e-4
"""Seconds between two questions for the time in that work, as counted. Measured: 0.1 ms on 4 devices, 1 ms on 64."""

ONE_STAGE_SHARE = 0.1
"""Part of the limit for tracking the model as one stage. Not measured."""

ONE_STAGE_SECONDS = 1.0
"""Seconds for that, at least. Not measured."""

SPLIT_SHARE = 0.1
"""Part of the limit for splitting blocks of finalists each in a way of its own. Not measured."""

FINALISTS = 3
"""The best plans that each step which changes finished plans takes on. Not measured."""

EASING_BEYOND = 0.1
"""Part of the limit for easing where a time that counts work is over. Measured: 70B in 4 s, 57.042 to 57.039 s."""

SLICED_FEW = 30_000
"""Actions x stages up to which forwards are sliced at once. Measured: without, 2 of 8 cells up to 0.6 % longer."""

EXCHANGES_MUCH = 1.01
"""Times as long that exchanges by actions may take, which are timed one by one. Not measured."""

EXCHANGES_RUN = 3
"""Micro-batches per stage of the run in which exchanges are timed. Not measured."""

EXCHANGE_NUMBERS = (1, 2, 4, 8)
"""Uses of parameters between two exchanges that are tried, beside one an iteration. Not measured."""

# Partitions -----------------------------------------------------------------------------------------------------------

BASELINE_BLOCKS = 4096
"""Blocks of a chain that baselines cut. Measured: tables of ranges of so many take 128 MB each."""

TABLED_BLOCKS = 2_000
"""Blocks beyond which no tables of all runs are kept. Measured: 32 MB and 8 ms each; of 10,000 blocks 800 MB."""

MAX_SIMULATIONS = 1_000
"""Schemes AutoPipe looks at. Measured: the papers' models need some dozens."""

MAX_SIMULATED = 2_000_000
"""Actions AutoPipe simulates before it ends. Measured: about a second's."""

SIMULATED_FIRST = 4
"""Micro-batches for each stage of the run that it is hoped repeats, then twice as many. Not measured."""

LEAST_POLISHING = 100_000
"""Actions that polishing its scheme may simulate at least. Measured: some hundredths of a second's."""

MOST_CUTS = 100
"""Cuts of a chain up to which all are looked at. Not measured."""

MOST_RANGES = 2**16
"""Ranges of blocks looked at together, which bounds memory. Not measured."""

CANDIDATES_AT_ONCE = 2**20
"""Blocks before an end that are listed together, which bounds memory. Not measured."""

PER_DEVICE = 4
"""Micro-batches per device where nobody says how many there are. Not measured."""

MAX_REBALANCED = 50_000
"""Choices that balancing looks at before it gives up. Measured: some tenths of a second; more bring hardly anything."""

CHOICES_AT_ONCE = 2**17
"""Choices that balancing makes together, which bounds its memory. Not measured."""

MOST_LENGTHS = 64
"""Longest stages that balancing tries. Not measured."""

MOST_LENGTH_RANGES = 2**20
"""Ranges of blocks whose times are looked at for them. Measured: of 10,000 blocks there are fifty times as many."""

BORDER_STEPS = (1, -1, 2, -2)
"""Blocks by which a border between two stages moves. Not measured."""

MOST_OF_MACHINES = 1_000
"""Blocks x devices up to which DAPPLE chooses machines; of more devices come in order. Not measured."""

GRID = 16
"""Totals of samples in flight told apart: all up to twice as many sizes, then so many a doubling. Not measured."""

CHUNK = 256
"""States of GraphPipe's programme that are looked at together. Not measured."""

BOTTLENECK_PARTS = 1_024
"""One part in so many of the least bottleneck, by which it is first looked for upwards. Not measured."""

BOUNDED_PARTS = 64
"""The same for what bounds allow. Not measured."""

BOUNDED_FAR = 8
"""One part in so many from which on it is first asked whether there is any at all. Not measured."""

BOUNDED_WITHIN = 0.001
"""Share within which that is found where memory is limited, at least. Not measured."""

MAX_GROUPS = 3_000
"""Ways to group branches of a parallel part; beyond, groups are of neighbours by work. Not measured."""

SMALL = 16
"""Devices up to which a group may go to any place, not only near groups that one talks to. Not measured."""

MOST_TIMED = 400_000
"""Pairs of devices that mapping may time. Measured: about a second."""

NUM_STARTS = 2
"""Layouts of groups along the devices that are improved. Not measured."""

NUM_KICKS = 12
"""Random exchanges without anything better after which mapping ends. Not measured."""

KICK_EXCHANGES = 3
"""Exchanges of such a turn, at most. Not measured."""

RUN_WEIGHTINGS = 24
"""Weightings of memory against time by which runs of blocks are bounded. Not measured."""

FEW_CONFIGURATIONS = 64
"""Configurations of a block up to which they are few. Not measured."""

MAX_DOWNSETS = 3_000
"""Sets of blocks before a cut beyond which Piper gives up. Measured: pairs become millions."""

SHORTAGE_SECONDS = 2.0
"""Seconds by the clock to find out how much memory would do. Not measured."""

SHORTAGE_PARTS = 100
"""One part in so many of the memory within which that is found. Not measured."""

MOST_CHOICES = 4_096
"""Undominated choices of what some blocks recompute that are kept; the best may be beyond. Not measured."""

MOST_WORKSPACES = 32
"""Largest workspaces looked at for a number of blocks. Not measured."""

RECOMPUTED_LONGEST = 3
"""Times an even share beyond which no stage is looked for at first. Not measured."""

MOST_TIMES = 2**24
"""Ranges of blocks x kinds of stages, at most. Measured: some hundreds of megabytes."""

TIMES_AT_ONCE = 2**20
"""Of these, worked out between two looks at the time. Measured: about a tenth of a second."""

# Schedules ------------------------------------------------------------------------------------------------------------

SHORTER_MOST = 10_000
"""Actions beyond which a shorter run is searched and repeated. Not measured: cannot be switched off."""

SHORTER_TASKS = 2_000
"""Actions that the shorter run has about. Not measured."""

SHORTER_UNROLLS = 12
"""Micro-batches that it lacks are a multiple of this and of the devices, for rounds of 1, 2, 3, 4, 6. Not measured."""

SHORTER_UNROLL = 8
"""Micro-batches of a round that is repeated. Not measured."""

SHORTEST_ROUNDS = 4
"""Rounds of the shortest run in which one micro-batch after another shows what repeats. Not measured."""

LOOPED_MORE = 4
"""Times the actions of a shorter run that is repeated whole, after which it must repeat itself. Not measured."""

ROUNDS_APART = 4
"""Looking back from the end, rounds are tried so far apart that a distance grows by one in so many. Not measured."""

THOROUGH_TASKS = 5_000
"""Actions up to which a first look makes slow schedules, too. Not measured."""

LENGTHENED = 3
"""The best schedules of a shorter run that are lengthened. Not measured."""

LENGTHENED_TASKS = 80_000
"""Actions within which their times must repeat. Measured: with 20,000 DualPipeV of 64 stages has 21.79 s for 19.87."""

CLASSIC_TASKS = 5000
"""Actions up to which all classic schedules are made. Measured: without them 5 of 86 cells up to 5.0 % longer."""

REPETEND_SHARE = 1 / 8
"""Part of the limit for the best pattern. Measured: none of 86 cells longer without, 8 no longer repeat."""

REPETEND_SHARE_ASKED = 1 / 3
"""The same where a repetend is asked for by name. Not measured."""

REPETEND_SHARE_KEPT = 0.5
"""The same in a trial that is searched again for the plan to be repeatable. Not measured."""

PATTERN_SHARE = 0.25
"""Part of the time for the shortest way through a pattern where there is a schedule. Not measured."""

RULES_SHARE = 0.2
"""Part of the limit for built-in rules. Measured: without them 1 of 86 cells 1.0 % longer; with 2 s 5.1 % once."""

RULES_TASKS = 20_000
"""Actions of the schedules of all rules tried. Not measured."""

POLICIES_MANY = 200_000
"""Actions beyond which few policies can be tried. Measured: one takes 3 s of 530,000, 0.4 s of 130,000."""

POLICIES_SHARE = 0.15
"""Part of the limit for list scheduling. Measured: without it 14 of 86 cells longer, up to 41 %."""

POLICIES_FRUITLESS = 400
"""Changes of a policy without improvement after which it ends. Not measured."""

POLICIES_SWEPT = 2
"""Best limits of micro-batches in flight with which all switches are tried. Not measured."""

POLICIES_KEPT = 8
"""Policies that are changed further. Not measured."""

POLICIES_WAITS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.5)
"""Shares of durations that a policy may wait. Not measured."""

POLICIES_PATIENCES = (1.0, 0.5)
"""Shares of a weight gradient that all settings of the switches have. Not measured."""

POLICIES_FORWARDS = (0.0, 0.5, 1.0)
"""Shares of a forward that they wait for a backward. Not measured."""

POLICIES_SLOPES = (0.0, 0.5, 1.0, 2.0)
"""Micro-batches in flight that a device has less than the one before. Not measured: 1 is 1F1B, 2 ZB-H2."""

POLICIES_REPACED = 0.6
"""Part of changes that are of a slot or pace, where all devices run something together. Not measured."""

POLICIES_RESLOTTED = 0.15
"""Part of these that are of the slot. Not measured."""

POLICIES_SPACED = 0.25
"""Part of the rest that are of how far apart micro-batches enter. Not measured."""

POLICIES_REGROUPED = 0.4
"""Part of what is left that are of the group; all others are of the pace. Not measured."""

POLICIES_GROUPS = (1, 2, 3, 4, 6, 8)
"""Micro-batches of a group that is tried, beside what there is room for and one more or less. Not measured."""

POLICIES_RUNS = (0, 1, 1, 2, 3)
"""Runs of devices whose limits change by one, each as likely. Not measured."""

POLICIES_LONG_RUNS = 0.5
"""Part of these that are of more than one device. Not measured."""

POLICIES_REWAITED = 0.3
"""Part of changes in which each of the two waits is another. Not measured."""

POLICIES_SWITCHED = 0.1
"""Part of changes in which each of the two switches is turned. Not measured."""

UNROLLED_SHARE = 1 / 8
"""Part of the limit for several micro-batches per repetend. Measured: for `--scheduler repetend` alone."""

UNROLLED_MOST = 4
"""Micro-batches per repetend, at most. Not measured."""

LAST_ORDERS = 24
"""Orders of a device's last stages that are tried for their weight gradients. Not measured."""

FEW_TASKS = 200
"""Actions up to which proving and solving the whole are worth more time, since they end. Not measured."""

PROVING_SHARE_OF_FEW = 0.25
"""Part of the limit for proving by a few devices where there are so few actions. Not measured."""

PROVING_SHARE_FIRST = 1 / 25
"""Part of the limit for proving by a few devices, before the repetend. Not measured."""

PROVING_SHARE_SECOND = 1 / 10
"""The same after it. Not measured."""

PROVING_SHARE_LAST = 1 / 5
"""The same at the end. Not measured."""

HOISTED_SHARE = 0.2
"""Part of the limit for runs whose outermost blocks are on all devices. Not measured."""

HOISTED_POLICIES_SHARE = 0.6
"""Part of that for list scheduling of what is between. Not measured."""

BETWEEN_SHARE = 0.1
"""Part of the limit for repetends between blocks. Measured: 2 of 12 cells up to 3.8 % shorter, none longer."""

BETWEEN_OPERATIONS = 1_100
"""Operations of a micro-batch of which they are looked for, at most: those of 256 devices. Not measured."""

BETWEEN_UNROLL = 3
"""Micro-batches of such a repetend, at most. Not measured."""

BETWEEN_SLACK = 1.5
"""Times the least period that it may be, at most. Not measured."""

BETWEEN_STEPS = 24
"""Steps of the longest action, at most. Not measured."""

BETWEEN_PLACED = 5_000
"""Actions placed in a try, of one repetend time. Not measured."""

BETWEEN_SWAPPED = 0.3
"""Part of actions of which another than the nearest moment is tried first. Measured: 0.1 finds longer runs."""

BETWEEN_NEAR = 4
"""That other moment is one of so many nearest. Not measured."""

BETWEEN_KNOWN = 100_000
"""States of one repetend time that are known to lead nowhere, at most. Not measured."""

BETWEEN_FRUITLESS = 400
"""Tries without a better plan after which it ends. Not measured."""

WINDOW_SIZES = (40, 80, 160, 320)
"""Actions of windows scheduled again, more where nothing helps. Measured: CP-SAT decides in about a second."""

WINDOW_SECONDS = 1.0
"""Seconds for each window. Measured: without windows 21 of 86 cells longer, up to 2.8 %."""

RAMPS_SHARE = 1 / 8
"""Part of the limit for warmup and cooldown. Measured: without, 5 of 86 cells up to 1.0 % longer, 3 shorter."""

WHOLE_SHARE = 0.5
"""Part of the time left for the whole horizon as one problem. Measured: none longer without; it proves optima."""

WHOLE_TASKS = 600
"""Actions up to which it is tried. Not measured."""

WHOLE_SHARE_OF_FEW = 0.85
"""Part of the time left where there are few actions. Not measured."""

FARTHEST = 1_000
"""Micro-batches apart beyond which order means nothing to a pattern; times that far overflow. Not measured."""

DECISION_PART = 4
"""One part in so many of the time left that a decision about a period gets. Not measured."""

MOST_PERIODS = 1_024
"""Periods between what is excluded and the best that are told apart. Not measured."""

FEWER_SHARE = 0.25
"""Part of the limit for a proved schedule in less memory. Measured: less memory, no plan shorter."""

FEWER_STEP = 0.02
"""Share of the peak by which memory goes down first, then twice as far. Not measured."""

FEWER_LEAST = 0.01
"""Share of the peak below which what is open is left. Not measured."""

FEWER_PART = 0.5
"""Part of the time left for each question. Not measured."""

OTHERS_KEPT = 4
"""Schedules kept beside the best, for the repetitions in them. Not measured."""

TASKS_TRIED = 200_000
"""Actions of the schedules of all settings of a classic schedule that are tried. Measured: all settings up to 5,000."""

LEAST_TRIED = 3
"""Settings tried in any case. Not measured."""

DECODE_STEPS = 4
"""Steps of every group that a plan of decoding says: the first, two that repeat, the last. Not measured."""

DECODE_INSTANCES = 400
"""Operations of all groups up to which the solver is asked. Not measured."""

DECODE_SHORTEST_SHARE = 0.5
"""Part of the time left for the shortest way through. Not measured."""

FALLS = (0.6, 0.88, 0.92, 0.58, 0.84, 0.96, 0.54, 0.64, 0.8, 0.7, 1.0, 0.76)
"""Shares of memory's micro-batches by which those in flight fall to the last device. Measured: up to 2.2 % shorter."""

FALL_TIGHT = 0.88
"""The first of them where memory is tight. Measured: MLLM and NN on 32 devices take 1,080, with 0.6 more than 1,137."""

FALLING_WAIT = 0.5
"""Share of a forward for which these wait for a backward. Not measured."""

TIGHT = 2.0
"""Least period by memory, of that by work, from which memory is tight. Not measured: between 1.3 and 2.7."""

MEETING_MOST = 1.25
"""Least periods by which those that never meet are apart at most. Measured: K in a quarter of its span has 1.125."""

CLOCKED_FROM = 64
"""Devices from which policies by the clock come first. Measured: on 32 others are shorter (K, MLLM, NN)."""

CLOCKED_SLOTS = (1.05, 0.875, 0.625)
"""Clocks in a slot, by the root of a chain's length. Measured: MLLM on 64 devices 1,541 with 7, 1,601 with 16."""

PACES = (0.95, 1.05, 0.85, 1.0, 0.9, 1.1)
"""Shares of the least period at which micro-batches may enter. Not measured."""

PACED_SLOTS = 3
"""Times the forwards of a slot that a group at such a pace has first. Not measured."""

REPACED = (0.9, 0.95, 0.98, 1.02, 1.05, 1.1)
"""Factors by which such a pace is changed. Not measured."""

MODULO_ORDERS = 24
"""Orders of what several devices run together that are tried for a modulo schedule. Not measured."""

MODULO_TASKS = 60
"""Operations of a device up to which it is tried. Measured: milliseconds."""

SETTLING_ROUNDS = 8
"""Repetitions after which times are taken to have settled. Not measured."""

MOST_STARTS = 500_000
"""Starts of stages of a graph that a trial run works out, at most. Not measured."""

KFKB_CHOICES = (1, 2, 4, 8)
"""Forwards in a row, as many backwards, that a stage of a graph may have. Not measured."""

ROOM_QUARTERS = (4, 5, 6, 8, 12)
"""Quarters of the micro-batches that a stage holds at least, tried before all that fit. Not measured."""

STUCK_STEPS = 100
"""Steps without an action after which user functions that refuse everything do so for good. Not measured."""

SEPARATION_PATIENCES = (1.0, 0.5)
"""How late W may end where all are stashed, in shares of its duration. Measured: 0 and the rest bring nothing more."""

SEPARATION_PASSES = 4
"""Bubbles that are backtracked from, at most. Not measured."""

SEPARATED = 4
"""The best sets of rules for which all ways of separating gradients are tried. Not measured."""

# What work counts where seconds are deterministic ---------------------------------------------------------------------

SOLVER_POLL_SECONDS = 0.05
"""Seconds between two looks at whether a solver is to stop. Not measured."""

SOLVER_STOP_SECONDS = 0.2
"""Seconds in which a solver that is asked to stop may do so; preparing a large model it does not hear. Not measured."""

SOLVER_LEAVING_SECONDS = 1.0
"""Seconds that the end of the process waits for solvers left to themselves. Not measured."""

DETERMINISTIC_PER_SECOND = 0.2
"""The solver's deterministic time that counts as a second. Measured: 0.15 to 0.3 with one worker."""

SOLVE_SECONDS = 0.02
"""Seconds that building a model counts, so that many small solves end, too. Not measured."""

SECONDS_PER_QUESTION = 0.01
"""Seconds for placing blocks once, whatever their number. Not measured."""

SECONDS_PER_CUT = 0.2
"""The same of many blocks x devices, tested with true orders for whether it fits. Not measured."""

SECONDS_PER_LOOK = 5e-5
"""Seconds an action of known schedules of a candidate. Not measured."""

SECONDS_PER_SWEEP = 5e-5
"""Seconds an action of a set of built-in rules, and separating gradients. Not measured."""

SECONDS_PER_RULES = 3e-5
"""Seconds an action of a set of rules alone. Not measured."""

SECONDS_PER_PLACED = 2e-6
"""Seconds an action placed in a repetend between blocks of all devices. Not measured."""

SECONDS_PER_POLICY = 5e-6
"""Seconds an action of scheduling by a policy. Not measured."""

SECONDS_PER_TRIALS = 2.5e-4
"""Seconds an action of orders made by trying many. Measured: 1.0e-4 to 4.0e-4."""

SECONDS_PER_RETIMING = 5e-5
"""Seconds an action of the orders there are on stages that have changed. Not measured."""

SECONDS_PER_LABEL = 5e-5
"""Seconds a label of the programme that proves bounds. Not measured."""

# Ends, interruptions, other processes ---------------------------------------------------------------------------------

ENDING = 0.25
"""Seconds of work after the last plan, or for want of one: what is left is counted. Not measured."""

BESIDE_SECONDS = 0.15
"""Seconds for figures of plans beside the best where no time is left. Measured: 0.8 for five of 1,024 stages."""

COUNTING_SECONDS = 0.05
"""Seconds in which what is left is counted. Not measured."""

GIVING_UP = 0.05
"""Part of the time it was being made that giving up half a plan takes. Measured: 0.03 of 1.5 million entries."""

EXPLAINING_SHARE = 1.0
"""Time to explain what was found, by that to make a plan. Measured: 0.26 s and 0.3 of 9,312 actions, busy."""

LAST_PLAN_SECONDS = 0.35
"""Seconds in which a plan is made after an interruption. Measured: with 0.4 some ended after 0.53 to 0.57."""

LAST_SLICES_SECONDS = LAST_PLAN_SECONDS / 2
"""Seconds of these for slicing the forwards of a plan. Not measured."""

LONG_MAKING_SECONDS = LAST_PLAN_SECONDS / 2
"""Seconds beyond which a plan is made on the way, since the end has no time for it. Not measured."""

MAKING_SHARE = 0.1
"""Part of the time for making plans on the way, beside the first and those of many more actions. Not measured."""

WRITING_SHARE = 0.6
"""Time to write and print a plan, by that to make it. Measured: 2.7 s and 4.6 of 1.8 million entries."""

KEPT_SHARE = 0.5
"""Part of the time left that is kept for making a plan, at most. Not measured."""

WORKER_POLL_SECONDS = 0.02
"""Seconds between two looks at whether there is time. Not measured."""

MOST_POLLS = 50
"""Looks in which an executor may notice that a process of its has ended. Not measured."""

WORKERS_AT_ONCE = 8
"""Workers of a given executor for which there is work, where nobody said how many it has. Not measured."""

CANDIDATES_PER_WORKER = 2
"""Candidates that wait or are looked at for each worker. Not measured."""

SCHEDULER_PATIENCE = 5.0
"""Seconds for which a scheduler, and then a worker, is waited for while there is time. Not measured."""

LEAST_PATIENCE = 0.5
"""Seconds for which a worker is waited for in any case. Not measured."""

CLIENT_LEAVING_SECONDS = 0.2
"""Seconds allowed for telling a scheduler that this client leaves. Not measured."""

# What explains a result, or why there is none -------------------------------------------------------------------------

MOST_ALTERNATIVES = 10
"""Plans that an explanation shows. Not measured."""

TIED = 0.01
"""Share within which two estimates are as good: they are further off. Not measured."""

MOST_KEPT_BYTES = 20_000
"""Bytes that alternatives take in a plan's file, at most. Not measured."""

LAYOUT_BYTES = 250
"""Bytes of spaces and line breaks that files have between keys. Not measured."""

LONGEST_WHAT = 1_000
"""Characters of a plan in words, where stages differ much. Not measured."""

MOST_SPLITS = 4
"""Changes of splits from stage to stage beyond which their order is not said. Not measured."""

FORMS_ERROR = 0.02
"""Share by which closed forms are mostly off. Measured on published layouts."""

NAMED_FROM = FORMS_ERROR / 2
"""Share of an iteration from which on what it goes to is named. Not measured."""

SHORTAGE_LEAST_SECONDS = 0.5
"""Seconds in which it is looked for what would do where nothing fits, at least. Not measured."""

SHORTAGE_SEARCH_SHARE = 0.25
"""Part of the time for it that one search has. Not measured."""

SHORTAGE_FEWER = 0.5
"""Part of that time for fewer devices, where several numbers of them are asked for. Not measured."""

SHORTAGE_KEPT = 0.05
"""Part of its time that a search without a plan keeps for that. Not measured."""

SHORTAGE_PRECISION = 1.01
"""Times the least memory within which it is found. Not measured."""

SHORTAGE_ABOVE = (1.0, 1.02, 1.05, 1.1, 1.2)
"""Times as much memory as closed forms ask for in which a layout is tried. Not measured."""

SHORTAGE_TIMES = (1, 2, 4)
"""Times what a plan without a limit takes that are tried as a limit. Not measured."""

SHORTAGE_WORKING = 0.05
"""Part of the limit that the process works for it. Not measured."""

SHORTAGE_MOST_WORKING = 0.5
"""Seconds of that, at most. Not measured."""

SHORTAGE_OPENED = 2.0
"""Times the part for the least memory that flags which fix something have, all together. Not measured."""

SHORTAGE_SCHEDULE_SECONDS = 1.0
"""Seconds for one schedule of a scheduler that is asked for. Not measured."""

ROUGH = 0.01
"""Share within which a frontier is tracked in seconds where the exact one takes minutes. Measured so."""

TOO_LARGE_SECONDS = 5.0
"""Seconds to look for changes that would do where nothing fits. Not measured."""

TOO_LARGE_LEAST_SECONDS = 0.5
"""Seconds for that where the limit is over. Not measured."""

TOO_LARGE_PLAN_SECONDS = 3.0
"""Seconds of these to find a plan that would do. Not measured."""

TOO_LARGE_BOUNDING = 0.2
"""Part of a limit for finding out on each number of devices whether anything can fit. Not measured."""

TOO_LARGE_DEVICES = 8
"""Devices up to which costs of all strategies say exactly how much is too little. Not measured."""

MOST_TIMES_DEVICES = 16
"""Times as many devices that are tried where nothing fits. Not measured."""

REPLAYED_ACTIONS = 60_000
"""Actions of a run of twice the micro-batches up to which it is replayed to see what that brings. Not measured."""

REPLAYED_LATE = 10_000
"""The same of a search that took all its time. Measured: 50,000 take 0.7 s, for which the command would be late."""

LEAST_GAIN = 0.005
"""Share that a next step brings at least to be named. Not measured."""

UNSEARCHED = 0.1
"""What costs are taken to bring of what could not be searched without them, a share. Not measured."""

LEAST_ESTIMATED = 0.02
"""The same by closed forms, which are off by about as much. Not measured."""

NAMED_SIZES = 4
"""Sizes that are named, where there are more of them. Not measured."""

# Frontiers ------------------------------------------------------------------------------------------------------------

FRONTIER_SEARCHING = 0.6
"""Part of the time of a frontier's searches, one on each number of devices. Not measured."""

FRONTIER_MOST_DEVICES = 0.75
"""Part of that for the search on the most devices. Measured: Mixtral 8x7B on 64 H100s 9 % shorter than with half."""

FRONTIER_EACH = 0.5
"""Part of what is left of it for each number of devices after that but the last. Not measured."""

FRONTIER_SHARING = 0.2
"""Part of the time of one stage's frontier for layouts whose devices share sequences or experts. Not measured."""

FRONTIER_FIRST = 0.65
"""Part up to which the quickest uniform layout on each number of devices is made. Not measured."""

FRONTIER_ONE_STAGE = 0.7
"""Part after which strategies of one stage are tracked roughly. Not measured."""

FRONTIER_ROUGH = 0.01
"""Share of the frontier within which they are then. Not measured."""

FRONTIER_ROUGHLY = 0.75
"""Part after which they are not tracked any more. Not measured."""

FRONTIER_CHAINS = 0.8
"""Part after which partitions of the chain make way for what else there is. Not measured."""

FRONTIER_SPLIT = 0.9
"""Part after which split stages do. Not measured."""

FRONTIER_EXPLAINING = 0.5
"""Seconds at least for what would do where nothing fits. Not measured."""

FRONTIER_KEPT = 0.5
"""Part of what its searches leave, where none has a plan, that is kept for saying what would do. Not measured."""

FRONTIER_COUNTING = 0.05
"""Part for counting what was not tried. Not measured."""

FRONTIER_MOST_COUNTING = 2.0
"""Seconds of that, at most. Not measured."""

FRONTIER_MAKING = 0.5
"""Part of the limit that is kept for making plans, at most. Not measured."""

FRONTIER_LATE = 0.5
"""Part of what a command may be late for strategies of one stage. Not measured."""

LIMIT_STEP = 0.92
"""Times the memory of one partition that the next may take, at most. Not measured."""

LIMIT_COARSE = 0.92**4
"""The same in a first pass: frontiers of thousands help nobody. Not measured."""

LIMIT_SCHEDULED = 3
"""Partitions and layouts under a limit, the quickest, that are scheduled. Not measured."""

LIMIT_PASSED = 9
"""Uniform layouts without a fitting cut that are passed over. Not measured."""

LIMIT_GRAPHS = 20
"""Stage graphs that are to share their part of the time. Not measured."""

FRONTIER_SECONDS = 60.0
"""Seconds for whole plans where no limit is given: of them there is no end. Not measured."""

TRACKED_ROUGHLY = 0.3
"""Part of the time in which what is not tracked exactly is tracked roughly. Not measured."""

TRACKED_SOON = 0.5
"""Seconds of work for tracking each number of devices roughly first. Not measured."""

TRACKED_SOON_SHARE = 0.05
"""The same as a part of a limit, at most. Not measured."""

TRACKED_SECONDS = 0.3
"""Seconds for that after an interruption, where there is nothing yet. Not measured."""

SETTLING_SECONDS = 10.0
"""Seconds for strategies of less workspace, so that what is proved holds for peaks. Not measured."""

SETTLING_SHARE = 0.2
"""The same as a part of a limit, at most. Not measured."""

WORKSPACE_LEVELS = 8
"""Frontiers of less and less workspace tracked in any case. Measured: of whole blocks a second each."""

GAP_WEIGHTINGS = 64
"""Weightings by which a frontier is cut into gaps. Not measured."""

CORRIDOR = 0.02
"""The first corridor, as a share of the height of a gap's triangle. Measured: without, 60 s, not 4."""

CORRIDOR_GROWTH = ((100_000, 20.0), (10_000_000, 4.0), (1 << 62, 2.0))
"""Times that a corridor grows, after up to so many sums. Measured: 2 after all but few takes 1.1 times as long."""

POINT_WEIGHTINGS = 24
"""Weightings by which configurations, and then points, are dropped. Measured: bounds make it 2.2 times as quick."""

SUMS_AT_ONCE = 2e7
"""Sums of points up to which a frontier is computed as one. Measured: 2.4 times as quick."""

MERGED = 4096
"""Configurations that branch elimination may make; beyond, heuristics settle a node. Not measured."""

HELD_WEIGHTINGS = 24
"""Weightings in which all strategies are bounded where heuristics held operators to a choice. Not measured."""

HELD_SWEEPS = 60
"""Times that costs go over all edges left, for one such bound, at most. Not measured."""

HELD_GROWTH = 1e-4
"""Share by which a time must raise the bound for another one. Not measured."""

SPREAD_SUMS = 1 << 20
"""Sums that are worth a thread of their own. Not measured."""

AS_QUICK = 100
"""Sums of numbers in the time of one of points. Not measured."""

COMPILED_AFTER = 2e7
"""Sums of points of a process after which further ones are compiled. Measured: some two seconds of numpy's."""

BATCH_POINTS = 1 << 21
"""Sums held at once. Measured: as many as stay near the caches, 16 MiB an array."""

# Targets, comparisons, tuning, decoding, kernels ----------------------------------------------------------------------

TARGET_FREE = 0.3
"""Part of the time in which plans without the target's limits are searched. Not measured."""

TARGET_LEAST = 0.05
"""Part of the limit that must be left for the target's own search. Not measured."""

TARGET_CHUNKED = 3
"""Times the part of the time of a schedule with several stages on each rank. Not measured."""

TARGET_APART_SECONDS = 0.5
"""Seconds of work for what a target costs, at least. Not measured."""

SPARES_RESERVED = 0.25
"""Part of the limit kept, at most, for timing the plan where spare nodes take over. Not measured."""

SPARES_SHARE = 0.5
"""Part of the rest for the plan with spares; the other is for one without. Not measured."""

COMPARED_SECONDS = 0.4
"""Seconds after an interruption until when classic schedules of the first placement are timed. Not measured."""

COMPARED_SEARCHING = 0.8
"""Part of a placement's time that its search has; the rest is for classic schedules. Not measured."""

COMPARED_LEAST = 0.5
"""Part of the time left that timing classic schedules of a placement has in any case. Not measured."""

TUNING_LEAVING_SECONDS = 0.3
"""Seconds that processes have to stop. Not measured."""

TUNING_POLL_SECONDS = 0.05
"""Seconds between two looks at them. Not measured."""

TUNING_PLACED = 32
"""Points of the grid placed at once when there is a plan. Not measured."""

TUNING_PLACING = 0.4
"""Part of the time left in which more are. Not measured."""

TUNING_ROUND = 8
"""Cells of a round, once there is a plan, for processes to share. Not measured."""

TUNING_SAID_AFTER = 2.0
"""Seconds until it is said that there is no row yet. Not measured."""

TUNING_MAKING = 0.4
"""Part of the time up to which plans are made while tuning goes on. Not measured."""

TUNING_SHORTAGE_SECONDS = 5.0
"""Seconds at most for what would do where no cell fits. Not measured."""

MOST_STARTED = 150_000
"""Actions that all built-in rules may start together to be all tried. Not measured."""

ALL_SIZES = 8
"""Devices up to which groups have any number of them; of more, powers of two and all. Not measured."""

MOST_RUN_BYTES = 2 << 30
"""Bytes for times of runs from any block to any other. Measured: enough for some 2,800 blocks."""

GROUPS_PER_STAGE = 2
"""Groups of requests looked at for each stage: with one all work, more hide messages. Not measured."""

DECODE_CHOOSING = 0.8
"""Part of the time in which stages are chosen; scheduling them takes a moment. Not measured."""

DECODE_FIRST_SECONDS = 3.0
"""Seconds of work for a first choice, at least. Not measured."""

SERVING_STEPS = 2_000_000
"""Steps in which stages are evened out that need not be the busiest. Not measured."""

KERNELS_ALONE = 0.6
"""Part of a limit for measuring groups alone; the rest is for runs of the whole model. Not measured."""

KERNELS_TURNS = 3
"""Turns in which a graph level's best cover and the operator level's are measured again. Not measured."""

KERNELS_CUT = 0.3
"""Part of the time for the plan of either cut. Not measured."""

KERNELS_LOOKED = 0.8
"""Part of the time until which variants are looked at. Not measured."""

KERNELS_SECONDS = 0.5
"""Seconds for the plan of the best variant, however late it is. Not measured."""

KERNELS_EACH = 0.5
"""Part of the time left for the plan of each variant but the last. Not measured."""

KERNELS_WAYS = 64
"""Ways to run stages up to which all are looked at. Not measured."""

KERNELS_STAGES = 6
"""Stages of more up to which each set of them is. Not measured."""

KERNELS_CUTS = 200
"""Ways to cut and run stages up to which all are. Not measured."""

# Bounds of a schedule -------------------------------------------------------------------------------------------------

UNROLLED_TASKS = 20_000
"""Actions beyond which the unrolled bound is left out: it matters for few micro-batches. Not measured."""

PACE_RAMP = 3
"""Micro-batches beside those that fill a pipeline until a round can be repeated. Not measured."""

MAX_WRITTEN = 200_000
"""Actions and messages after which a schedule that does not come to repeat itself is given up. Not measured."""

SWEPT_UNROLL = 8
"""Unrolls looked for at every moment of a run; larger ones where samples show them. Not measured."""

LASTING_PART = 4
"""A repetend that lasts for one in so many of all micro-batches is the steady state. Not measured."""

AS_LONG_AS_ANY = 0.5
"""The share of the longest that a repetend lasts which is as good as lasting longest. Not measured."""

REPETEND_SAMPLES = 16
"""Moments of a run at which larger ones are looked for. Not measured."""

MOST_SWEPT = 200_000
"""Actions beyond which only repetends that last are looked for. Measured: others take 5 s of 500,000, 256 devices."""

MAX_REPLAYED = 400_000
"""Actions of the longest replay in which a repetend must become periodic. Not measured."""

FEW_LABELS = 400
"""Labels of a chunk or two looked at for what is known of few micro-batches. Not measured."""

FEW_KINDS = 6
"""Kinds beyond which labels take longer, and fewer are looked at. Not measured."""

MOST_KNOWN = 16
"""Micro-batches of which it is known. Not measured."""

MOST_SEARCHED = 1024
"""Micro-batches beyond which only few of them bound: all would take minutes. Not measured."""

MOST_STORED_BYTES = 700_000_000
"""What labels of all searches together may take. Not measured."""

BYTES_PER_LABEL = 600
"""What a label that is still to be looked at takes in Python's own objects. Measured: 500,000 take some 300 MB."""

COMPILED_FROM_LABELS = 20_000
"""Labels of few kinds from which on the compiled loop is worth a process. Measured: they take 0.6 s without it."""

LABELS_AT_ONCE = 50
"""Labels worked out between two looks at the time. Not measured."""

MOST_ALONE = 16
"""Devices whose own bound is looked for, those with most work and least memory. Not measured."""

FIRST_ALONE = 150
"""Labels of a device alone beside others, at first. Not measured."""

LABELS_ALONE = 10_000
"""Labels of the only device that is left. Not measured."""

FIRST_ROUND = 2_000
"""Labels of the first round of several devices together. Not measured."""

LABELS_MORE = 4
"""Times as many in each further round. Not measured."""

LABEL_ROUNDS = 8
"""Rounds, at most. Not measured."""

LEAST_GROUPS = 3
"""Groups of devices of a size that a round of bounds looks at, at least. Not measured."""

SMALL_GROUP = 4
"""Devices up to which all are looked at together. Not measured."""

SMALL_GROUP_TOGETHER = 8
"""The same where actions are of all devices: so fewer states. Measured: on 8 MLLM and NN are proved by it."""

NEARLY_PROVED = 1.13
"""Times the bound up to which all devices together come first. Measured: 1.1 leaves NN on 8 devices unproved in 5 s."""

TOGETHER_MORE = 16
"""Times as many labels of all devices together then, once loops are compiled. Not measured."""

TOGETHER_SOON = 4
"""The same while they are being compiled. Not measured."""

FEW_ROUNDS = 256
"""Rounds of which each is tried; of more the last ones, then farther and farther ones. Not measured."""
