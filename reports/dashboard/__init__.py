"""A static site over many stored runs: series, steps in them, a page for each run."""
