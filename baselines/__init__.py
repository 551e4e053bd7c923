"""The rivals: one decoding method a module, on the shared engine. None knows another."""
