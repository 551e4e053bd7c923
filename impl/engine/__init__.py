"""The inference runtime that every in-house method shares. It knows no decoding method."""
