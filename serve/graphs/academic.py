"""A seeded academic graph: authors write papers, papers cite papers and appear at venues.

Degrees are heavy-tailed, as they are in bibliographies: few authors write many papers, few papers
and venues have most of the citations and papers. Every paper has a field of research, which its
authors, citations, venue and features share more often than not, so that it can be learned.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve.typed_names import edge_type

#: Fields of research, the classes of papers.
FIELDS = 4
#: Features of authors, papers and venues.
AUTHOR_FEATURES, PAPER_FEATURES, VENUE_FEATURES = 8, 16, 4
#: Authors ÷ papers, and papers ÷ venues.
_AUTHORS, _PER_VENUE = 0.8, 40
#: Means for a paper: authors beyond the first, and citations.
_CO_AUTHORS, _CITATIONS = 1.5, 6.0
#: Share of authors, citations and venues that are of the paper's own field.
_OWN_FIELD = 0.8
#: Exponent of the power laws; 2 to 3 in most bibliographies.
_EXPONENT = 2.5
_FIRST_YEAR, _YEARS = 1990, 35

_Array = NDArray[Any]


def academic_graph(num_papers: int = 2_000, seed: int = 0) -> dict[str, _Array]:
    """Return the arrays of a graph with about 1.8 nodes and 20 edges for each paper.

    Names are those of ``serve.graphs.typed_load``. Features are FP32, `year.paper` is INT64 [P],
    and `y.paper` INT64 [P] is the field of each paper. Every edge type has its reverse.
    """
    rng = np.random.default_rng(seed)
    num_authors, num_venues = max(1, int(_AUTHORS * num_papers)), 1 + num_papers // _PER_VENUE
    papers, authors, venues = (
        rng.integers(0, FIELDS, count) for count in (num_papers, num_authors, num_venues)
    )
    written = 1 + rng.poisson(_CO_AUTHORS, num_papers)
    cited = np.minimum(rng.poisson(_CITATIONS, num_papers), np.arange(num_papers))
    by_paper = np.repeat(np.arange(num_papers), written)
    writes = _distinct(_picked(papers[by_paper], authors, rng), by_paper, num_papers)
    citing = np.repeat(np.arange(num_papers), cited)
    target = _picked(papers[citing], papers, rng)
    # Papers cite what was published before them: ids are in order of the year.
    kept = target != citing
    ends = np.sort(np.stack([target, citing])[:, kept], axis=0)
    cites = _distinct(ends[1], ends[0], num_papers)
    appears = np.stack([np.arange(num_papers), _picked(papers, venues, rng)])
    edges = {
        ("author", "writes", "paper"): writes,
        ("paper", "written_by", "author"): writes[::-1],
        ("paper", "cites", "paper"): cites,
        ("paper", "cited_by", "paper"): cites[::-1],
        ("paper", "appears_at", "venue"): appears,
        ("venue", "publishes", "paper"): appears[::-1],
    }
    return {
        "x.author": _features(authors, AUTHOR_FEATURES, rng),
        "x.paper": _features(papers, PAPER_FEATURES, rng),
        "x.venue": _features(venues, VENUE_FEATURES, rng),
        "year.paper": _FIRST_YEAR + np.arange(num_papers) * _YEARS // num_papers,
        "y.paper": papers,
        **{
            f"edge_index.{edge_type(*kind)}": np.ascontiguousarray(ends)
            for kind, ends in edges.items()
        },
    }


def _picked(fields: _Array, things: _Array, rng: np.random.Generator) -> _Array:
    """Return a thing for each field, mostly one of that field; `things` are their fields."""
    weights = (1.0 - rng.random(things.size)) ** (-1.0 / (_EXPONENT - 1.0))
    # The structural cut-off, as in ``serve.graphs.generate``.
    weights = np.minimum(weights, np.sqrt(fields.size))
    own = rng.random(fields.size) < _OWN_FIELD
    found = rng.choice(things.size, fields.size, p=weights / weights.sum())
    for field in range(FIELDS):
        of_field = np.flatnonzero(things == field)
        wanted = np.flatnonzero(own & (fields == field))
        if of_field.size:
            share = weights[of_field] / weights[of_field].sum()
            found[wanted] = rng.choice(of_field, wanted.size, p=share)
    return found


def _distinct(sources: _Array, targets: _Array, num_targets: int) -> _Array:
    """Return the edges [2, E] without repeats."""
    keys = np.unique(sources * num_targets + targets)
    return np.stack([keys // num_targets, keys % num_targets])


def _features(fields: _Array, width: int, rng: np.random.Generator) -> _Array:
    """Return FP32 [things, width]: noise around a centre for each field."""
    centres = rng.standard_normal((FIELDS, width))
    noise = 1.5 * rng.standard_normal((fields.size, width))
    return (centres[fields] + noise).astype(np.float32)
