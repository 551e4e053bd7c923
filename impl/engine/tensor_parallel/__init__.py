"""A model whose every layer is shared out among several devices, one process (rank) each."""
