"""Pages whose tables are made from results: bench/README.md, README.md and docs/."""
