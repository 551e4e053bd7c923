"""In-house implementations: the engine that every method shares, and the reference SSD/Saguaro."""
