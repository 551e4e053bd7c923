"""Reference implementation of Speculative Speculative Decoding (SSD/Saguaro, arXiv 2603.03251)."""
