"""The SSD paper's figures (arXiv 2603.03251) from stored runs, each with the table behind it."""
