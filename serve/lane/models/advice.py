"""What to do about errors of models that their own messages do not tell."""

#: Part of an error's message, and the advice.
_KNOWN = (
    (
        "does not require grad",
        "models run without gradients; one that computes them, as forces from energies, does so"
        " `with torch.inference_mode(False), torch.enable_grad():` on clones of its inputs",
    ),
    (
        "Inference tensors cannot be saved for backward",
        "a model that computes gradients, as forces from energies, does so on clones of its inputs,"
        " made under `torch.inference_mode(False)`",
    ),
)


def advice(error: Exception) -> str:
    """Return what to do about an error that a model has raised; empty where nothing is known."""
    return next((told for part, told in _KNOWN if part in str(error)), "")


def explained(error: Exception) -> str:
    """Return the error's type and message, with advice."""
    found = f"{type(error).__name__}: {error}"
    told = advice(error)
    return f"{found}; {told}" if told else found
