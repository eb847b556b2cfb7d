"""`python -m serve` is the `gnnserve` command."""

from serve.cli import main

main()
