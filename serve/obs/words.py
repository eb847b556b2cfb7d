"""What the report's terms mean, in one place for the terminal, the page and the documents."""

#: Cause of a late answer: (what happened, what to try first).
CAUSES = {
    "queue": (
        "waited behind other requests for a lane or for memory",
        "more lanes or a larger memory budget; the slack policy if another one is set",
    ),
    "prepare": (
        "an idle lane waited for its inputs, or answering took long",
        "smaller requests and answers, or a resident graph asked for by node ids",
    ),
    "interference": (
        "ran slower than alone because others ran beside it, was suspended for one of them, or "
        "other programs kept it from a core",
        "fewer lanes, one core each; nothing else on the machine",
    ),
    "estimate": (
        "ran longer than estimated without company, needed more memory than was reserved for it "
        "and ran again, or was promised less than it takes alone",
        "a fresh calibration if the machine is slower than it was; less tight targets",
    ),
    "overload": (
        "there was more work than the lanes could do, so someone had to be late",
        "more machines, or fewer requests at the peak: no order of work would do",
    ),
}

#: Why a request has no result.
REASONS = {
    "too_big": "needs more memory than the budget can ever give",
    "queue_full": "the queue was at its bound; the client was told when to try again",
    "draining": "the server was stopping",
    "deadline": "the client's own time limit passed",
    "cancelled": "the client went away",
    "invalid_input": "a tensor was malformed",
    "model_error": "the model raised, or gave an output of a wrong shape",
    "out_of_memory": "the run needed more memory than was reserved for it",
    "lane_lost": "its lane died or stood still, twice",
    "time_limit": "its run took longer than any may",
    "quarantined": "its model ends lanes and is not run for a while",
}

STAGES = {
    "queue": "queue",
    "prepare_exposed": "prepare, exposed",
    "handover": "handover",
    "run": "run",
    "suspended": "suspended",
    "answer": "answer",
}
