"""The compiled code: loading it, and choosing the instruction set it runs with. Imports nothing else of the package."""
