"""One module per command of `harness`. Each imports what it needs when it runs, never before."""
