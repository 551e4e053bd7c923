"""Is a method lossless? The tests behind the certificate; docs/equivalence.md explains them."""
