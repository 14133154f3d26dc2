"""Exit statuses of commands, for supervisors that restart runs."""

FINISHED, BUG, REFUSED, DIVERGED, OUTAGE, INTERRUPTED = 0, 1, 2, 3, 4, 130

# Shells also use 130 after Ctrl-C.
MEANINGS = {
    FINISHED: "the run has reached its last step",
    BUG: "a bug, with its traceback",
    REFUSED: "a mistake in the command or the data, which the same command would make again",
    DIVERGED: "the loss, a gradient or a weight is not finite, as it would be again",
    OUTAGE: "a disk, a bucket or another process failed, and the same command resumes when it is well again",
    INTERRUPTED: "a signal or a notice of the machine stopped the run, and the same command resumes",
}
EPILOG = f"Exit status: {'; '.join(f'{status}: {meaning}' for status, meaning in MEANINGS.items())}."

# A cause comes before its effects: an ended process is an outage for the rest.
_CAUSES_FIRST = (BUG, DIVERGED, REFUSED, INTERRUPTED, OUTAGE, FINISHED)


def of_all(statuses: list[int]) -> int:
    """Returns the exit status of a run of several processes: the cause of the rest."""
    return min(statuses, key=lambda status: _CAUSES_FIRST.index(status) if status in _CAUSES_FIRST else -1)
