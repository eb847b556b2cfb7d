"""Explanations of the report's terms, for the terminal, the page and the documents."""

#: By cause of a late answer: (what happened, what to try first).
CAUSES = {
    "queue": (
        "waited behind other requests for a lane or for memory",
        "more lanes or a larger memory budget; the slack policy if another one is set",
    ),
    "prepare": (
        "an idle lane waited for its inputs, or sending the answer took long",
        "smaller requests and answers, or a resident graph with requests by node ids",
    ),
    "interference": (
        "ran slower than alone because of co-runners, was suspended for a more urgent request, or "
        "shared its core with other programs",
        "fewer lanes, one core each; no other programs on the machine",
    ),
    "estimate": (
        "ran longer than estimated without co-runners, needed more memory than was reserved and "
        "ran again, or had a target below its solo time",
        "a new calibration if the machine became slower; looser targets",
    ),
    "overload": (
        "arrived when there was more work than the lanes could finish in time",
        "more machines, or fewer requests at the peak: no scheduling order would suffice",
    ),
    "network": (
        "was in time from its arrival at the server and not from its arrival at the front, or "
        "waited for features that other servers hold",
        "a faster network, clocks that agree, a client that sends to the servers itself; features "
        "of hot nodes on every server",
    ),
}

#: By reason: why a request has no result.
REASONS = {
    "too_big": "needs more memory than the budget can ever give",
    "queue_full": "the queue was full; the client was told when to try again",
    "tenant_limit": "its tenant had as many requests, or sent as many a second, as it may",
    "draining": "the server was stopping",
    "deadline": "the client's own time limit passed",
    "cancelled": "the client cancelled or disconnected",
    "invalid_input": "an input or a parameter was wrong",
    "not_found": "it named a model, a version or a graph that is not there",
    "precondition": "its model and its graph do not fit each other",
    "forbidden": "its credential does not allow what it asked for",
    "unimplemented": "it asked for what the server does not offer",
    "exhausted": "the server had no memory left to take it in; the client may try again",
    "model_error": "the model raised, or returned an output of the wrong shape",
    "nonfinite_output": "its output has NaN or infinity, which model.check_output refuses",
    "out_of_memory": "the run needed more memory than was reserved for it",
    "lane_lost": "its lane died or hung, twice",
    "rows_lost": "another server did not give the features that it holds",
    "time_limit": "its run exceeded the time limit of runs",
    "quarantined": "its model ended lanes again and again and is in quarantine",
    "not_ready": "the server or the model was starting or stopping",
    "unread": "its client cancelled, ran out of time or left before the call was looked at",
    "malformed": "its message was no request",
    "no_message": "its message did not arrive in time",
    "no_thread": "no thread was free for it",
    "message_size": "its message was too large",
    "receiving_bytes": "too many bytes of messages were being received",
}

STAGES = {
    "queue": "queue",
    "prepare_exposed": "prepare, exposed",
    "handover": "handover",
    "run": "run",
    "suspended": "suspended",
    "answer": "answer",
}
