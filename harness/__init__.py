"""The benchmark program: plan, run, measure, verify, store. It knows no method by name."""
