"""Exit codes of the programs; docs/reference/exit_codes.md explains them to users."""

SUCCESS = 0
# The loss diverged. An internal error, with a traceback, has the same code.
DIVERGED = 1
# One message says what; starting again changes nothing. Also the code of errors.UserError.
USER_ERROR = 2
# Verdicts of arena.py; a kept candidate is SUCCESS.
DISCARDED = 10
UNDECIDED = 11
REFUSED = 12
# SIGTERM or a preemption notice; the state is saved, and the same command resumes. 75 is
# EX_TEMPFAIL of sysexits.h.
PREEMPTED = 75
# No progress within heartbeat_timeout, or another process of the run is gone. The same command
# goes on from the newest checkpoint.
STALLED = 76
# Ctrl-C, as shells report it.
INTERRUPTED = 130
# Output went to a program that ended first (head, less), as shells report it.
BROKEN_PIPE = 141

# After these the same command may succeed.
RESTARTABLE = (PREEMPTED, STALLED)
