"""`python -m perilune` is the `perilune` command."""

from perilune.cli import main

if __name__ == "__main__":
    main()
