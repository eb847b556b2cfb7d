"""`python -m serve` is the `gnnserve` command."""

from serve.cli import main

if __name__ == "__main__":
    main()
