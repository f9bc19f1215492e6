"""The codes with which the programs end. Whoever starts them decides by these what to do next."""

DONE = 0
# The loss diverged. An error of ours, with a traceback, ends with the same code.
DIVERGED = 1
# One message says what; starting again changes nothing. Also the code of errors.UserError.
USER_MISTAKE = 2
# SIGTERM or a preemption notice came, and the state is saved: the same command goes on where it
# stood. 75 is EX_TEMPFAIL of sysexits.h.
PREEMPTED = 75
# No progress within heartbeat_timeout, or another process of the run is gone. The same command
# goes on from the newest checkpoint.
STUCK = 76
# Ctrl-C, as shells report it.
INTERRUPTED = 130
# Output went to a program that ended first (head, less), as shells report it.
NOBODY_READS = 141

# After these the same command may succeed.
WORTH_A_RESTART = (PREEMPTED, STUCK)
