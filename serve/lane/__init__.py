"""The lane process: torch lives here, and only here."""
