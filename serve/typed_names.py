"""Names of what is of a type: features of nodes such as `x.author`, and types of edges."""

#: Between an input's name and the node or edge type that it is of, and within an edge type.
_OF, _TO = ".", "__"


def name_parts(name: str) -> tuple[str, str]:
    """Return base and type of a name such as `x.author`; the type is empty where it has none."""
    base, _, of = name.partition(_OF)
    return base, of


def typed_name(base: str, of: str) -> str:
    """Return the name whose parts are `base` and `of`; see ``name_parts``."""
    return f"{base}{_OF}{of}" if of else base


def edge_type(source: str, relation: str, target: str) -> str:
    """Return the name of an edge type, such as `author__writes__paper`."""
    return _TO.join((source, relation, target))


def edge_ends(name: str) -> tuple[str, str]:
    """Return source and target of an edge type; raises ValueError for a name of another form."""
    parts = name.split(_TO)
    if len(parts) != 3:
        raise ValueError(f"'{name}' is no edge type: source__relation__target is wanted")
    return parts[0], parts[2]
