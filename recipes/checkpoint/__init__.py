"""Strategy-neutral checkpoints: named arrays and JSON in, one committed folder out."""
