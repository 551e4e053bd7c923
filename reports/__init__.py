"""Pages and figures made from stored run directories. Never measures and never imports torch."""
