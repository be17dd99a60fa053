"""What comes after training: exports, evaluations, continuations, checkpoints looked after."""
